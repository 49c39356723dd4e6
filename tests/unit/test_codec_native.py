"""The C msgpack codec against msgspec: each reads what the other writes, nothing malformed passes.

A small program over `wire/msgpack.c` copies one value from stdin to stdout through the codec.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

WIRE = Path(__file__).resolve().parents[2] / "src/_fastpath/wire"

_COPY = r"""
#include <stdio.h>
#include <stdlib.h>
#include "msgpack.h"
static void copy(struct mp_reader *r, struct mp_writer *w)
{
    struct mp_value v;
    uint32_t children = 0;
    if (!mp_next(r, &v))
        return;
    switch (v.type) {
    case MP_NIL: mp_put_nil(w); break;
    case MP_BOOL: mp_put_bool(w, v.u.b); break;
    case MP_UINT: mp_put_u64(w, v.u.u); break;
    case MP_INT: mp_put_i64(w, v.u.i); break;
    case MP_FLOAT: mp_put_f64(w, v.u.f); break;
    case MP_STR: mp_put_str(w, v.u.bytes.p, v.u.bytes.n); break;
    case MP_BIN: case MP_EXT: mp_put_bin(w, v.u.bytes.p, v.u.bytes.n); break;
    case MP_ARRAY: mp_put_array(w, children = v.u.count); break;
    case MP_MAP: mp_put_map(w, v.u.count); children = 2 * v.u.count; break;
    }
    for (uint32_t i = 0; i < children && !r->failed; i++)
        copy(r, w);
}
int main(void)
{
    static unsigned char in[1 << 22], out[1 << 23], size[4];
    while (fread(size, 1, 4, stdin) == 4) {
        size_t n = (size_t)size[0] << 24 | (size_t)size[1] << 16 | (size_t)size[2] << 8 | size[3];
        if (n > sizeof in || fread(in, 1, n, stdin) != n)
            return 2;
        struct mp_reader check = mp_reader_of(in, n), r = check;
        struct mp_writer w = mp_writer_of(out, sizeof out);
        mp_skip(&check);
        if (mp_finished(&check))
            copy(&r, &w);
        size_t m = mp_written(&w);
        unsigned char head[4] = { m >> 24, m >> 16, m >> 8, m };
        fwrite(head, 1, 4, stdout);
        fwrite(out, 1, m, stdout);
        fflush(stdout);
    }
    return 0;
}
"""


class Copier:
    def __init__(self, program: Path) -> None:
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, data: bytes) -> bytes:
        """Return the canonical encoding of the one value in `data`; empty when it is malformed."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(len(data).to_bytes(4, "big") + data)
        stdin.flush()
        return stdout.read(int.from_bytes(stdout.read(4), "big"))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture(scope="module")
def copier(tmp_path_factory: pytest.TempPathFactory) -> object:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    directory = tmp_path_factory.mktemp("codec")
    (directory / "copy.c").write_text(_COPY)
    program = directory / "copy"
    subprocess.run(
        [compiler, "-std=gnu11", "-D_GNU_SOURCE=", "-O1", f"-I{WIRE}", directory / "copy.c",
         WIRE / "msgpack.c", "-o", program],
        check=True,
    )  # fmt: skip
    copier = Copier(program)
    yield copier
    copier.close()


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
    | st.text(max_size=300) | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20)
    ),
    max_leaves=40,
)  # fmt: skip
_quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@_quick
@given(_values)
def test_every_value_survives_and_takes_the_same_bytes(copier: Copier, value: object) -> None:
    data = msgspec.msgpack.encode(value)
    assert copier(data) == data


@pytest.mark.parametrize("n", [0, 31, 32, 255, 256, 65535, 65536])
def test_lengths_at_the_edges(copier: Copier, n: int) -> None:
    for value in ("x" * n, b"x" * n, [None] * n, {str(i): i for i in range(n)}):
        data = msgspec.msgpack.encode(value)
        assert copier(data) == data


@_quick
@given(_values, st.data())
def test_a_truncated_or_longer_value_is_refused(
    copier: Copier, value: object, data: st.DataObject
) -> None:
    whole = msgspec.msgpack.encode(value)
    assert copier(whole[: data.draw(st.integers(0, len(whole) - 1))]) == b""
    assert copier(whole + b"\0") == b""


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
        b"\x91",
        b"\x91" * 40 + b"\xc0",
    ],
)  # fmt: skip
def test_malformed_values_are_refused(copier: Copier, data: bytes) -> None:
    assert copier(data) == b""
