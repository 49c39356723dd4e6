#include "bpf/load.h"

#include <fcntl.h>

#include "bpf/netpolicy.lskel.h"

static void take(const struct netpolicy *skeleton, struct netpolicy_fds *fds)
{
    /* by name: the order of the skeleton is that of their first use */
    const int maps[] = {
        skeleton->maps.bindings.map_fd, skeleton->maps.counts.map_fd,
        skeleton->maps.links.map_fd,    skeleton->maps.rules.map_fd,
        skeleton->maps.names.map_fd,    skeleton->maps.fragments.map_fd,
        skeleton->maps.events.map_fd,   skeleton->maps.rodata.map_fd,
    };
    const int programs[] = {
        skeleton->progs.dsec_connect4.prog_fd, skeleton->progs.dsec_connect6.prog_fd,
        skeleton->progs.dsec_egress.prog_fd,   skeleton->progs.dsec_ingress.prog_fd,
        skeleton->progs.dsec_link.prog_fd,     skeleton->progs.dsec_sendmsg4.prog_fd,
        skeleton->progs.dsec_sendmsg6.prog_fd, skeleton->progs.dsec_sock_create.prog_fd,
    };
    memcpy(fds->maps, maps, sizeof maps);
    memcpy(fds->programs, programs, sizeof programs);
}

_Static_assert(sizeof(((struct netpolicy *)0)->maps) ==
                   NETPOLICY_MAPS * sizeof(struct bpf_map_desc), "a map was added");
_Static_assert(sizeof(((struct netpolicy *)0)->progs) ==
                   NETPOLICY_PROGRAMS * sizeof(struct bpf_prog_desc), "a program was added");

int netpolicy_load_fds(const struct netpolicy_options *options, struct netpolicy_fds *fds,
                       const char **step)
{
    *step = "read the programs";
    struct netpolicy *skeleton = netpolicy__open();
    if (!skeleton)
        return -ENOMEM;
    skeleton->rodata->sandbox_level = options->sandbox_level;
    skeleton->rodata->deny_unbound = options->deny_unbound;
    skeleton->rodata->events_per_s = options->events_per_s;
    *step = "load the programs";
    int result = netpolicy__load(skeleton);
    if (result < 0) {
        netpolicy__destroy(skeleton);
        return result;
    }
    take(skeleton, fds);
    skel_free_map_data(skeleton->rodata, 0, 4096);
    skel_free(skeleton);
    return 0;
}

uint64_t netpolicy_version(void)
{
    return NETPOLICY_VERSION;
}
