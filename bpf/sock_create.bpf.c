/* The kernel asks for AF_INET and AF_INET6 only (inet_create, inet6_create): other families are the
 * business of the system call filter, and what packet sockets send, of the program on the link.
 */
#include "decide.h"

#define SOCK_RAW_ 3
#define IPPROTO_MPTCP_ 262

static __always_inline int is_plain(const struct bpf_sock *sk)
{
    if (sk->type == SOCK_RAW_)
        return 0;
    switch (sk->protocol) {
    case IPPROTO_TCP:
    case IPPROTO_UDP:
    case IPPROTO_ICMP:
    case IPPROTO_ICMPV6:
    case IPPROTO_MPTCP_: return 1;
    default: return 0;
    }
}

SEC("cgroup/sock_create")
int dsec_sock_create(struct bpf_sock *sk)
{
    if (is_plain(sk))
        return 1;
    __u64 cgroup = bpf_get_current_ancestor_cgroup_id(sandbox_level);
    const struct binding *b = bpf_map_lookup_elem(&bindings, &cgroup);
    if (!b)
        return !deny_unbound;
    if (b->flags & BOUND_RAW)
        return 1;
    struct target t = { .protocol = sk->protocol, .where = AT_SOCKET };
    dsec_denied(cgroup, &t);
    return 0;
}
