/* Where a packet goes, read from its headers; everything that is not understood is refused. */
#ifndef DSEC_BPF_PACKET_H
#define DSEC_BPF_PACKET_H

#include "decide.h"

#define EXTENSIONS 6 /* headers of IPv6 between its own and the transport's */

enum { REMOTE_IS_DESTINATION, REMOTE_IS_SOURCE };

/* fragment: 0 whole, 1 the first of several, 2 a later one, which has no ports. */
struct parsed {
    struct target t;
    __u32 id;
    __u32 fragment;
};

static __always_inline int read_ports(struct __sk_buff *skb, __u32 at, int remote, struct parsed *p)
{
    __u16 port[2];
    if (p->t.protocol != IPPROTO_TCP && p->t.protocol != IPPROTO_UDP)
        return 1;
    if (p->fragment == 2)
        return 1;
    if (bpf_skb_load_bytes(skb, at, port, sizeof port))
        return 0;
    p->t.port = bpf_ntohs(port[remote == REMOTE_IS_DESTINATION]);
    return 1;
}

/* Options are refused: with a source route the packet goes to another place than it says. */
static __always_inline int parse_v4(struct __sk_buff *skb, __u32 at, int remote, struct parsed *p)
{
    struct {
        __u8 version, tos;
        __u16 length, id, offset;
        __u8 ttl, protocol;
        __u16 check;
        __u32 source, to;
    } ip;
    if (bpf_skb_load_bytes(skb, at, &ip, sizeof ip) || ip.version != 0x45)
        return 0;
    __u16 offset = bpf_ntohs(ip.offset);
    p->t.to = mapped(remote == REMOTE_IS_DESTINATION ? ip.to : ip.source);
    p->t.protocol = ip.protocol;
    p->id = ip.id;
    p->fragment = offset & 0x1fff ? 2 : offset & 0x2000 ? 1 : 0;
    return read_ports(skb, at + sizeof ip, remote, p);
}

struct v6_fragment {
    __u8 next, reserved;
    __u16 offset;
    __u32 id;
};

static __always_inline int parse_v6(struct __sk_buff *skb, __u32 at, int remote, struct parsed *p)
{
    struct {
        __u32 version;
        __u16 length;
        __u8 next, hops;
        struct address source, to;
    } ip;
    struct v6_fragment header;
    if (bpf_skb_load_bytes(skb, at, &ip, sizeof ip) || (bpf_ntohl(ip.version) >> 28) != 6)
        return 0;
    p->t.to = remote == REMOTE_IS_DESTINATION ? ip.to : ip.source;
    at += sizeof ip;
    __u8 next = ip.next;
#pragma clang loop unroll(disable)
    for (int i = 0; i < EXTENSIONS; i++) {
        p->t.protocol = next;
        if (next == IPPROTO_ROUTING)
            return 0; /* its last address is not in the header */
        if (next != IPPROTO_HOPOPTS && next != IPPROTO_DSTOPTS && next != IPPROTO_FRAGMENT)
            return read_ports(skb, at, remote, p);
        if (p->fragment == 2)
            return 1; /* the rest of it is data */
        if (bpf_skb_load_bytes(skb, at, &header, sizeof header))
            return 0;
        next = header.next;
        if (p->t.protocol == IPPROTO_FRAGMENT) {
            __u16 offset = bpf_ntohs(header.offset);
            p->id = header.id;
            p->fragment = offset & 0xfff8 ? 2 : offset & 1 ? 1 : 0;
            at += sizeof header;
        } else {
            at += (header.reserved + 1) * 8; /* the length of an option header is in this place */
        }
    }
    return 0;
}

static __always_inline int parse(struct __sk_buff *skb, __u32 at, int remote, struct parsed *p)
{
    if (skb->protocol == bpf_htons(0x0800))
        return parse_v4(skb, at, remote, p);
    if (skb->protocol == bpf_htons(0x86dd))
        return parse_v6(skb, at, remote, p);
    return 0;
}

/* Later fragments have no ports: they pass when the first of their datagram passed. */
static __always_inline int judge_packet(__u64 cgroup, const struct binding *b, struct parsed *p)
{
    struct fragment_key key = { .cgroup = cgroup, .to = p->t.to, .id = p->id };
    if (p->fragment == 2)
        return bpf_map_lookup_elem(&fragments, &key) != 0;
    if (!dsec_decide(b, &p->t)) {
        if (p->fragment)
            bpf_map_delete_elem(&fragments, &key);
        return 0;
    }
    if (p->fragment) {
        __u8 passed = 1;
        bpf_map_update_elem(&fragments, &key, &passed, BPF_ANY);
    }
    return 1;
}

/* Of a socket's packet (`at` 0 is the network header); 1 lets it pass. */
static __always_inline int judge_skb(struct __sk_buff *skb, int remote, int where)
{
    if (skb->ifindex == LOOPBACK_IFINDEX)
        return 1;
    __u64 cgroup = bpf_skb_ancestor_cgroup_id(skb, sandbox_level);
    const struct binding *b = bpf_map_lookup_elem(&bindings, &cgroup);
    if (!b)
        return !deny_unbound;
    struct parsed p = { .t = { .where = where } };
    if (parse(skb, 0, remote, &p) && judge_packet(cgroup, b, &p))
        return 1;
    dsec_denied(cgroup, &p.t);
    return 0;
}

#endif
