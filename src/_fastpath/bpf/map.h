/* Entering and removing elements of BPF maps, each call one bpf(2). */
#ifndef DSEC_BPF_MAP_H
#define DSEC_BPF_MAP_H

#include <stdint.h>

/* Keys and values have the sizes of the map, one behind the other. They return 0 or a negative
 * errno; a batch that fails has done the elements before the one that did. */
int map_update(int map, const void *key, const void *value, uint64_t flags);
int map_update_batch(int map, const void *keys, const void *values, uint32_t count);
int map_delete_batch(int map, const void *keys, uint32_t count);

#endif
