/* The serial port of a VM: one stream for the life of the machine, on which one peer after the other
 * comes and goes. */
#ifndef DSEC_PORT_H
#define DSEC_PORT_H

#include "conn.h"

/* The connection on the port ended: wait for the next peer, and serve it with clean state. */
void port_await(struct conn *conn);
/* The peer broke the protocol and is still there, for nobody can hang up on it: hear nothing of what it
 * sends until it has gone. */
void port_ignore(struct conn *conn);

#endif
