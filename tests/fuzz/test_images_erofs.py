"""The C of the image writer under ASan and UBSan: real trees, damaged trees, no memory."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from dsecd.images.chunks import ChunkWriter
from dsecd.images.erofs.encode import encode_tree
from dsecd.images.model import Node, directory
from tests.unit.image_trees import Build, everything, file

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "src/_fastpath"
SOURCES = [*sorted((NATIVE / "erofs").glob("*.c")), Path(__file__).with_name("images_erofs_fuzz.c")]
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE=", f"-I{NATIVE}", "-g", "-O1", "-Wall", "-Wextra", "-Werror",
         "-Wshadow", "-Wvla", "-fno-omit-frame-pointer"]  # fmt: skip


def compiled(target: Path, compiler: str, *flags: str) -> Path:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    command = [compiler, *FLAGS, *flags, *map(str, SOURCES), "-lcrypto", "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def encoded(build: Build) -> bytes:
    with tempfile.TemporaryDirectory() as folder, ChunkWriter(Path(folder) / "blob") as sink:
        root = build(sink)
        placement = sink.finish()
    sizes = {blob.id: blob.size for blob in placement.blobs}
    return encode_tree(root, placement.where, sizes)[0]


def small(sink: ChunkWriter) -> Node:
    root = directory()
    root.children[b"file"] = file(sink, b"content", xattrs={b"user.a": b"b"})
    root.children[b"chunks"] = file(sink, bytes(65536) + b"content")
    root.children[b"link"] = Node(mode=0o120777, target=b"t" * 4070)
    wide = root.children[b"wide"] = directory()
    wide.children = {b"%d" % n * 60: root.children[b"file"] for n in range(30)}
    return root


def test_images_are_the_same_and_clean(tmp_path: Path) -> None:
    sanitize = "-fsanitize=address,undefined"
    program = compiled(
        tmp_path / "replay", "cc", sanitize, "-fno-sanitize-recover=all", "-DREPLAY",
        "-Dcalloc=replay_calloc",
    )  # fmt: skip
    from dsecd import fastpath

    for build in (lambda _: directory(), small, everything):
        tree = encoded(build)
        done = subprocess.run([program], input=tree, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout == fastpath.build_erofs(tree)

    source = random.Random(1)
    content = source.randbytes(200_001) + bytes(300_000) + b"end"
    (tmp_path / "file").write_bytes(content)
    digests = b"".join(
        hashlib.sha256(part).digest()
        for part in (content[at : at + 65536] for at in range(0, len(content), 65536))
        if any(part)
    )
    for capacity in (65536, 1 << 20):
        for size, code in ((len(content), 0), (len(content) + 1, errno.ENODATA)):
            with (tmp_path / "file").open("rb") as reader:
                arguments = [program, str(size), str(capacity)]
                done = subprocess.run(arguments, stdin=reader, capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (code, b"")
            assert code or done.stdout == digests


@pytest.mark.slow
def test_no_tree_can_break_it(tmp_path: Path) -> None:
    """libFuzzer for ``DSEC_FUZZ_S`` seconds (default 10), from real trees."""
    program = compiled(tmp_path / "fuzz", "clang", "-fsanitize=fuzzer,address,undefined",
                       "-fno-sanitize-recover=all")  # fmt: skip
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, build in enumerate((lambda _: directory(), small)):
        (corpus / str(number)).write_bytes(encoded(build))
    seconds = int(os.environ.get("DSEC_FUZZ_S", "10"))
    command = [program, f"-max_total_time={seconds}", "-max_len=20000", "-timeout=5",
               "-rss_limit_mb=1024", f"-artifact_prefix={tmp_path}/", corpus]  # fmt: skip
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        slow = list(tmp_path.glob("timeout-*"))
        if not slow:
            break
        for tree in slow:  # by the clock of a machine that may stand still; not by a CPU's?
            alone = ["prlimit", "--cpu=5", program, "-timeout=0", tree]
            again = subprocess.run(alone, capture_output=True, text=True, check=False)
            assert again.returncode == 0, (tree, done.stderr[-3000:], again.stderr[-3000:])
            tree.unlink()
    assert done.returncode == 0, done.stderr[-3000:]
