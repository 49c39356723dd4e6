#include "blobd/source.h"

#include <curl/curl.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "blobd/blob.h"

#define CREDENTIALS_MAX 8192
#define CONNECT_TIMEOUT_MS 5000
#define RECEIVE_BYTES 65536L /* at once */
#define FIRST_BYTES 65536u   /* of a file: how long they take is its latency */

struct reader {
    CURL *curl;
    /* of the request under way */
    uint8_t *data;
    size_t room;
    size_t filled;
    source_progress progress;
    void *argument;
    struct reader *next; /* free ones */
};

static struct {
    pthread_mutex_t lock;
    struct reader *last;
} readers = { .lock = PTHREAD_MUTEX_INITIALIZER };

struct credentials {
    char user[600]; /* "key:secret" */
    char token[4096]; /* "": none */
};

static char *copy_text(struct mp_bytes text)
{
    return text.n && text.n < 4096 && !memchr(text.p, 0, text.n) ? strndup((const char *)text.p, text.n)
                                                                  : NULL;
}

/* Every text that a source owns. */
static char **field_of(struct source *source, int i)
{
    return (char **[]){ &source->location, &source->region, &source->credentials, &source->profile,
                        &source->authorities }[i];
}

#define FIELDS 5

void source_free(struct source *source)
{
    for (int i = 0; i < FIELDS; i++)
        free(*field_of(source, i));
    *source = (struct source){ .kind = SOURCE_NONE };
}

bool source_copy(struct source *copy, const struct source *source)
{
    struct source shallow = *source;

    *copy = (struct source){ .kind = source->kind };
    for (int i = 0; i < FIELDS; i++) {
        const char *text = *field_of(&shallow, i);
        if (text && !(*field_of(copy, i) = strdup(text))) {
            source_free(copy);
            return false;
        }
    }
    return true;
}

static bool is_http(const char *url)
{
    return strncmp(url, "http://", 7) == 0 || strncmp(url, "https://", 8) == 0;
}

/* False: the value says that the source cannot be read from here. */
static bool set_field(struct source *source, struct mp_bytes key, struct mp_bytes value)
{
    char **field = mp_equal(key, "path") || mp_equal(key, "url") ? &source->location
                   : mp_equal(key, "region")                     ? &source->region
                   : mp_equal(key, "credentials_file")           ? &source->credentials
                   : mp_equal(key, "profile")                    ? &source->profile
                   : mp_equal(key, "ca_file")                    ? &source->authorities
                                                                 : NULL;
    if (mp_equal(key, "kind"))
        source->kind = mp_equal(value, "file")   ? SOURCE_FILE
                       : mp_equal(value, "http") ? SOURCE_HTTP
                                                 : SOURCE_NONE;
    if (field && !*field)
        *field = copy_text(value);
    /* Those of the environment and of the instance are the daemon's: it puts them into a file. */
    return !mp_equal(key, "credentials") || mp_equal(value, "none") || mp_equal(value, "file");
}

bool source_read_description(struct mp_reader *r, struct source *source)
{
    uint32_t count = mp_get_map(r);
    bool good = true;

    *source = (struct source){ .kind = SOURCE_NONE };
    for (uint32_t i = 0; i < count && !r->failed; i++) {
        struct mp_bytes key = mp_get_str(r);
        enum mp_type type;
        if (!mp_peek(r, &type) || type != MP_STR)
            mp_skip(r); /* of a newer daemon */
        else
            good = set_field(source, key, mp_get_str(r)) && good;
    }
    good = good && !r->failed && source->location &&
           (source->kind == SOURCE_FILE   ? source->location[0] == '/'
            : source->kind == SOURCE_HTTP ? is_http(source->location)
                                          : false) &&
           (!source->credentials || source->region);
    if (!good)
        source_free(source);
    return good;
}

static void set_fault(struct fault *fault, enum fault_kind kind, const char *text)
{
    fault->kind = kind;
    snprintf(fault->text, sizeof fault->text, "%s", text);
}

/* --- files --------------------------------------------------------------------------------- */

