#include "native/tree.h"

#include <dirent.h>
#include <limits.h>
#include <sys/stat.h>

#include "native/kernel.h"

#define OPEN_DIRECTORY (O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)

struct entry {
    uint64_t inode;
    int64_t offset;
    unsigned short size;
    unsigned char type;
    char name[];
};

static int is_dot(const char *name)
{
    return name[0] == '.' && (name[1] == 0 || (name[1] == '.' && name[2] == 0));
}

/* One pass over `dir`: unlink what is no directory, rmdir what is empty. The first directory that is
 * not empty is copied to `deeper`. Returns 1 when there is one, 0 when the pass was complete. */
static int sweep(int dir, int cgroup, char deeper[NAME_MAX + 1], int *error)
{
    _Alignas(struct entry) char buffer[8192];
    int removed;

    do {
        removed = 0;
        if (lseek(dir, 0, SEEK_SET) < 0)
            return -errno;
        long got;
        while ((got = syscall(SYS_getdents64, dir, buffer, sizeof buffer)) > 0) {
            for (long at = 0; at < got;) {
                struct entry *entry = (struct entry *)(buffer + at);
                at += entry->size;
                if (is_dot(entry->name) || (cgroup && entry->type != DT_DIR))
                    continue;
                int failed = entry->type == DT_DIR ? EISDIR : 0;
                if (!failed && unlinkat(dir, entry->name, 0) < 0)
                    failed = errno;
                if (failed == EISDIR) /* also a file system that reports no types */
                    failed = unlinkat(dir, entry->name, AT_REMOVEDIR) < 0 ? errno : 0;
                if (!failed) {
                    removed = 1;
                } else if (failed == ENOTEMPTY || failed == EEXIST || (cgroup && failed == EBUSY)) {
                    strcpy(deeper, entry->name);
                    return 1;
                } else if (failed != ENOENT && !*error) {
                    *error = -failed;
                }
            }
        }
        /* Removing while reading may skip entries on some file systems: read again until a pass
         * finds nothing to do. */
    } while (removed && !*error);
    return 0;
}

/* Depth first with two descriptors: descend by name, ascend by "..": nobody can move directories
 * under us, the sandbox is dead. A step to another file system is refused in any case. Closes `dir`. */
static int empty_directory(int dir, int cgroup)
{
    char deeper[NAME_MAX + 1];
    int error = 0, depth = 0, found;

    while ((found = sweep(dir, cgroup, deeper, &error)) >= 0 && !error) {
        if (!found && depth == 0)
            break;
        int next = openat(dir, found ? deeper : "..", OPEN_DIRECTORY);
        if (next < 0) {
            error = -errno;
            break;
        }
        struct stat here, there;
        if (fstat(dir, &here) < 0 || fstat(next, &there) < 0 || here.st_dev != there.st_dev) {
            error = -EXDEV;
            close(next);
            break;
        }
        /* A group that is busy has no child left: descending again would never end. */
        if (cgroup && found) {
            char below[NAME_MAX + 1];
            int inner = sweep(next, 1, below, &error);
            if (inner == 0 && !error && unlinkat(dir, deeper, AT_REMOVEDIR) < 0 && errno != ENOENT)
                error = -errno;
            if (inner == 0) {
                close(next);
                continue;
            }
        }
        close(dir);
        dir = next;
        depth += found ? 1 : -1;
    }
    close(dir);
    return error ? error : (found < 0 ? found : 0);
}

static int remove_with(int at, const char *name, int cgroup)
{
    if (unlinkat(at, name, AT_REMOVEDIR) == 0 || errno == ENOENT)
        return 0;
    if (errno == ENOTDIR && !cgroup)
        return unlinkat(at, name, 0) == 0 || errno == ENOENT ? 0 : -errno;
    if (errno != ENOTEMPTY && errno != EEXIST && errno != EBUSY)
        return -errno;
    int dir = openat(at, name, OPEN_DIRECTORY);
    if (dir < 0)
        return errno == ENOENT ? 0 : -errno;
    int error = empty_directory(dir, cgroup);
    if (error)
        return error;
    return unlinkat(at, name, AT_REMOVEDIR) == 0 || errno == ENOENT ? 0 : -errno;
}

int remove_tree(int at, const char *name)
{
    return remove_with(at, name, 0);
}

int remove_cgroup(int at, const char *name)
{
    return remove_with(at, name, 1);
}
