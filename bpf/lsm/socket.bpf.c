/* Which unix sockets and AF_VSOCK peers are reached. */
#include <linux/socket.h>
#include "decide.h"

#define AF_VSOCK_ 40
#define FAMILY_BYTES 2

struct sockaddr_vm_head { /* of struct sockaddr_vm, linux/vm_sockets.h */
    __u16 family, reserved;
    __u32 port, cid;
};

static __noinline int denies_abstract(const struct binding *b, __u64 cgroup,
                                     const struct unix_address *address)
{
    struct abstract_key key = { .cgroup = cgroup };
    const char *path = (const char *)address +
                       bpf_core_field_offset(struct unix_address, name) + FAMILY_BYTES;
    /* behind the NUL that makes it abstract */
    __u32 length = BPF_CORE_READ(address, len) - FAMILY_BYTES - 1;
    if (length >= ABSTRACT_BYTES)
        return 1;
    key.length = length;
    asm volatile("" : "+r"(length));
    if (bpf_probe_read_kernel(key.name, length & 127, path + 1))
        return 1;
    const __u32 *deny = bpf_map_lookup_elem(&abstracts, &key);
    return deny ? *deny : b->flags & BOUND_ABSTRACT_DENY;
}

static __always_inline int judge_socket(const struct sock *other)
{
    __u64 cgroup;
    const struct binding *b = bound(&cgroup);
    if (!b)
        return 0;
    const struct unix_sock *peer = (const struct unix_sock *)other;
    const struct dentry *dentry = BPF_CORE_READ(peer, path.dentry);
    if (dentry) {
        struct denial denied = {};
        find(b, cgroup, dentry, &denied);
        return verdict(denied.access & CONNECT);
    }
    const struct unix_address *address = BPF_CORE_READ(peer, addr);
    return verdict(address && denies_abstract(b, cgroup, address));
}

SEC("lsm/unix_stream_connect")
int BPF_PROG(dsec_unix_stream_connect, struct sock *sock, struct sock *other)
{
    return judge_socket(other);
}

SEC("lsm/unix_may_send")
int BPF_PROG(dsec_unix_may_send, struct socket *sock, struct socket *other)
{
    return judge_socket(BPF_CORE_READ(other, sk));
}

static __always_inline int judge_vsock(const struct socket *sock, const void *address)
{
    if (!address || BPF_CORE_READ(sock, sk, __sk_common.skc_family) != AF_VSOCK_)
        return 0;
    __u64 cgroup;
    const struct binding *b = bound(&cgroup);
    if (!b)
        return 0;
    struct sockaddr_vm_head to = {};
    if (bpf_probe_read_kernel(&to, sizeof to, address))
        return -EACCES;
#pragma clang loop unroll(disable)
    for (__u32 i = 0; i < PEERS; i++) {
        const struct peer *rule = &b->peer[i];
        if (i >= b->peers)
            break;
        if ((rule->any_cid || rule->cid == to.cid) && rule->first_port <= to.port &&
            to.port <= rule->last_port)
            return verdict(rule->deny);
    }
    return verdict(b->flags & BOUND_VSOCK_DENY);
}

SEC("lsm/socket_connect")
int BPF_PROG(dsec_socket_connect, struct socket *sock, void *address)
{
    return judge_vsock(sock, address);
}

SEC("lsm/socket_sendmsg")
int BPF_PROG(dsec_socket_sendmsg, struct socket *sock, struct msghdr *message)
{
    return judge_vsock(sock, message->msg_name);
}
