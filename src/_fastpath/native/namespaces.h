/* Namespaces made to be pooled: nobody lives in them, a descriptor keeps them. */
#ifndef DSEC_NATIVE_NAMESPACES_H
#define DSEC_NATIVE_NAMESPACES_H

#include <stdint.h>

/* A user namespace in which ids 0..`count`-1 are `base`.. outside, owned by the host uid `owner`
 * (user_namespaces(7): the owner has every capability in it). Returns a descriptor; on failure
 * a negative errno and the step in `*step`. */
int make_userns(uint32_t base, uint32_t count, uint32_t owner, const char **step);

/* A user namespace that nobody lives in: a mount idmapped with it shows what belongs to `from`.. as
 * belonging to `to`.., and what belongs to others as nobody's. */
int make_shift_userns(uint32_t from, uint32_t to, uint32_t count, const char **step);

/* A network namespace, owned by the host's user namespace, loopback up, ICMP echo sockets allowed. */
int make_netns(const char **step);

/* 1 when the network namespace holds nothing of its last user: no socket (TIME_WAIT included), no
 * interface but loopback, no route and no address beyond loopback's. 0 when it does. */
int netns_reusable(int netns);
/* The same for the namespace this thread is in; `net` is a descriptor of its /proc/thread-self/net,
 * which shows whatever namespace it is in at the time. */
int own_netns_reusable(int net);

#endif
