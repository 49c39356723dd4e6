/* What a machine cannot know by itself when it starts, or goes on from a saved state: the time, and
 * randomness that no other machine has. */
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>

#include "vm.h"

static int random_fd = -1; /* kept: root inside may put anything in the place of /dev/random */

int vm_random_open(void)
{
    random_fd = open("/dev/random", O_RDWR | O_CLOEXEC);
    return random_fd < 0 ? -errno : 0;
}

int vm_time_set(uint64_t time_ns)
{
    struct timespec now = { .tv_sec = (time_t)(time_ns / 1000000000),
                            .tv_nsec = (long)(time_ns % 1000000000) };
    return clock_settime(CLOCK_REALTIME, &now) < 0 ? -errno : 0;
}

/* RNDADDENTROPY credits it, which ends the wait of getrandom(2) in a machine that just started. Of a machine
 * that was copied every copy has the same state: only a reseed makes them differ at once. */
int vm_entropy_add(struct mp_bytes entropy)
{
    union {
        struct rand_pool_info head;
        uint8_t room[sizeof(struct rand_pool_info) + VM_ENTROPY];
    } pool = { .head = { .entropy_count = (int)entropy.n * 8, .buf_size = (int)entropy.n } };
    memcpy(pool.head.buf, entropy.p, entropy.n);
    if (ioctl(random_fd, RNDADDENTROPY, &pool) < 0 || ioctl(random_fd, RNDRESEEDCRNG) < 0)
        return -errno;
    return 0;
}
