#include "blobd/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

/* Copy `text` as the inside of a JSON string; paths and server messages may hold anything. */
static size_t escape(char *out, size_t room, const char *text)
{
    size_t n = 0;

    for (const unsigned char *p = (const unsigned char *)text; *p && n + 7 < room; p++) {
        if (*p == '"' || *p == '\\') {
            out[n++] = '\\';
            out[n++] = (char)*p;
        } else if (*p < 0x20 || *p >= 0x7f) {
            n += (size_t)snprintf(out + n, room - n, "\\u%04x", *p);
        } else {
            out[n++] = (char)*p;
        }
    }
    out[n] = 0;
    return n;
}

void log_line(const char *level, const char *message, const char *blob, const char *detail, ...)
{
    char text[1024] = "", escaped[2048], line[4096];
    struct timespec now;

    if (detail) {
        va_list arguments;
        va_start(arguments, detail);
        vsnprintf(text, sizeof text, detail, arguments);
        va_end(arguments);
    }
    clock_gettime(CLOCK_REALTIME, &now);
    escape(escaped, sizeof escaped, text);
    int n = snprintf(line, sizeof line,
                     "{\"time\":%lld.%06ld,\"level\":\"%s\",\"logger\":\"dsec-blobd\","
                     "\"message\":\"%s\"%s%s%s%s%s%s}\n",
                     (long long)now.tv_sec, now.tv_nsec / 1000, level, message,
                     blob ? ",\"blob\":\"" : "", blob ? blob : "", blob ? "\"" : "",
                     detail ? ",\"detail\":\"" : "", detail ? escaped : "", detail ? "\"" : "");
    /* One write, so that the lines of several threads do not mix; a reader that left is no reason
     * to stop serving. */
    if (n > 0 && write(STDERR_FILENO, line, (size_t)n) < 0)
        return;
}
