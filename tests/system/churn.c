/* Random operations on files, for tests of checkpoints: the same seed does the same anywhere.
 *
 *   churn ops SEED COUNT BITS    in the working directory; BITS 0: without set-id bits
 *   churn write                  until it is killed: writers whose files tell when they are torn
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <ftw.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define PAGE 4096u
#define MAPPED (16 * PAGE)

static uint64_t state;

static unsigned dice(unsigned sides)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (unsigned)((state >> 11) % sides);
}

static const char *folder(void)
{
    static const char *const names[] = { ".", "d0", "d1", "d2", "d0/e", "d1/e", "d0/e/g" };
    return names[dice(sizeof names / sizeof *names)];
}

static char *file(void)
{
    char *name;
    if (asprintf(&name, "%s/%c%u", folder(), "fgh"[dice(3)], dice(4)) < 0)
        abort();
    return name;
}

static void fill(int fd, off_t at, unsigned size)
{
    static unsigned char data[200000];
    unsigned seed = dice(255) + 1;
    for (unsigned i = 0; i < size; i++)
        data[i] = (unsigned char)(seed * (i + 1) >> 3);
    if (fd >= 0 && pwrite(fd, data, size, at) < 0)
        perror("pwrite");
}

/* A name may be a link: writing follows it, and may so make another file. */
static void write_file(const char *name, int flags)
{
    unsigned size = dice(dice(8) ? 5000 : 200000), at = dice(100000);
    int fd = open(name, O_WRONLY | O_NONBLOCK | flags, 0644);
    struct stat st = { 0 };
    if (fd >= 0)
        fstat(fd, &st);
    if (fd >= 0 && !S_ISREG(st.st_mode)) {
        close(fd);
        fd = -1;
    }
    fill(fd, flags & O_APPEND ? st.st_size : flags & O_TRUNC ? 0 : at, size);
    if (fd >= 0)
        close(fd);
}

/* Dirty pages of a mapping that nobody syncs. */
static void write_mapped(const char *name)
{
    unsigned value = dice(256), at = dice(3000);
    int fd = open(name, O_RDWR | O_NONBLOCK);
    struct stat st;
    if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 4000) {
        unsigned char *map = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map != MAP_FAILED) {
            memset(map + at, (int)value, 999);
            munmap(map, (size_t)st.st_size);
        }
    }
    if (fd >= 0)
        close(fd);
}

static int discard(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st, (void)kind, (void)where;
    return remove(path);
}

static void set_attribute(const char *name)
{
    char key[16], value[40];
    unsigned remove_it = dice(4) == 0;
    snprintf(key, sizeof key, "user.k%u", dice(3));
    snprintf(value, sizeof value, "%u", dice(1000));
    struct stat st;
    if (lstat(name, &st) < 0 || S_ISLNK(st.st_mode))
        return;
    if (remove_it)
        removexattr(name, key);
    else
        setxattr(name, key, value, strlen(value), 0);
}

static void step(int bits)
{
    char *one = file(), *two = file();
    const char *here = folder(), *there = folder();
    unsigned number = dice(60000);
    switch (dice(21)) {
    case 0: case 1: write_file(one, O_CREAT | O_TRUNC); break;
    case 2: write_file(one, O_CREAT | O_APPEND); break;
    case 3: write_file(one, 0); break;
    case 4: (void)!truncate(one, number * 5); break;
    case 5: unlink(one); break;
    case 6: (void)!rename(one, two); break;
    case 7: mkdir(here, 0755 | number % 8); break;
    case 8: if (strcmp(here, ".") && number % 3 == 0) nftw(here, discard, 16, FTW_DEPTH | FTW_PHYS); break;
    case 9: if (strcmp(here, ".")) (void)!rename(here, there); break;
    case 10: if (strcmp(here, ".")) renameat2(AT_FDCWD, here, AT_FDCWD, there, RENAME_EXCHANGE); break;
    case 11: case 18: case 19: case 20: (void)!link(one, two); break;
    case 12: (void)!symlink(number % 2 ? strrchr(two, '/') + 1 : "absent", one); break;
    case 13: (void)!lchown(one, number, number / 2); break;
    /* writes of a host's root keep the set-id bits, those of a sandbox's do not */
    case 14: if (access(one, F_OK) == 0) chmod(one, number & (bits ? 06777 : 0777)); break;
    case 15: set_attribute(dice(3) ? one : here); break;
    case 16: write_mapped(one); break;
    case 17: mkfifo(one, 0600); break;
    }
    free(one);
    free(two);
}

/* --- writers -------------------------------------------------------------------------------------- */

/* Lines count up without a gap. */
static void append_for_ever(void)
{
    int fd = open("appended", O_WRONLY | O_CREAT | O_APPEND, 0644);
    char line[16];
    for (unsigned n = 1;; n++) {
        snprintf(line, sizeof line, "%08u\n", n % 100000000);
        if (write(fd, line, 9) != 9)
            _exit(1);
        usleep(50);
    }
}

/* The last page is at most one behind the first. */
static void map_for_ever(void)
{
    int fd = open("mapped", O_RDWR | O_CREAT, 0644);
    if (ftruncate(fd, MAPPED) < 0)
        _exit(1);
    volatile uint64_t *map = mmap(NULL, MAPPED, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        _exit(1);
    for (;;) {
        map[0]++;
        map[(MAPPED - PAGE) / sizeof *map]++;
        usleep(20);
    }
}

/* The target is always whole: 1000 times the same number. */
static void replace_for_ever(void)
{
    for (uint32_t n = 1;; n++) {
        uint32_t data[1000];
        for (unsigned i = 0; i < 1000; i++)
            data[i] = n;
        int fd = open("new", O_WRONLY | O_CREAT | O_TRUNC, 0644);
        if (write(fd, data, sizeof data) != sizeof data || close(fd) < 0 || rename("new", "whole") < 0)
            _exit(1);
        usleep(50);
    }
}

/* A file under a name that was removed, and one under two names. */
static void link_for_ever(void)
{
    int gone = open("gone", O_RDWR | O_CREAT, 0644);
    unlink("gone");
    for (unsigned n = 0;; n++) {
        if (write(gone, &n, sizeof n) < 0)
            _exit(1);
        close(open("left", O_WRONLY | O_CREAT, 0644));
        (void)!link("left", "right");
        unlink("left");
        usleep(50);
    }
}

int main(int argc, char **argv)
{
    static void (*const writers[])(void) = {
        append_for_ever, map_for_ever, replace_for_ever, link_for_ever,
    };
    if (argc == 5 && !strcmp(argv[1], "ops")) {
        state = strtoull(argv[2], NULL, 10) * 2654435761u + 88172645463325252u;
        umask(022);
        for (int left = atoi(argv[3]); left > 0; left--)
            step(atoi(argv[4]));
        return 0;
    }
    for (unsigned i = 0; i < sizeof writers / sizeof *writers; i++)
        if (fork() == 0)
            writers[i]();
    wait(NULL); /* none ends by itself */
    return 1;
}
