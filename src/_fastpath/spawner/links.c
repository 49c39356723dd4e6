#include "spawner/links.h"

#include <dirent.h>
#include <search.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "native/kernel.h"

#define OPEN_DIRECTORY (O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
#define FILTER_BITS (1u << 21) /* a file system numbers its inodes one after the other */

struct text {
    char *p;
    size_t n, room;
};

/* Down by name, up by "..": a sandbox makes trees deeper than descriptors or a path would reach. */
struct walk {
    int (*visit)(struct walk *walk, const struct dirent *entry); /* of what is no directory; 0: go on */
    int dir;
    struct text path;    /* of `dir`, each name with a slash behind it */
    struct text pending; /* directories to come, each with a NUL behind it; "" leads up */
    uint8_t *seen;       /* one bit for each inode number, modulo FILTER_BITS */
    void *groups;        /* of search.h: struct group by inode number */
    int overlay, upper;
    bool changed;
};

/* A file of several names: `first` is one that it has in the root. */
struct group {
    ino_t inode;
    char first[];
};

static int append(struct text *text, const char *part, size_t n)
{
    if (text->room - text->n < n) {
        size_t room = 2 * (text->n + n);
        char *p = realloc(text->p, room);
        if (!p)
            return -ENOMEM;
        text->p = p;
        text->room = room;
    }
    memcpy(text->p + text->n, part, n);
    text->n += n;
    return 0;
}

/* --- a walk ----------------------------------------------------------------------------------------- */

static int visit_directory(struct walk *walk)
{
    _Alignas(struct dirent) char buffer[16384];
    long got;
    int result = 0;

    while ((got = syscall(SYS_getdents64, walk->dir, buffer, sizeof buffer)) > 0)
        for (long at = 0; at < got && result == 0;) {
            const struct dirent *entry = (const struct dirent *)(buffer + at);
            const char *name = entry->d_name;
            at += entry->d_reclen;
            if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
                continue;
            if (entry->d_type == DT_DIR)
                result = append(&walk->pending, name, strlen(name) + 1);
            else if (entry->d_type != DT_CHR) /* a whiteout: one file for all, and none to see */
                result = walk->visit(walk, entry);
            if (result)
                return result;
        }
    return got < 0 ? -errno : 0;
}

static char *pop(struct text *pending)
{
    size_t at = pending->n - 1;
    while (at && pending->p[at - 1])
        at--;
    pending->n = at;
    return pending->p + at;
}

static int go_to(struct walk *walk, const char *name)
{
    int dir = openat(walk->dir, name, OPEN_DIRECTORY);
    if (dir < 0)
        return -errno;
    close(walk->dir);
    walk->dir = dir;
    return 0;
}

static int go_up(struct walk *walk)
{
    do
        walk->path.n--;
    while (walk->path.n && walk->path.p[walk->path.n - 1] != '/');
    return go_to(walk, "..");
}

static int go_down(struct walk *walk, const char *name)
{
    int error = go_to(walk, name);
    if (error == 0)
        error = append(&walk->path, name, strlen(name));
    if (error == 0)
        error = append(&walk->path, "/", 1);
    return error ? error : append(&walk->pending, "", 1); /* from here on `name` may be elsewhere */
}

/* Returns what a visit returned that was not 0. */
static int walk_tree(struct walk *walk, int tree, int (*visit)(struct walk *, const struct dirent *),
                     int (*leave)(struct walk *))
{
    walk->visit = visit;
    walk->path.n = walk->pending.n = 0;
    walk->dir = openat(tree, ".", OPEN_DIRECTORY);
    int result = walk->dir < 0 ? -errno : visit_directory(walk);
    if (result == 0)
        result = leave(walk);
    while (result == 0 && walk->pending.n) {
        const char *name = pop(&walk->pending);
        if (!*name) {
            result = go_up(walk);
            continue;
        }
        result = go_down(walk, name);
        if (result == 0)
            result = visit_directory(walk);
        if (result == 0)
            result = leave(walk);
    }
    close_if(&walk->dir);
    return result;
}

/* --- is there one? ---------------------------------------------------------------------------------- */

static int nothing(struct walk *walk)
{
    (void)walk;
    return 0;
}

