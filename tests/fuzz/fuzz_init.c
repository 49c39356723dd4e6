/* libFuzzer target for the codec and for dsec-init's handling of frames. test_fuzz_init.py
 * builds it, makes the seeds and runs it.
 *
 * The first byte chooses: the codec alone (read everything, write it again, read the same), or the
 * body of one frame on a connection, of a container or of a virtual machine. Forking is replaced, so
 * that no command ever runs, and so is what a virtual machine would do to its system. */
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../src/_fastpath/init/config.h"
#include "../../src/_fastpath/init/conn.h"
#include "../../src/_fastpath/init/process.h"
#include "../../src/_fastpath/init/serve.h"
#include "../../src/_fastpath/init/vm.h"

static int peer = -1;

/* Set by the linker in the place of child.c's: every start fails as in a full sandbox. */
pid_t __wrap_child_fork(int cgroup_fd);
pid_t __wrap_child_fork(int cgroup_fd)
{
    (void)cgroup_fd;
    return -11;
}

int __wrap_vm_build(struct vm_build *build, const struct vm_args *args);
int __wrap_vm_build(struct vm_build *build, const struct vm_args *args)
{
    struct mp_reader layers = mp_reader_of(args->layers.p, args->layers.n);
    struct mp_reader files = mp_reader_of(args->files.p, args->files.n);
    for (uint32_t left = mp_get_array(&layers); left; left--)
        vm_next_layer(&layers);
    for (uint32_t left = args->files.p ? mp_get_array(&files) : 0; left; left--)
        vm_next_file(&files);
    if (layers.failed || (args->files.p && files.failed))
        abort(); /* they were checked */
    build->steps.current = "fuzz";
    return -5;
}

int __wrap_vm_time_set(uint64_t time_ns);
int __wrap_vm_time_set(uint64_t time_ns)
{
    (void)time_ns;
    return 0;
}

int __wrap_vm_entropy_add(struct mp_bytes entropy);
int __wrap_vm_entropy_add(struct mp_bytes entropy)
{
    return entropy.n == VM_ENTROPY ? 0 : -5;
}

static void copy_value(struct mp_reader *r, struct mp_writer *w, int depth)
{
    struct mp_value v;
    if (depth > 40 || !mp_next(r, &v))
        return;
    uint32_t children = 0;
    switch (v.type) {
    case MP_NIL: mp_put_nil(w); break;
    case MP_BOOL: mp_put_bool(w, v.u.b); break;
    case MP_UINT: mp_put_u64(w, v.u.u); break;
    case MP_INT: mp_put_i64(w, v.u.i); break;
    case MP_FLOAT: mp_put_f64(w, v.u.f); break;
    case MP_STR: mp_put_str(w, v.u.bytes.p, v.u.bytes.n); break;
    case MP_BIN: case MP_EXT: mp_put_bin(w, v.u.bytes.p, v.u.bytes.n); break;
    case MP_ARRAY: mp_put_array(w, children = v.u.count); break;
    case MP_MAP: mp_put_map(w, v.u.count), children = 2 * v.u.count; break;
    }
    for (uint32_t i = 0; i < children && !r->failed; i++)
        copy_value(r, w, depth + 1);
}

static void fuzz_codec(const uint8_t *data, size_t n)
{
    struct mp_reader whole = mp_reader_of(data, n), parts = whole;
    size_t room = 9 * n + 16; /* the widest form of every value */
    uint8_t *out = malloc(room);
    struct mp_writer w = mp_writer_of(out, room);
    if (mp_skip(&whole)) {
        copy_value(&parts, &w, 0);
        if (parts.failed || w.overflow || parts.p != whole.p)
            abort();
        struct mp_reader again = mp_reader_of(out, mp_written(&w));
        if (!mp_skip(&again) || !mp_finished(&again))
            abort();
    }
    struct mp_writer tight = mp_writer_of(out, n / 2);
    parts = mp_reader_of(data, n);
    copy_value(&parts, &tight, 0);
    free(out);
}

static void connect_peer(void)
{
    int pair[2];
    if (peer >= 0)
        close(peer);
    serve_round(0);
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) < 0)
        abort();
    peer = pair[0];
    if (!conns_open(pair[1]))
        abort();
}

static void fuzz_frames(const uint8_t *data, size_t n)
{
    uint8_t head[4] = { (uint8_t)(n >> 24), (uint8_t)(n >> 16), (uint8_t)(n >> 8), (uint8_t)n };
    static uint8_t answers[1 << 16];
    if (send(peer, head, 4, MSG_NOSIGNAL) != 4 ||
        (n && send(peer, data, n, MSG_NOSIGNAL) != (ssize_t)n)) {
        connect_peer();
        return;
    }
    serve_round(0);
    ssize_t got;
    while ((got = read(peer, answers, sizeof answers)) > 0)
        ;
    if (got == 0)
        connect_peer();
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    config.any_peer = true;
    if (!tables_open() || serve_open())
        abort();
    connect_peer();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (!n)
        return 0;
    if (data[0] & 1) {
        fuzz_codec(data + 1, n - 1);
        return 0;
    }
    vm_state = data[0] & 2 ? VM_WAITING : data[0] & 4 ? VM_BEGUN : VM_NONE;
    fuzz_frames(data + 1, n - 1);
    return 0;
}
