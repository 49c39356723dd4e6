#include "calls.h"

SEC("cgroup/sendmsg4")
int dsec_sendmsg4(struct bpf_sock_addr *ctx)
{
    return judge_v4(ctx, AT_SENDMSG);
}
