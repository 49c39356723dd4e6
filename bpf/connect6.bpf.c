#include "calls.h"

SEC("cgroup/connect6")
int dsec_connect6(struct bpf_sock_addr *ctx)
{
    return judge_v6(ctx, AT_CONNECT);
}
