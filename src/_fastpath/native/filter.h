/* System call filters, as src/dsecd/policy/seccomp.py makes them. */
#ifndef DSEC_NATIVE_FILTER_H
#define DSEC_NATIVE_FILTER_H

/* Install the filter that the file `fd` holds from its start (struct sock_filter[]) for this process and
 * all that it makes. -EINVAL when the file is empty or too long. */
int install_filter(int fd);

#endif
