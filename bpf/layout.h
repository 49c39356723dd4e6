/* What the programs and the daemon (src/dsecd/host/nettable.py) exchange through maps.
 *
 * Addresses are always 16 bytes, IPv4 as ::ffff:a.b.c.d: the kernel takes the mapped form on IPv6
 * sockets, so one form means that none is forgotten. Ports are in host order.
 */
#ifndef DSEC_BPF_LAYOUT_H
#define DSEC_BPF_LAYOUT_H

#include <linux/types.h>

enum { RANGES = 16, PARTS = 16, PART_BITS = 4 };
enum { LENGTHS4 = 33, LENGTHS6 = 129, FIRST_STEP = 128 }; /* lengths that a prefix has */

/* Bits of `port_range.protocols`; ICMP is ICMPv6 for an IPv6 address. */
enum { PROTO_TCP = 1, PROTO_UDP = 2, PROTO_ICMP = 4, PROTO_OTHER = 8 };

enum {
    BOUND_DNS_ONLY = 1, /* port 53 leads to the resolver or nowhere */
    BOUND_RAW = 2,      /* sockets beyond TCP, UDP and ping */
};

enum {
    LINK_NEIGHBOURS = 1, /* ARP and neighbour discovery pass: the other end is a virtual machine */
};

struct address {
    __u32 word[4]; /* network order */
};

struct rule_key {
    __u32 bits;   /* of the prefix */
    __u32 policy; /* number << PART_BITS | part */
    struct address to; /* zero behind the prefix */
};

struct port_range {
    __u16 first, last, protocols;
};

/* What is allowed at the addresses of a prefix: the whole answer, so the longest match decides.
 * The compiler has put the rules of all shorter prefixes into it. Protocols without ports are
 * asked for port 0. More than RANGES go on in the next part, under the same prefix.
 */
struct ports {
    __u16 count;
    __u16 more;
    struct port_range range[RANGES];
};

/* An address that the resolver got for a name; all its ports fit into one part. */
struct name_key {
    __u32 names;
    struct address to;
};

struct name_ports {
    __u64 until_ns; /* of the monotonic clock: new calls are refused later, open connections go on */
    struct ports ports;
    __u32 reserved;
};

/* Of a sandbox, by the id of its cgroup. Replaced as a whole, so an update is atomic. */
struct binding {
    __u32 policy; /* number in rule_key, without a part */
    __u32 names;  /* number in name_key, 0 while there is none */
    __u32 flags;
    __u32 reserved;
    struct address resolver[2]; /* all zero: none */
    struct address own[2];      /* of the sandbox's interface: calls to them stay inside */
    __u8 count4, lengths4[LENGTHS4]; /* of the policy's prefixes, ascending; of IPv4 from 96 on */
    __u8 count6, lengths6[LENGTHS6];
    __u8 unused[4];
};

/* Of a sandbox's interface on the host, by its index. */
struct link_value {
    __u64 cgroup;
    __u32 flags;
    __u32 reserved;
};

struct counters {
    __u64 allowed_calls; /* connect(2), and sendmsg(2) with an address */
    __u64 denied_calls;
    __u64 denied_packets;
    __u64 denied_sockets;
    __u64 unreported; /* denials beyond the rate, or while the ring was full */
    __u64 window_ns;
    __u64 window_events;
};

enum { AT_CONNECT = 1, AT_SENDMSG, AT_EGRESS, AT_INGRESS, AT_SOCKET, AT_LINK };

struct event {
    __u64 time_ns; /* monotonic */
    __u64 cgroup;
    struct address to;
    __u16 port;
    __u8 protocol; /* number of the internet protocol */
    __u8 where;
    __u32 pid; /* in the host's pid namespace; 0 for a packet on a link */
};

struct fragment_key {
    __u64 cgroup;
    struct address to;
    __u32 id;
    __u32 protocol;
};

#endif
