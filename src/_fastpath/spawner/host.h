/* What a spawner keeps of its host: one descriptor of the root, two of mount namespaces.
 *
 * A clone copies the mount table of its parent, so the spawner lives in a mount namespace with
 * nothing in it but a small read-only file system: the /dev of every sandbox and what masks are made
 * of. It works on the host's files through `root`, and enters the host's mount namespace for the few
 * things that need it (cloning a mount that is attached there).
 */
#ifndef DSEC_SPAWNER_HOST_H
#define DSEC_SPAWNER_HOST_H

#include <stdbool.h>

struct host {
    int root;        /* O_PATH of the host's / */
    int host_mounts; /* mount namespace of the host */
    int own_mounts;  /* ours */
    int null;        /* /dev/null */
    int init;        /* the executable of PID 1 */
    int shell;       /* the platform's shell, for PID 1 to keep; -1: there is none */
    int net;         /* O_PATH of our /proc/thread-self/net */
    int own_netns;   /* network namespace of the host */
    bool may_lower_oom;
    bool away; /* in the host's mount namespace for the moment */
    bool by_path; /* overlayfs wants paths, and detached mounts cannot be cloned (before Linux 6.15) */
    unsigned anchored;
    void *stack, *helper_stack; /* CHILD_STACK bytes each */
};

/* Move this process into its small mount namespace; its umask becomes 022. `init` is a path on the
 * host. On failure the step is in `*step`. */
int enter_host(struct host *host, const char *init, const char **step);

/* Open `path` of the host; symbolic links stay below its root. */
int host_open(const struct host *host, const char *path, int flags);
/* Open the directory that holds `path`, and its last component in `*name`. */
int host_parent(const struct host *host, const char *path, const char **name);
/* Write a kernel file of the host. */
int host_write(const struct host *host, const char *path, const char *value);
/* Remove the tree `path` of the host; "" and absent are success. */
int host_remove(const struct host *host, const char *path);

/* A detached clone of the mount at descriptor `fd`, or of the host's `path` when `fd` is -1. Goes to the
 * host's mount namespace when the mount belongs to it, and stays there for the next one. */
int host_clone_mount(struct host *host, int fd, const char *path);
/* netns_reusable (native/namespaces.h) without a child: this process enters the namespace. */
bool host_netns_reusable(const struct host *host, int netns);

/* Go to the mount namespace of the process `pidfd`, until `host_return`. Meant for its outer one, where
 * nobody lives but PID 1 and all is as the spawner made it. */
int host_visit(struct host *host, int pidfd);

/* Attach the detached mount `fd` in our own mount namespace, on top of those attached before. */
int host_anchor(struct host *host, int fd);
/* Detach all of them; descriptors of them stay good for files, not for mounts. */
void host_unanchor(struct host *host);

/* Back to our own mount namespace, where children are made. */
void host_return(struct host *host);

#endif
