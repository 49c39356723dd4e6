/* The control socket: SOCK_SEQPACKET, for the user that the process runs as.
 *
 * A request is the msgpack array [number, operation, arguments], an answer [number, error, result];
 * error is nil or {"code", "message"} with the codes of libdsec.errors. What is not such a request
 * ends its connection; what asks for something impossible gets an error. See control_ops.c for the
 * operations.
 */
#ifndef DSEC_BLOBD_CONTROL_H
#define DSEC_BLOBD_CONTROL_H

#include <stdbool.h>
#include <stdint.h>

#include "blobd/blob.h"
#include "wire/msgpack.h"

#define FRAME_MAX (64u << 10)
#define CONTROL_VERSION 1

/* One request while it is carried out. */
struct call {
    struct mp_reader args;
    struct mp_writer out;   /* of the result, one value */
    const char *code;       /* of the error; NULL: none */
    char message[256];
    int fd;                 /* to send beside the answer, or -1 */
    bool end;               /* the process ends after the answer */
};

struct service {
    int fuse;    /* descriptor of the connection */
    int group, slots; /* of preaccess.c, or -1 */
    int state;   /* directory of what must survive the process */
    int keeper;  /* pid of the parent that starts us anew */
    bool resend; /* the kernel can ask for requests again */
};

extern struct service service;

int control_listen(const char *path); /* descriptor or negative errno */
/* Answer requests until one asks to end. */
void control_serve(int listener);

/* control_ops.c */
void call_run(struct call *call, struct mp_bytes operation, struct mp_bytes frame);
void call_fail(struct call *call, const char *code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Arguments. Go to the value of `key`; false when it is not there. */
bool call_seek(struct call *call, const char *key, struct mp_reader *value);
uint64_t call_number(struct call *call, const char *key, uint64_t otherwise, uint64_t most);
bool call_id(struct call *call, const char *key, char id[ID_SIZE]);
bool call_take_id(struct mp_reader *value, char id[ID_SIZE]);

/* state.c */
void state_save(struct call *call, const char *name, struct mp_bytes frame);
void state_forget(const char *name);
void state_restore(void);
bool state_restoring(void);

#endif
