#include "blobd/digest.h"

#include <openssl/evp.h>
#include <pthread.h>
#include <string.h>

static EVP_MD *method;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;

static void drop(void *context)
{
    EVP_MD_CTX_free(context);
}

static void fetch_method(void)
{
    method = EVP_MD_fetch(NULL, "SHA256", NULL); /* once: a look-up by name takes locks */
    pthread_key_create(&key, drop);
}

bool sha256(const void *data, size_t size, uint8_t digest[32])
{
    pthread_once(&once, fetch_method);
    EVP_MD_CTX *context = pthread_getspecific(key);
    if (!context) {
        context = EVP_MD_CTX_new();
        pthread_setspecific(key, context);
    }
    return method && context && EVP_DigestInit_ex2(context, method, NULL) &&
           EVP_DigestUpdate(context, data, size) && EVP_DigestFinal_ex(context, digest, NULL);
}

bool sha256_is(const void *data, size_t size, const uint8_t expected[32])
{
    uint8_t digest[32];
    return sha256(data, size, digest) && memcmp(digest, expected, 32) == 0;
}
