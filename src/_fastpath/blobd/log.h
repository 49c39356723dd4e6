/* Log lines as the daemon writes them: one JSON object a line on standard error. */
#ifndef DSEC_BLOBD_LOG_H
#define DSEC_BLOBD_LOG_H

#define LOG_INFO "info"
#define LOG_WARNING "warning"
#define LOG_ERROR "error"

/* `blob` may be NULL; `detail` is a printf format for the field of that name, NULL for none. */
void log_line(const char *level, const char *message, const char *blob, const char *detail, ...)
    __attribute__((format(printf, 4, 5)));

#endif
