/* SHA-256 through libcrypto, one context per thread. */
#ifndef DSEC_BLOBD_DIGEST_H
#define DSEC_BLOBD_DIGEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* False when libcrypto fails (no memory): the caller treats the data as not proven. */
bool sha256(const void *data, size_t size, uint8_t digest[32]);
bool sha256_is(const void *data, size_t size, const uint8_t expected[32]);

#endif
