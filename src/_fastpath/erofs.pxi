from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t

cdef extern from "erofs/layout.h" nogil:
    cdef struct c_erofs_plan "erofs_plan":
        uint64_t size
    int c_plan_erofs "erofs_plan"(const uint8_t *tree, size_t length, c_erofs_plan *plan)
    void c_write_erofs "erofs_write"(const c_erofs_plan *plan, uint8_t *image)
    void c_free_erofs "erofs_free"(c_erofs_plan *plan)

cdef extern from "erofs/chunks.h" nogil:
    cdef struct c_chunk_found "chunk_found":
        uint64_t holes
        uint8_t digest[32]
    cdef struct c_chunk_reader "chunk_reader":
        int fd
        int64_t at, end
        uint8_t *buffer
        size_t used, capacity, count
        c_chunk_found chunks[128]
        uint64_t holes
    int c_read_chunks "read_chunks"(c_chunk_reader *reader, const char **step)


def build_erofs(bytes tree not None):
    cdef const uint8_t *source = tree
    cdef size_t length = len(tree)
    cdef c_erofs_plan plan
    cdef int result
    cdef bytes image
    cdef uint8_t *target
    with nogil:
        result = c_plan_erofs(source, length, &plan)
    checked(result, "plan")
    try:
        image = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>plan.size)
        target = <uint8_t *>PyBytes_AS_STRING(image)
        with nogil:
            c_write_erofs(&plan, target)
    finally:
        c_free_erofs(&plan)
    return image


def read_chunks(int fd, int64_t at, int64_t end, buffer, size_t used):
    cdef c_chunk_reader reader
    cdef const char *step = ""
    cdef int result
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    try:
        if used > <size_t>view.len or used % 4096 or at < 0 or at % 65536:
            raise ValueError("read_chunks: not at the start of a chunk")
        reader.fd, reader.at, reader.end = fd, at, end
        reader.buffer = <uint8_t *>view.buf
        reader.used, reader.capacity = used, <size_t>view.len
        with nogil:
            result = c_read_chunks(&reader, &step)
    finally:
        PyBuffer_Release(&view)
    checked(result, step)
    return reader.at, reader.used, chunk_list(&reader)


cdef list chunk_list(const c_chunk_reader *reader):
    cdef list found = []
    cdef size_t index
    for index in range(reader.count):
        if reader.chunks[index].holes:
            found += [None] * <Py_ssize_t>reader.chunks[index].holes
        found.append(PyBytes_FromStringAndSize(<const char *>reader.chunks[index].digest, 32))
    if reader.holes:
        found += [None] * <Py_ssize_t>reader.holes
    return found
