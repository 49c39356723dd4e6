/* Arguments of vm.begin, vm.renew and vm.clock (docs/protocol.md, "In a VM"). */
#ifndef DSEC_VM_ARGS_H
#define DSEC_VM_ARGS_H

#include "args.h"

#define VM_LAYERS 32
#define VM_ADDRESSES 8
#define VM_GATEWAYS 4
#define VM_NEIGHBOURS 4
#define VM_ENTROPY 64 /* bytes */
#define VM_AGE_MAX 86400 /* seconds */

struct vm_address {
    int family; /* AF_INET or AF_INET6 */
    unsigned prefix;
    uint8_t bytes[16];
};

struct vm_neighbour {
    struct vm_address address;
    uint8_t mac[6];
};

struct vm_network {
    char interface[20]; /* its name or MAC address; "": none */
    unsigned n_addresses, n_gateways, n_neighbours;
    struct vm_address addresses[VM_ADDRESSES], gateways[VM_GATEWAYS];
    struct vm_neighbour neighbours[VM_NEIGHBOURS];
    unsigned mtu; /* 0: the interface's own */
};

struct vm_file {
    struct mp_bytes path, content; /* path: relative to the root */
    uint32_t mode;
};

struct vm_args {
    struct mp_bytes upper, hostname, entropy, config;
    struct mp_bytes layers, files, network_raw, reclaim_raw; /* still encoded */
    struct opt_u64 pids, time_ns;
    struct vm_network network;
    uint32_t min_age_s;     /* memory not used for so long is given up; 0: none is */
    uint64_t swap_bytes; /* room for anonymous memory, compressed; 0: it stays */
    bool dax;
};

/* Each returns NULL, or a static text that says which field is wrong. */
/* `service`: the machine has a root, and is given neither layers nor an upper. */
const char *args_vm_begin(struct mp_bytes raw, bool service, struct vm_args *out);
const char *args_vm_renew(struct mp_bytes raw, struct vm_args *out);
const char *args_vm_clock(struct mp_bytes raw, struct vm_args *out);

/* The next element of `layers` and of `files`. */
struct mp_bytes vm_next_layer(struct mp_reader *r);
struct vm_file vm_next_file(struct mp_reader *r);

#endif
