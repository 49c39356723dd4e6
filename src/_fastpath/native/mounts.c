#include "native/mounts.h"

#include "native/kernel.h"

static int create_and_mount(int fs, unsigned attributes, const char **step)
{
    *step = "fs_create";
    int error = k_fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0);
    if (error < 0)
        return error;
    *step = "fsmount";
    return k_fsmount(fs, attributes);
}

int make_mount(const char *type, const char *source, const struct mount_option *options,
               int count, unsigned attributes, const char **step)
{
    *step = "fsopen";
    int fs = k_fsopen(type), result = 0;
    if (fs < 0)
        return fs;
    *step = "fsconfig";
    if (source)
        result = k_fsconfig(fs, FSCONFIG_SET_STRING, "source", source, 0);
    for (int i = 0; i < count && result >= 0; i++)
        result = k_fsconfig(fs, options[i].value ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG,
                            options[i].key, options[i].value, 0);
    if (result >= 0)
        result = create_and_mount(fs, attributes, step);
    close(fs);
    return result;
}

int mount_erofs(const char *image, const char *const *devices, int count, bool direct,
                const char **step)
{
    *step = "fsopen";
    int fs = k_fsopen("erofs"), result;
    if (fs < 0)
        return fs;
    *step = "fsconfig";
    result = k_fsconfig(fs, FSCONFIG_SET_STRING, "source", image, 0);
    for (int i = 0; i < count && result >= 0; i++)
        result = k_fsconfig(fs, FSCONFIG_SET_STRING, "device", devices[i], 0);
    if (result >= 0 && direct)
        result = k_fsconfig(fs, FSCONFIG_SET_FLAG, "directio", NULL, 0);
    if (result >= 0)
        result = k_fsconfig(fs, FSCONFIG_SET_FLAG, "ro", NULL, 0);
    if (result >= 0)
        result = create_and_mount(fs, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV, step);
    close(fs);
    return result;
}