static struct pace read_file(const char *path, uint64_t offset, uint8_t *data, size_t size,
                             struct fault *fault)
{
    uint64_t start = now_ns(), first = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0) {
        set_fault(fault, errno == ENOENT ? FAULT_LASTING : FAULT_PASSING, strerror(errno));
        return (struct pace){ 0 };
    }
    for (size_t done = 0; done < size && !fault->kind;) {
        if (done && !first)
            first = now_ns() - start;
        size_t wanted = !done && size > FIRST_BYTES ? FIRST_BYTES : size - done;
        ssize_t n = pread(fd, data + done, wanted, (off_t)(offset + done));
        if (n > 0)
            done += (size_t)n;
        else if (n == 0)
            set_fault(fault, FAULT_LASTING, "the file is shorter than the blob");
        else if (errno != EINTR)
            set_fault(fault, FAULT_PASSING, strerror(errno));
    }
    close(fd);
    uint64_t all = now_ns() - start;
    return first ? (struct pace){ first, all - first } : (struct pace){ all, 0 };
}

/* --- HTTP ---------------------------------------------------------------------------------- */

static size_t take_body(char *part, size_t size, size_t count, void *argument)
{
    struct reader *reader = argument;
    size_t n = size * count;

    if (n > reader->room - reader->filled)
        return 0; /* more than was asked for: curl ends the transfer */
    memcpy(reader->data + reader->filled, part, n);
    reader->filled += n;
    long status = 0;
    curl_easy_getinfo(reader->curl, CURLINFO_RESPONSE_CODE, &status);
    if (status == 206) /* neither the text of an error nor the object from its beginning */
        reader->progress(reader->argument, reader->filled);
    return n;
}

bool reader_add(void)
{
    struct reader *reader = calloc(1, sizeof *reader);

    if (!reader)
        return false;
    reader->curl = curl_easy_init();
    if (!reader->curl) {
        free(reader);
        return false;
    }
    reader_give(reader);
    return true;
}

struct reader *reader_take(void)
{
    pthread_mutex_lock(&readers.lock);
    struct reader *reader = readers.last;
    readers.last = reader->next;
    pthread_mutex_unlock(&readers.lock);
    return reader;
}

void reader_give(struct reader *reader)
{
    pthread_mutex_lock(&readers.lock);
    reader->next = readers.last;
    readers.last = reader;
    pthread_mutex_unlock(&readers.lock);
}

/* Take the value of `key` from the "key = value" lines between `text` and `end`. */
static void take_value(const char *text, const char *end, const char *key, char *value, size_t room)
{
    const char *p = strstr(text, key);
    value[0] = 0;
    if (!p || p >= end)
        return;
    p += strlen(key);
    p += strspn(p, " \t=");
    size_t n = strcspn(p, " \t\r\n");
    if (n < room) {
        memcpy(value, p, n);
        value[n] = 0;
    }
}

/* Read anew for each request: credentials are rotated under us. */
static bool read_credentials(const struct source *source, struct credentials *credentials)
{
    char text[CREDENTIALS_MAX], key[256] = "", secret[256], section[300];
    int fd = open(source->credentials, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);

    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    snprintf(section, sizeof section, "[%s]", source->profile ? source->profile : "default");
    const char *start = strstr(text, section), *next = start ? strstr(start + 1, "\n[") : NULL;
    if (start) {
        const char *end = next ? next : text + n;
        take_value(start, end, "aws_access_key_id", key, sizeof key);
        take_value(start, end, "aws_secret_access_key", secret, sizeof secret);
        take_value(start, end, "aws_session_token", credentials->token, sizeof credentials->token);
        snprintf(credentials->user, sizeof credentials->user, "%s:%s", key, secret);
        explicit_bzero(secret, sizeof secret);
    }
    explicit_bzero(text, sizeof text);
    return key[0] != 0;
}

static bool sign(struct reader *reader, const struct source *source, struct curl_slist **headers,
                 struct fault *fault)
{
    struct credentials credentials;
    char provider[128], line[4200];

