/* No sandbox reaches these programs and maps, whatever its filter of system calls says. */
#include "decide.h"

SEC("lsm/bpf")
int BPF_PROG(dsec_bpf, int command)
{
    __u64 cgroup;
    return verdict(bound(&cgroup) != NULL);
}
