/* The decision on (sandbox, protocol, address, port), shared by all programs. */
#ifndef DSEC_BPF_DECIDE_H
#define DSEC_BPF_DECIDE_H

#include <linux/in.h>
#include <linux/in6.h>
#include <bpf/bpf_endian.h>
#include "maps.h"

#define LOOPBACK_IFINDEX 1 /* lo has it in every network namespace (net/core/dev.c, loopback.c) */

struct target {
    struct address to;
    __u16 port;
    __u8 protocol; /* number of the internet protocol */
    __u8 where;
};

static __always_inline int is_v4(const struct address *a)
{
    return !a->word[0] && !a->word[1] && a->word[2] == bpf_htonl(0xffff);
}

static __always_inline struct address mapped(__u32 v4)
{
    return (struct address){ .word = { 0, 0, bpf_htonl(0xffff), v4 } };
}

static __always_inline int same(const struct address *a, const struct address *b)
{
    return a->word[3] == b->word[3] && a->word[2] == b->word[2] && a->word[1] == b->word[1] &&
           a->word[0] == b->word[0];
}

/* What a call to it never leaves the namespace with: 127/8, ::1, and the unspecified address. */
static __always_inline int is_loopback(const struct address *a)
{
    if (is_v4(a))
        return !a->word[3] || (bpf_ntohl(a->word[3]) >> 24) == 127;
    return !a->word[0] && !a->word[1] && !a->word[2] && bpf_ntohl(a->word[3]) <= 1;
}

static __always_inline __u32 protocol_bit(const struct target *t)
{
    switch (t->protocol) {
    case IPPROTO_TCP: return PROTO_TCP;
    case IPPROTO_UDP: return PROTO_UDP;
    case IPPROTO_ICMP: return is_v4(&t->to) ? PROTO_ICMP : PROTO_OTHER;
    case IPPROTO_ICMPV6: return is_v4(&t->to) ? PROTO_OTHER : PROTO_ICMP;
    default: return PROTO_OTHER;
    }
}

/* A function for the verifier, which checks a global one once, for any arguments: inlined, the loops
 * inside loops cost it 1.5 seconds for all programs. The other `__noinline` ones likewise.
 */
__noinline int dsec_in_ranges(const struct ports *ports, __u32 bit, __u32 port)
{
    if (!ports)
        return 0;
#pragma clang loop unroll(disable)
    for (__u32 i = 0; i < RANGES; i++) {
        if (i >= ports->count)
            return 0;
        const struct port_range *r = &ports->range[i];
        if (r->protocols & bit && r->first <= port && port <= r->last)
            return 1;
    }
    return 0;
}

/* The bits of one word, in network order, that a prefix has in it. */
static __always_inline __u32 mask(__s32 bits)
{
    return bits >= 32 ? ~0u : bits <= 0 ? 0 : bpf_htonl(~0u << (32 - bits));
}

static __always_inline struct rule_key rule_key(const struct binding *b, const struct address *to,
                                                __u32 bits)
{
    __s32 left = bits;
    return (struct rule_key){
        .bits = bits,
        .policy = b->policy << PART_BITS,
        .to.word = { to->word[0] & mask(left), to->word[1] & mask(left - 32),
                     to->word[2] & mask(left - 64), to->word[3] & mask(left - 96) },
    };
}

enum { ABSENT, DENIES, ALLOWS };

/* What the policy says at the prefix of `to` whose length is in this place of the binding's list. */
__noinline int dsec_row(const struct binding *b, const struct address *to, __u32 place, __u32 bit,
                        __u32 port)
{
    if (!b || !to || place >= (is_v4(to) ? LENGTHS4 : LENGTHS6))
        return ABSENT;
    struct rule_key key = rule_key(b, to, is_v4(to) ? b->lengths4[place] : b->lengths6[place]);
    const struct ports *ports = bpf_map_lookup_elem(&rules, &key);
    if (!ports)
        return ABSENT;
#pragma clang loop unroll(disable)
    for (int part = 0; part < PARTS && ports; part++) {
        if (dsec_in_ranges(ports, bit, port))
            return ALLOWS;
        if (!ports->more)
            return DENIES;
        key.policy++;
        ports = bpf_map_lookup_elem(&rules, &key);
    }
    return DENIES;
}

