/* Path patterns: `*`, `?`, `[...]` within a name, `**` for any number of directories. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "file_tree.h"

#define GLOB_PARTS 128
#define GLOB_DEPTH 100

struct pattern {
    char *parts[GLOB_PARTS];
    int n;
    struct listing list;
};

static bool has_magic(const char *part)
{
    return strpbrk(part, "*?[") != NULL;
}

static void found(struct pattern *pattern, const char *path)
{
    mp_put_bin(&pattern->list.w, path, strlen(path));
    pattern->list.count++;
}

static void expand(struct pattern *pattern, const char *path, int part, int depth);

static void descend(struct pattern *pattern, const char *path, const char *name, int part,
                    int depth)
{
    char next[MAX_PATH];
    const char *slash = !*path || path[strlen(path) - 1] == '/' ? "" : "/";
    if (snprintf(next, sizeof next, "%s%s%s", path, slash, name) >= (int)sizeof next)
        return;
    if (part < pattern->n) {
        expand(pattern, next, part, depth);
        return;
    }
    int fd = open_in_root(absolute_path(text_bytes(next)), O_PATH | O_NOFOLLOW, 0);
    if (fd < 0)
        return;
    close(fd);
    found(pattern, next);
}

/* Match `part` and what follows below directory `path`. */
static void expand(struct pattern *pattern, const char *path, int part, int depth)
{
    const char *text = pattern->parts[part];
    bool any_depth = strcmp(text, "**") == 0;
    if (!has_magic(text)) {
        descend(pattern, path, text, part + 1, depth);
        return;
    }
    if (depth == GLOB_DEPTH || pattern->list.w.overflow)
        return;
    if (any_depth && part + 1 < pattern->n)
        expand(pattern, path, part + 1, depth + 1);
    int fd = open_in_root(absolute_path(text_bytes(*path ? path : ".")), O_RDONLY | O_DIRECTORY, 0);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    for (struct dirent *d; dir && (d = readdir(dir));) {
        if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0)
            continue;
        if (!any_depth) {
            if (fnmatch(text, d->d_name, FNM_PERIOD) == 0)
                descend(pattern, path, d->d_name, part + 1, depth + 1);
            continue;
        }
        if (d->d_name[0] == '.')
            continue;
        if (part + 1 == pattern->n)
            descend(pattern, path, d->d_name, pattern->n, depth);
        struct stat st; /* directories only, and not through links: a cycle never ends */
        if (fstatat(dirfd(dir), d->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode))
            descend(pattern, path, d->d_name, part, depth + 1);
    }
    if (dir)
        closedir(dir);
}

_Noreturn void file_glob(const struct path_args *args)
{
    static char text[MAX_PATH];
    struct pattern pattern = { .n = 0 };
    memcpy(text, args->path.p, args->path.n);
    char *save = NULL;
    for (char *p = strtok_r(text, "/", &save); p; p = strtok_r(NULL, "/", &save)) {
        bool repeated = pattern.n && strcmp(p, "**") == 0 &&
                        strcmp(pattern.parts[pattern.n - 1], "**") == 0;
        if (pattern.n == GLOB_PARTS)
            child_fail(INVALID_ARGUMENT, "the pattern has more than %d parts", GLOB_PARTS);
        if (!repeated)
            pattern.parts[pattern.n++] = p;
    }
    listing_open(&pattern.list);
    const char *start = args->path.p[0] == '/' ? "/" : "";
    if (pattern.n)
        expand(&pattern, start, 0, 0);
    else
        found(&pattern, "/");
    listing_send(&pattern.list);
}