    if (!source->credentials)
        return true;
    if (!read_credentials(source, &credentials)) {
        set_fault(fault, FAULT_LASTING, "the credentials file cannot be read or has no key");
        return false;
    }
    snprintf(provider, sizeof provider, "aws:amz:%s:s3", source->region);
    curl_easy_setopt(reader->curl, CURLOPT_AWS_SIGV4, provider);
    curl_easy_setopt(reader->curl, CURLOPT_USERPWD, credentials.user);
    *headers = curl_slist_append(*headers, "x-amz-content-sha256: UNSIGNED-PAYLOAD");
    if (credentials.token[0]) {
        snprintf(line, sizeof line, "x-amz-security-token: %s", credentials.token);
        *headers = curl_slist_append(*headers, line);
    }
    explicit_bzero(&credentials, sizeof credentials);
    return true;
}

static void judge(struct reader *reader, CURLcode code, size_t size, struct fault *fault)
{
    long status = 0;
    char text[sizeof fault->text];

    curl_easy_getinfo(reader->curl, CURLINFO_RESPONSE_CODE, &status);
    if (status >= 300) {
        bool passing = status >= 500 || status == 429 || status == 408;
        snprintf(text, sizeof text, "the store answered with status %ld", status);
        set_fault(fault, passing ? FAULT_PASSING : FAULT_LASTING, text);
    } else if (code == CURLE_WRITE_ERROR) {
        set_fault(fault, FAULT_LASTING, "the store sent more than was asked for");
    } else if (code != CURLE_OK) {
        set_fault(fault, FAULT_PASSING, curl_easy_strerror(code));
    } else if (reader->filled != size) {
        set_fault(fault, FAULT_LASTING, "the store sent less than was asked for");
    }
}

static struct pace read_http(struct reader *reader, const struct source *source, uint64_t offset,
                             size_t size, uint64_t timeout_ns, struct fault *fault)
{
    CURL *curl = reader->curl;
    struct curl_slist *headers = NULL;
    char range[48];
    curl_off_t sent = 0, first = 0, all = 0;

    curl_easy_reset(curl); /* options only: connections stay open */
    snprintf(range, sizeof range, "%llu-%llu", (unsigned long long)offset,
             (unsigned long long)(offset + size - 1));
    long timeout_ms = (long)(timeout_ns / 1000000) + 1;
    curl_easy_setopt(curl, CURLOPT_URL, source->location);
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(curl, CURLOPT_RANGE, range);
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, timeout_ms);
    curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS,
                     timeout_ms < CONNECT_TIMEOUT_MS ? timeout_ms : (long)CONNECT_TIMEOUT_MS);
    curl_easy_setopt(curl, CURLOPT_BUFFERSIZE, RECEIVE_BYTES);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, take_body);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, reader);
    if (source->authorities)
        curl_easy_setopt(curl, CURLOPT_CAINFO, source->authorities);
    if (sign(reader, source, &headers, fault)) {
        curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
        judge(reader, curl_easy_perform(curl), size, fault);
        curl_easy_getinfo(curl, CURLINFO_STARTTRANSFER_TIME_T, &first);
        curl_easy_getinfo(curl, CURLINFO_PRETRANSFER_TIME_T, &sent);
        curl_easy_getinfo(curl, CURLINFO_TOTAL_TIME_T, &all);
    }
    curl_slist_free_all(headers);
    return (struct pace){ first > sent ? (uint64_t)(first - sent) * 1000 : 0,
                          all > first ? (uint64_t)(all - first) * 1000 : 0 };
}

struct pace source_read(struct reader *reader, const struct source *source, uint64_t offset,
                        uint8_t *data, size_t size, uint64_t timeout_ns, source_progress progress,
                        void *argument, struct fault *fault)
{
    *fault = (struct fault){ .kind = FAULT_NONE };
    if (source->kind == SOURCE_FILE)
        return read_file(source->location, offset, data, size, fault);
    reader->data = data;
    reader->room = size;
    reader->filled = 0;
    reader->progress = progress;
    reader->argument = argument;
    return read_http(reader, source, offset, size, timeout_ns, fault);
}
