/* The last steps of a command: directory, environment, exec. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "child.h"
#include "config.h"
#include "loop.h"

#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

static struct mp_bytes bytes_of(const char *text)
{
    return (struct mp_bytes){ (const uint8_t *)text, strlen(text) };
}

/* Memory of this child only; it goes with the exec. */
static char *arena, *arena_end;

static char *take(size_t n)
{
    n = (n + 15) & ~(size_t)15;
    if (!arena || (size_t)(arena_end - arena) < n)
        child_fail(EXHAUSTED, "environment and arguments are too large");
    char *p = arena;
    arena += n;
    return p;
}

static void arena_open(size_t n)
{
    arena = map_alloc(n);
    arena_end = arena ? arena + n : NULL;
}

static char *text_of(struct mp_bytes bytes)
{
    char *text = take(bytes.n + 1);
    memcpy(text, bytes.p, bytes.n);
    text[bytes.n] = 0;
    return text;
}

struct environment {
    char **entries;
    size_t n;
};

static void env_set(struct environment *env, struct mp_bytes key, struct mp_bytes value)
{
    char *entry = take(key.n + value.n + 2);
    memcpy(entry, key.p, key.n);
    entry[key.n] = '=';
    memcpy(entry + key.n + 1, value.p, value.n);
    entry[key.n + 1 + value.n] = 0;
    for (size_t i = 0; i < env->n; i++)
        if (strncmp(env->entries[i], entry, key.n + 1) == 0) {
            env->entries[i] = entry;
            return;
        }
    env->entries[env->n++] = entry;
}

static void env_merge(struct environment *env, struct mp_bytes raw)
{
    struct mp_reader r = mp_reader_of(raw.p, raw.n);
    uint32_t n = raw.p ? mp_get_map(&r) : 0;
    for (uint32_t i = 0; i < n; i++) {
        struct mp_bytes key = mp_get_str(&r), value = mp_get_str(&r);
        env_set(env, key, value);
    }
}

static const char *env_get(const struct environment *env, const char *key)
{
    size_t n = strlen(key);
    for (size_t i = 0; i < env->n; i++)
        if (strncmp(env->entries[i], key, n) == 0 && env->entries[i][n] == '=')
            return env->entries[i] + n + 1;
    return NULL;
}

static uint32_t pairs(struct mp_bytes raw)
{
    struct mp_reader r = mp_reader_of(raw.p, raw.n);
    return raw.p ? mp_get_map(&r) : 0;
}

/* Defaults, then the sandbox's environment, then the call's. */
static struct environment env_build(const struct identity *who, struct mp_bytes call, bool pty)
{
    struct environment env = { 0 };
    size_t room = (size_t)pairs(config.env) + pairs(call) + 8;
    env.entries = (char **)(void *)take(room * sizeof *env.entries);
    env_set(&env, bytes_of("PATH"), bytes_of(DEFAULT_PATH));
    env_set(&env, bytes_of("HOME"), bytes_of(who->home));
    env_set(&env, bytes_of("USER"), bytes_of(who->name));
    env_set(&env, bytes_of("LOGNAME"), bytes_of(who->name));
    env_set(&env, bytes_of("SHELL"), bytes_of(who->shell));
    if (pty)
        env_set(&env, bytes_of("TERM"), bytes_of("xterm-256color"));
    env_merge(&env, config.env);
    env_merge(&env, call);
    env.entries[env.n] = NULL;
    return env;
}

static void enter_directory(struct mp_bytes cwd, const struct identity *who)
{
    struct mp_bytes workdir = config.workdir;
    bool absolute = cwd.n && cwd.p[0] == '/';
    if (!absolute && workdir.n) {
        if (chdir(text_of(workdir)) < 0)
            child_fail_errno(errno, "cannot enter the sandbox's workdir", workdir);
    } else if (!absolute && chdir(who->home) < 0 && chdir("/") < 0) {
        child_fail_errno(errno, "cannot enter", bytes_of("/"));
    }
    if (cwd.n && chdir(text_of(cwd)) < 0)
        child_fail_errno(errno, "cannot enter cwd", cwd);
}

/* exec, and as execvp does: a text file without an interpreter line is a shell script. */
static int try_exec(const char *path, char **argv, size_t argc, char **env)
{
    execve(path, argv, env);
    if (errno != ENOEXEC)
        return errno;
    char **script = (char **)(void *)take((argc + 3) * sizeof *script);
    script[0] = (char *)(uintptr_t) "/bin/sh";
    script[1] = (char *)(uintptr_t)path;
    memcpy(script + 2, argv + 1, argc * sizeof *script);
    execve("/bin/sh", script, env);
    return ENOEXEC;
}

static int search_exec(const char *name, char **argv, size_t argc, const struct environment *env)
{
    const char *path = env_get(env, "PATH");
    int worst = ENOENT;
    if (strchr(name, '/'))
        return try_exec(name, argv, argc, env->entries);
    if (!*name)
        return ENOENT;
    char *full = take(MAX_PATH);
    for (const char *p = path ? path : DEFAULT_PATH;;) {
        size_t n = strcspn(p, ":");
        int need = snprintf(full, MAX_PATH, "%.*s%s%s", (int)n, p, n ? "/" : "", name);
        if (need > 0 && need < MAX_PATH) {
            int err = try_exec(full, argv, argc, env->entries);
            if (err == EACCES)
                worst = EACCES; /* a later directory may still have one that runs */
            else if (err != ENOENT && err != ENOTDIR)
                return err;
        }
        if (!p[n])
            return worst;
        p += n + 1;
    }
}