/* The longest prefix decides, found by binary search over the lengths: where a longer one may lie
 * ahead the daemon has entered a row (dsecd/policy/table.py). A trie of all policies would get
 * deeper with every policy.
 */
static __always_inline int rules_allow(const struct binding *b, const struct address *to, __u32 bit,
                                       __u32 port)
{
    __u32 count = is_v4(to) ? b->count4 : b->count6, place = 0, says = ABSENT;
#pragma clang loop unroll(disable)
    for (__u32 step = FIRST_STEP; step; step >>= 1) {
        if (place + step > count)
            continue;
        __u32 here = dsec_row(b, to, place + step - 1, bit, port);
        if (here != ABSENT) {
            place += step;
            says = here;
        }
    }
    return says == ALLOWS;
}

static __always_inline int names_allow(__u32 set, const struct target *t, __u32 bit)
{
    struct name_key key = { .names = set, .to = t->to };
    const struct name_ports *found = bpf_map_lookup_elem(&names, &key);
    if (!found)
        return 0;
    int call = t->where == AT_CONNECT || t->where == AT_SENDMSG;
    if (call && found->until_ns < bpf_ktime_get_ns())
        return 0;
    return dsec_in_ranges(&found->ports, bit, t->port);
}

static __always_inline int is_set(const struct address *a)
{
    return a->word[0] | a->word[1] | a->word[2] | a->word[3];
}

/* 1: `t` is allowed to the sandbox with binding `b`. */
__noinline int dsec_decide(const struct binding *b, const struct target *t)
{
    if (!b || !t)
        return 0;
    __u32 bit = protocol_bit(t);
    if (t->port == 53 && bit & (PROTO_TCP | PROTO_UDP)) {
        if ((is_set(&b->resolver[0]) && same(&t->to, &b->resolver[0])) ||
            (is_set(&b->resolver[1]) && same(&t->to, &b->resolver[1])))
            return 1;
        if (b->flags & BOUND_DNS_ONLY)
            return 0;
    }
    /* what a rule denies was never entered for a name, so the cheaper look-up may come first */
    return (b->names && names_allow(b->names, t, bit)) ||
           rules_allow(b, &t->to, bit, t->port);
}

/* Multicast of the link that kernels send by themselves: dropped without a word. */
static __always_inline int is_chatter(const struct address *a)
{
    if (is_v4(a))
        return (bpf_ntohl(a->word[3]) >> 8) == 0xe00000;
    return (bpf_ntohl(a->word[0]) >> 16) == 0xff02;
}

static __always_inline void report(__u64 cgroup, struct counters *c, const struct target *t)
{
    __u64 now = bpf_ktime_get_ns();
    if (now - c->window_ns > 1000000000) { /* two at once count a window twice: harmless */
        c->window_ns = now;
        c->window_events = 0;
    }
    if (c->window_events >= events_per_s) {
        __sync_fetch_and_add(&c->unreported, 1);
        return;
    }
    __sync_fetch_and_add(&c->window_events, 1);
    struct event *e = bpf_ringbuf_reserve(&events, sizeof *e, 0);
    if (!e) {
        __sync_fetch_and_add(&c->unreported, 1);
        return;
    }
    e->time_ns = now;
    e->cgroup = cgroup;
    e->to = t->to;
    e->port = t->port;
    e->protocol = t->protocol;
    e->where = t->where;
    e->pid = t->where == AT_LINK || t->where == AT_INGRESS ? 0 : bpf_get_current_pid_tgid() >> 32;
    bpf_ringbuf_submit(e, 0);
}

/* Count a denial of `cgroup`, and tell the daemon. */
__noinline int dsec_denied(__u64 cgroup, const struct target *t)
{
    struct counters *c = bpf_map_lookup_elem(&counts, &cgroup);
    if (!c || !t || (t->where > AT_SENDMSG && t->where != AT_SOCKET && is_chatter(&t->to)))
        return 0;
    if (t->where <= AT_SENDMSG)
        __sync_fetch_and_add(&c->denied_calls, 1);
    else if (t->where == AT_SOCKET)
        __sync_fetch_and_add(&c->denied_sockets, 1);
    else
        __sync_fetch_and_add(&c->denied_packets, 1);
    report(cgroup, c, t);
    return 0;
}

#endif
