#include "bpf/lsm.h"

#include <fcntl.h>

#include "bpf/lsmpolicy.lskel.h"

_Static_assert(sizeof(((struct lsmpolicy *)0)->maps) ==
                   LSMPOLICY_MAPS * sizeof(struct bpf_map_desc), "a map was added");
_Static_assert(sizeof(((struct lsmpolicy *)0)->progs) ==
                   LSMPOLICY_PROGRAMS * sizeof(struct bpf_prog_desc), "a program was added");

static void take(const struct lsmpolicy *skeleton, struct lsmpolicy_fds *fds)
{
    /* by name: the order of the skeleton is that of their first use */
    const int maps[] = {
        skeleton->maps.bindings.map_fd,    skeleton->maps.roots.map_fd,
        skeleton->maps.names.map_fd,       skeleton->maps.mount_types.map_fd,
        skeleton->maps.abstracts.map_fd,   skeleton->maps.rodata.map_fd,
    };
    const struct bpf_prog_desc *programs = (const struct bpf_prog_desc *)&skeleton->progs;
    memcpy(fds->maps, maps, sizeof maps);
    for (int i = 0; i < LSMPOLICY_PROGRAMS; i++)
        fds->programs[i] = programs[i].prog_fd;
}

int lsmpolicy_load_fds(uint32_t sandbox_level, struct lsmpolicy_fds *fds, const char **step)
{
    *step = "read the programs";
    struct lsmpolicy *skeleton = lsmpolicy__open();
    if (!skeleton)
        return -ENOMEM;
    skeleton->rodata->sandbox_level = sandbox_level;
    *step = "load the programs";
    int result = lsmpolicy__load(skeleton);
    if (result < 0) {
        lsmpolicy__destroy(skeleton);
        return result;
    }
    take(skeleton, fds);
    skel_free_map_data(skeleton->rodata, 0, 4096);
    skel_free(skeleton);
    return 0;
}

uint64_t lsmpolicy_version(void)
{
    return LSMPOLICY_VERSION;
}