static _Noreturn void run(char **argv, size_t argc, const struct environment *env)
{
    const char *name = argv[0];
    apparmor_enter(false);
    int err = search_exec(name, argv, argc, env);
    struct mp_bytes shown = bytes_of(name);
    if (err == ENOENT && strchr(name, '/') && access(name, F_OK) == 0)
        child_fail_errno(err, "the interpreter is missing of", shown);
    if (err == ENOENT)
        child_fail(NOT_FOUND, "no such command: %.150s", name);
    if (err == EACCES)
        child_fail(PERMISSION_DENIED, "not executable by this user: %.150s", name);
    child_fail_errno(err, "cannot execute", shown);
}

static const char *default_shell(void)
{
    return access("/bin/bash", X_OK) == 0 ? "/bin/bash" : "/bin/sh";
}

/* The host's static bash, by its descriptor: what root inside did to its files and its loader does not
 * matter. -p: neither BASH_ENV nor functions and options of the environment are taken. */
static _Noreturn void run_platform_shell(const char *text, const struct environment *env)
{
    char *argv[] = { (char *)(uintptr_t) "bash", (char *)(uintptr_t) "-p", (char *)(uintptr_t) "-c",
                     (char *)(uintptr_t)text, NULL };
    apparmor_enter(true);
    syscall(SYS_execveat, SHELL_FD, "", argv, env->entries, AT_EMPTY_PATH);
    child_fail_errno(errno, "cannot execute", bytes_of("the platform's shell"));
}

/* Without a shell of the platform the sandbox's own. */
static struct child_fds with_shell(const struct child_fds *fds, bool wanted)
{
    struct child_fds with = *fds;
    with.shell = wanted && config.has_shell;
    return with;
}

static char **argv_of_shell(const char *shell, const char *text)
{
    char **argv = (char **)(void *)take(4 * sizeof *argv);
    argv[0] = (char *)(uintptr_t)shell;
    argv[1] = (char *)(uintptr_t) "-c";
    argv[2] = (char *)(uintptr_t)text;
    argv[3] = NULL;
    return argv;
}

_Noreturn void exec_child(const struct exec_args *args, const struct child_fds *fds)
{
    struct identity who;
    struct child_fds own = with_shell(fds, args->shell.p && !args->interpreter.p);
    struct role role = { .user = args->user, .groups = args->groups, .command = true,
                         .pty = args->pty, .rows = args->rows, .cols = args->cols };
    child_enter(&own, &role, &who);
    exec_program(args, &who, own.shell);
}

_Noreturn void exec_program(const struct exec_args *args, const struct identity *who, bool shell)
{
    struct mp_reader r = mp_reader_of(args->argv.p, args->argv.n);
    size_t argc = args->argv.p ? mp_get_array(&r) : 3;
    /* Each string and pointer is rounded up to 16 bytes. */
    size_t entries = argc + pairs(config.env) + pairs(args->env) + 64;
    arena_open(args->argv.n + args->shell.n + config.env.n + args->env.n + entries * 64 + 65536);
    enter_directory(args->cwd, who);
    struct environment env = env_build(who, args->env, args->pty);
    if (shell)
        run_platform_shell(text_of(args->shell), &env);
    if (args->shell.p) {
        const char *own = args->interpreter.p ? text_of(args->interpreter) : default_shell();
        run(argv_of_shell(own, text_of(args->shell)), 3, &env);
    }
    char **argv = (char **)(void *)take((argc + 1) * sizeof *argv);
    for (size_t i = 0; i < argc; i++)
        argv[i] = text_of(mp_get_bytes(&r));
    argv[argc] = NULL;
    run(argv, argc, &env);
}

/* One line per command on 9: 'e' and the text itself, or 'b' and the text with newlines and
 * backslashes escaped for printf %b; the status goes to 8. `command eval`, because a syntax error
 * inside a bare eval ends a POSIX shell. */
static const char driver[] =
    "while IFS= read -r DSEC_LINE <&9; do case $DSEC_LINE in "
    "e*) command eval \"${DSEC_LINE#?}\" 9<&- 8>&- ;; "
    "*) command eval \"$(printf %b \"${DSEC_LINE#?}\" 9<&- 8>&-)\" 9<&- 8>&- ;; "
    "esac; printf '%d\\n' \"$?\" >&8; done";

_Noreturn void shell_child(const struct session_args *args, const struct child_fds *fds)
{
    struct identity who;
    struct child_fds own = with_shell(fds, !args->shell.n);
    child_enter(&own, &(struct role){ .user = args->user, .command = true }, &who);
    size_t entries = pairs(config.env) + pairs(args->env) + 64;
    arena_open(config.env.n + args->env.n + entries * 64 + 65536);
    enter_directory(args->cwd, &who);
    struct environment env = env_build(&who, args->env, false);
    if (own.shell)
        run_platform_shell(driver, &env);
    const char *shell = args->shell.n ? text_of(args->shell) : default_shell();
    run(argv_of_shell(shell, driver), 3, &env);
}
