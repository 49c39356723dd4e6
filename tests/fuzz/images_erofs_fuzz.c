/* The C of the image writer under the sanitizers: libFuzzer over the encoded tree, or with -DREPLAY
 * a program that builds the tree on standard input and tries every failure of an allocation. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "erofs/chunks.h"
#include "erofs/layout.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length)
{
    struct erofs_plan plan;
    if (erofs_plan(data, length, &plan))
        return 0;
    if (plan.size < 64 << 20) {
        uint8_t *image = malloc(plan.size);
        if (!image)
            abort();
        erofs_write(&plan, image);
        free(image);
    }
    erofs_free(&plan);
    return 0;
}

#ifdef REPLAY
static int fail_allocation;

void *replay_calloc(size_t count, size_t size);

void *replay_calloc(size_t count, size_t size)
{
    if (fail_allocation)
        return NULL;
    void *memory = malloc(count * size);
    if (memory)
        memset(memory, 0, count * size);
    return memory;
}

static int build(void)
{
    static uint8_t tree[16 << 20];
    size_t length = fread(tree, 1, sizeof tree, stdin);
    struct erofs_plan plan;
    fail_allocation = 1;
    if (erofs_plan(tree, length, &plan) != -ENOMEM)
        return 2;
    fail_allocation = 0;
    int error = erofs_plan(tree, length, &plan);
    if (error)
        return 3;
    uint8_t *image = malloc(plan.size); /* exactly: a byte beyond is found */
    erofs_write(&plan, image);
    fwrite(image, 1, plan.size, stdout);
    free(image);
    erofs_free(&plan);
    return 0;
}

/* Read standard input, a file of `end` bytes, with a buffer of `capacity`. */
static int chunks(off_t end, size_t capacity)
{
    struct chunk_reader reader = { .fd = 0, .end = end, .capacity = capacity };
    const char *step = "";
    reader.buffer = malloc(capacity);
    int error = 0;
    while (!error && reader.at < end) {
        reader.used = 0;
        error = read_chunks(&reader, &step);
        for (size_t i = 0; i < reader.count; i++)
            fwrite(reader.chunks[i].digest, 1, DIGEST_BYTES, stdout);
    }
    free(reader.buffer);
    return -error;
}

int main(int argc, char **argv)
{
    return argc == 3 ? chunks(atoll(argv[1]), (size_t)atoll(argv[2])) : build();
}
#endif
