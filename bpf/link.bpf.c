/* The host's end of a sandbox's interface: what comes out of the sandbox, whoever made it. Packet
 * sockets, tunnels, and processes that got out of their cgroup pass here. Frames that are not IP
 * are dropped, and so is everything from an interface that nobody bound.
 */
#include <linux/pkt_cls.h>
#include "packet.h"

#define PASS (-1) /* TC_ACT_UNSPEC and TCX_NEXT: other filters may have their say */
#define ETHERNET 14
#define ETHERTYPE_ARP 0x0806

/* A virtual machine has to find the gateway: ARP, and neighbour discovery of the link's addresses. */
static __always_inline int is_neighbour_talk(const struct __sk_buff *skb, const struct parsed *p)
{
    if (skb->protocol == bpf_htons(ETHERTYPE_ARP))
        return 1;
    __u32 first = bpf_ntohl(p->t.to.word[0]) >> 16;
    return p->t.protocol == IPPROTO_ICMPV6 && (first == 0xfe80 || first == 0xff02);
}

SEC("tc")
int dsec_link(struct __sk_buff *skb)
{
    __u32 index = skb->ifindex;
    const struct link_value *link = bpf_map_lookup_elem(&links, &index);
    if (!link || skb->vlan_present)
        return TC_ACT_SHOT;
    __u64 cgroup = link->cgroup;
    const struct binding *b = bpf_map_lookup_elem(&bindings, &cgroup);
    if (!b)
        return deny_unbound ? TC_ACT_SHOT : PASS;
    struct parsed p = { .t = { .where = AT_LINK } };
    int known = parse(skb, ETHERNET, REMOTE_IS_DESTINATION, &p);
    if (link->flags & LINK_NEIGHBOURS && is_neighbour_talk(skb, &p))
        return PASS;
    if (known && !is_loopback(&p.t.to) && judge_packet(cgroup, b, &p))
        return PASS;
    dsec_denied(cgroup, &p.t);
    return TC_ACT_SHOT;
}