/* Its second name has an inode number that was there before. So hardly a file is asked for its count of
 * names, which costs five times what reading its name does. */
static int look(struct walk *walk, const struct dirent *entry)
{
    uint32_t bit = (uint32_t)(entry->d_ino % FILTER_BITS);
    uint8_t *byte = &walk->seen[bit / 8], mask = (uint8_t)(1u << bit % 8);
    struct stat st;

    if (!(*byte & mask)) {
        *byte |= mask;
        return 0;
    }
    if (fstatat(walk->dir, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return -errno;
    return st.st_nlink > 1;
}

static int find_links(struct walk *walk, int tree)
{
    walk->seen = calloc(FILTER_BITS / 8, 1);
    int found = walk->seen ? walk_tree(walk, tree, look, nothing) : -ENOMEM;
    free(walk->seen);
    return found;
}

/* --- linking them anew ------------------------------------------------------------------------------ */

static int compare(const void *a, const void *b)
{
    ino_t one = ((const struct group *)a)->inode, other = ((const struct group *)b)->inode;
    return one < other ? -1 : one > other;
}

/* Whether the sandbox has a file of its own there, made for it anew (its /etc/hosts). */
static int is_hidden(const struct walk *walk, const char *path)
{
    struct stat st;
    if (fstatat(walk->upper, path, &st, AT_SYMLINK_NOFOLLOW) == 0 || errno == ENOTDIR)
        return 1;
    return errno == ENOENT ? 0 : -errno;
}

static int add_group(struct walk *walk, ino_t inode, const char *path)
{
    size_t size = strlen(path) + 1;
    struct group *group = malloc(sizeof *group + size);
    if (!group)
        return -ENOMEM;
    group->inode = inode;
    memcpy(group->first, path, size);
    if (tsearch(group, &walk->groups, compare))
        return 0;
    free(group);
    return -ENOMEM;
}

/* The kernel copies up what is linked, with all that it has, and the directories above both names. */
static int relink(struct walk *walk, ino_t inode, const char *path)
{
    struct group **found = tfind(&(struct group){ .inode = inode }, &walk->groups, compare);
    int hidden = is_hidden(walk, path);

    if (hidden)
        return hidden < 0 ? hidden : 0;
    if (!found)
        return add_group(walk, inode, path);
    walk->changed = true;
    if (unlinkat(walk->overlay, path, 0) < 0 ||
        linkat(walk->overlay, (*found)->first, walk->overlay, path, 0) < 0)
        return -errno;
    return 0;
}

static int relink_entry(struct walk *walk, const struct dirent *entry)
{
    struct stat st;
    size_t size = walk->path.n;

    if (fstatat(walk->dir, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return -errno;
    if (st.st_nlink < 2)
        return 0;
    int error = append(&walk->path, entry->d_name, strlen(entry->d_name) + 1);
    if (error == 0)
        error = relink(walk, st.st_ino, walk->path.p);
    walk->path.n = size;
    return error;
}

/* Nobody changed the directory: its times are what they were. */
static int restore_times(struct walk *walk)
{
    struct stat st;
    size_t size = walk->path.n;

    if (!walk->changed)
        return 0;
    walk->changed = false;
    int error = append(&walk->path, ".", 2);
    if (error == 0 && fstat(walk->dir, &st) < 0)
        error = -errno;
    if (error == 0)
        error = (int)KERNEL(utimensat(walk->overlay, walk->path.p,
                                      (struct timespec[]){ st.st_atim, st.st_mtim }, 0));
    walk->path.n = size;
    return error;
}

int keep_links(struct creation *c)
{
    const struct container_plan *plan = c->plan;
    struct walk walk = { .dir = -1, .overlay = c->fd[FD_OVERLAY], .upper = c->fd[FD_LAYER_U] };

    c->linked = false;
    if (!plan->linked)
        return 0;
    int newest = c->lowers[plan->lowers - 1];
    int result = find_links(&walk, newest);
    if (result > 0) {
        c->linked = true;
        result = walk_tree(&walk, newest, relink_entry, restore_times);
        tdestroy(walk.groups, free);
    }
    free(walk.path.p);
    free(walk.pending.p);
    return result;
}
