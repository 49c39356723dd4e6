"""libFuzzer over the msgpack codec and dsec-init's frame handling (fuzz_init.c).

Runs for ``DSEC_FUZZ_S`` seconds (default 10) from seeds that name every operation; a crash leaves
its input in the directory that the failure names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from libdsec import wire

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "src/_fastpath"

CONFIG = {"env": {"A": "b"}, "user": "u", "caps": 1, "oom_score_adj": -1}
NETWORK = {
    "interface": "e", "addresses": ["10.0.0.2/24", "fd00::2/64"], "gateways": ["fe80::1"],
    "neighbours": [["fe80::1", "02:d5:ec:02:00:01"]], "mtu": 1400,
}  # fmt: skip
CLOCK = {"time_ns": 1, "entropy": b"e" * 64}
MACHINE = {
    "layers": ["/dev/a", "/dev/b"], "dax": True, "upper": "/dev/c", "pids": 1, "hostname": "h",
    "files": [["etc/a", b"x", 0o644]], "config": msgspec.msgpack.encode(CONFIG),
    "network": NETWORK, "reclaim": {"min_age_s": 9, "swap_bytes": 1}, **CLOCK,
}  # fmt: skip
REQUESTS: list[tuple[str, object]] = [
    ("sys.ping", {"first": True}),
    ("sys.stats", None),
    ("sys.pause", {}),
    ("exec.run", {"cid": "a", "argv": [b"true", b"x"], "env": {"A": "b"}, "timeout_s": 1.5}),
    ("exec.run", {"cid": "b", "shell": b"true", "pty": {"rows": 3, "cols": 4}, "groups": [1, 2]}),
    ("exec.start", {"cid": "c", "shell": b"x", "session": "s", "background": True}),
    ("exec.attach", {"cid": "c", "stdout_offset": 4, "stderr_offset": 5}),
    ("exec.stdin", {"cid": "c", "data": b"x", "eof": True}),
    ("exec.signal", {"cid": "c", "signal": 9}),
    ("exec.resize", {"cid": "c", "rows": 1, "cols": 2}),
    ("exec.list", {}),
    ("exec.forget", {"cid": "c"}),
    ("session.open", {"name": "s", "env": {"A": "b"}, "cwd": b"/", "user": "u", "shell": "sh"}),
    ("session.list", {}),
    ("session.close", {"name": "s"}),
    ("files.write", {"path": b"p", "data": b"x", "append": True, "mode": 420}),
    ("files.rename", {"path": b"p", "target": b"q", "user": "u"}),
    ("files.chown", {"path": b"p", "owner": "a:b", "recursive": True}),
    ("files.read", {"path": b"p", "offset": 1, "length": 2}),
    ("files.watch", {"path": b"p", "follow": False, "recursive": True}),
    ("net.forward", {"port": 1}),
    ("fncall.serve", {"argv": [b"a"], "env": {"A": "b"}, "filter": b"f" * 8, "files_bytes": 1}),
    ("vm.begin", MACHINE),
    ("vm.clock", CLOCK),
    ("vm.watch", {}),
    ("vm.pack", {}),
]
REPLACED = ("child_fork", "vm_build", "vm_time_set", "vm_entropy_add")
STATES = (b"\0", b"\2", b"\4")  # a container; a machine that waits for vm.begin, one that has it


def seeds() -> list[bytes]:
    """Return inputs of the fuzzer: a byte that chooses the target, then a frame's body."""
    frames: list[wire.Frame] = [
        wire.Request(n, op, wire.pack(args), "sb") for n, (op, args) in enumerate(REQUESTS)
    ]
    frames += [wire.Item(1, wire.pack(b"x")), wire.Credit(1, 2), wire.Cancel(1), wire.End(1)]
    bodies = [wire.encode(frame)[4:] for frame in frames]
    values = [None, True, 1, -1, 2**40, -(2**40), 1.5, "s" * 40, b"b" * 300, [1] * 20, {"k": [{}]}]
    return [state + body for state in STATES for body in bodies] + [
        b"\1" + data for data in (*bodies, *map(msgspec.msgpack.encode, values))
    ]


@pytest.mark.slow
def test_neither_codec_nor_frames_can_be_broken(tmp_path: Path) -> None:
    clang = shutil.which("clang")
    if clang is None:
        pytest.skip("clang is not installed")
    sources = [*NATIVE.glob("wire/*.c"), *NATIVE.glob("init/*.c")]
    target = tmp_path / "fuzz_init"
    subprocess.run(
        [clang, "-std=gnu11", "-D_GNU_SOURCE=", "-g", "-O1", "-fsanitize=fuzzer,address,undefined",
         "-fno-sanitize-recover=undefined", *(f"-Wl,--wrap={name}" for name in REPLACED),
         str(ROOT / "tests/fuzz/fuzz_init.c"),
         *(str(source) for source in sources if source.name != "main.c"), "-o", str(target)],
        check=True,
    )  # fmt: skip
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    seconds = os.environ.get("DSEC_FUZZ_S", "10")
    done = subprocess.run(
        [target, corpus, f"-max_total_time={seconds}", "-max_len=4096", "-rss_limit_mb=1024"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{tmp_path}: {done.stderr[-4000:]}"
