#include "calls.h"

SEC("cgroup/sendmsg6")
int dsec_sendmsg6(struct bpf_sock_addr *ctx)
{
    return judge_v6(ctx, AT_SENDMSG);
}
