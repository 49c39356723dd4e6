#include "calls.h"

SEC("cgroup/connect4")
int dsec_connect4(struct bpf_sock_addr *ctx)
{
    return judge_v4(ctx, AT_CONNECT);
}
