/* connect(2), and sendmsg(2) with an address: refused with EPERM before anything is sent. */
#ifndef DSEC_BPF_CALLS_H
#define DSEC_BPF_CALLS_H

#include "decide.h"

#define IPPROTO_MPTCP_ 262 /* TCP on the wire; does not fit the kernel's u8 everywhere */

static __always_inline int judge_call(const struct bpf_sock_addr *ctx, struct address to, int where)
{
    if (is_loopback(&to))
        return 1;
    __u64 cgroup = bpf_get_current_ancestor_cgroup_id(sandbox_level);
    const struct binding *b = bpf_map_lookup_elem(&bindings, &cgroup);
    if (!b)
        return !deny_unbound;
    if (same(&to, &b->own[0]) || same(&to, &b->own[1]))
        return 1;
    __u32 protocol = ctx->protocol;
    struct target t = { .to = to, .where = where };
    t.protocol = protocol == IPPROTO_MPTCP_ ? IPPROTO_TCP : protocol;
    if (t.protocol == IPPROTO_TCP || t.protocol == IPPROTO_UDP)
        t.port = bpf_ntohs((__u16)ctx->user_port);
    if (!dsec_decide(b, &t)) {
        dsec_denied(cgroup, &t);
        return 0;
    }
    struct counters *c = bpf_map_lookup_elem(&counts, &cgroup);
    if (c)
        __sync_fetch_and_add(&c->allowed_calls, 1);
    return 1;
}

static __always_inline int judge_v4(struct bpf_sock_addr *ctx, int where)
{
    return judge_call(ctx, mapped(ctx->user_ip4), where);
}

static __always_inline int judge_v6(struct bpf_sock_addr *ctx, int where)
{
    struct address to = { .word = { ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2],
                                    ctx->user_ip6[3] } };
    return judge_call(ctx, to, where);
}

#endif
