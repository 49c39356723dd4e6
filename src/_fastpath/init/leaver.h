/* Children whose call is over and that end by themselves: with their result sent, or to undo what
 * their caller abandoned. Not for ever, though: the sandbox may have stopped or frozen them. */
#ifndef DSEC_LEAVER_H
#define DSEC_LEAVER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

bool leaver_table_open(void);
/* Kill `pid` (<= 0: nobody) unless it ends within LEAVE_US; at once when too many are leaving. */
void leaver_add(pid_t pid);
/* It ended, or was stopped and is killed; false: not one of these. */
bool leaver_reap(pid_t pid);
bool leaver_stopped(pid_t pid);
/* Kill what is overdue; the next instant one is due, or 0. */
uint64_t leavers_tick(uint64_t now);

#endif
