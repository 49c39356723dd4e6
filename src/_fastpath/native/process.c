#include "native/process.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "native/kernel.h"

#ifndef CLONE_INTO_CGROUP
#define CLONE_INTO_CGROUP 0x200000000ULL
#endif

/* glibc's clone() takes 32 bits of flags and CLONE_INTO_CGROUP is bit 33; syscall() cannot return on
 * another stack. So the child branches to `run` before any compiled code sees the new stack. */
static long enter_clone3(struct clone_args *args, int (*run)(void *), void *argument)
{
#if defined(__x86_64__)
    long result;
    register int (*r8)(void *) __asm__("r8") = run;
    register void *r9 __asm__("r9") = argument;
    __asm__ volatile("syscall\n\t"
                     "testq %%rax, %%rax\n\t"
                     "jnz 1f\n\t"
                     "xorl %%ebp, %%ebp\n\t"
                     "movq %%r9, %%rdi\n\t"
                     "callq *%%r8\n\t"
                     "movl %%eax, %%edi\n\t"
                     "movl %[exit], %%eax\n\t"
                     "syscall\n\t"
                     "hlt\n"
                     "1:"
                     : "=a"(result)
                     : "0"((long)SYS_clone3), "D"(args), "S"(sizeof *args), "r"(r8), "r"(r9),
                       [exit] "i"(SYS_exit)
                     : "rcx", "r11", "memory", "cc");
    return result;
#elif defined(__aarch64__)
    register long x0 __asm__("x0") = (long)args;
    register long x1 __asm__("x1") = sizeof *args;
    register long x8 __asm__("x8") = SYS_clone3;
    register int (*x9)(void *) __asm__("x9") = run;
    register void *x10 __asm__("x10") = argument;
    __asm__ volatile("svc #0\n\t"
                     "cbnz x0, 1f\n\t"
                     "mov x29, xzr\n\t"
                     "mov x0, x10\n\t"
                     "blr x9\n\t"
                     "mov x8, %[exit]\n\t"
                     "svc #0\n\t"
                     "brk #1\n"
                     "1:"
                     : "+r"(x0)
                     : "r"(x1), "r"(x8), "r"(x9), "r"(x10), [exit] "i"(SYS_exit)
                     : "memory", "cc");
    return x0;
#else
#error "clone3 entry is written for x86_64 and aarch64"
#endif
}

pid_t spawn_child(const struct spawn *spawn)
{
    struct clone_args args = {
        .flags = spawn->flags | CLONE_VM,
        .pidfd = (uint64_t)(uintptr_t)spawn->pidfd,
        .exit_signal = (uint64_t)spawn->exit_signal,
        .stack = (uint64_t)(uintptr_t)spawn->stack,
        .stack_size = CHILD_STACK,
        .cgroup = spawn->flags & CLONE_INTO_CGROUP ? (uint64_t)spawn->cgroup : 0,
    };
    return (pid_t)enter_clone3(&args, spawn->run, spawn->argument);
}

void *make_stack(void)
{
    void *stack = mmap(NULL, CHILD_STACK, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    return stack == MAP_FAILED ? NULL : stack;
}

void free_stack(void *stack)
{
    munmap(stack, CHILD_STACK);
}

int run_in_child(uint64_t flags, int (*run)(void *), void *argument)
{
    sigset_t all, before;
    int status = 0;
    void *stack = make_stack();

    if (!stack)
        return -ENOMEM;
    struct spawn spawn = {
        .flags = flags | CLONE_VFORK, .stack = stack, .run = run, .argument = argument
    };
    /* A handler of the parent must not run in the child: it would run on shared memory. */
    sigfillset(&all);
    syscall(SYS_rt_sigprocmask, SIG_BLOCK, &all, &before, 8);
    pid_t pid = spawn_child(&spawn);
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, 8);
    if (pid > 0) {
        pid_t done;
        do
            done = waitpid(pid, &status, __WCLONE);
        while (done < 0 && errno == EINTR);
    }
    free_stack(stack);
    if (pid < 0)
        return pid;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -EIO;
}
