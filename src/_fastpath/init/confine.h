/* What a command's process gives up for good before it becomes the user's. */
#ifndef DSEC_CONFINE_H
#define DSEC_CONFINE_H

/* Keep this process, and all that comes of it, to the files that the configuration opens (landlock(7)). Needs
 * CAP_SYS_ADMIN inside. A failure is reported and ends the child. */
void confine_files(void);

#endif
