"""From the arguments of a call to what its worker is told, and from its answer to the result."""

from __future__ import annotations

import math
import os

import msgspec

from dsecd.backends.fncall_stream import Answer, Asked, body_of
from dsecd.engine.fncall_worker import Environment
from libdsec.errors import InvalidArgument
from libdsec.model import DSecContainerRunArgs, DSecFnCallArgs, FnCallResult

LABEL = "dsec.fncall"  # on each worker
ANSWER_BYTES = 3 << 20  # of all its parts: it travels in one frame of the wire
MAX_PATH = 4096  # bytes


def environment_of(owner: str, args: DSecFnCallArgs) -> Environment:
    """Return the pool's part of the arguments."""
    worker = DSecContainerRunArgs(
        container_image=args.container_image,
        workspace=args.workspace,
        toolkits=args.toolkits,
        memory_limit_mb=args.memory_limit_mb,
        cpu_cores_limit=args.cpu_cores_limit,
        cpu_class=args.cpu_class,
        pids_limit=args.pids_limit,
        disk_limit_mb=16,
        upper="memory",
        network=args.network,
        network_rules=args.network_rules,
        policy=args.policy,
        strict=args.strict,
        labels={LABEL: args.pool},
    )
    return Environment(owner, args.pool, worker, args.imports, args.files_limit_mb << 20)


def asked_of(args: DSecFnCallArgs) -> Asked:
    """Return the call's own part of the arguments."""
    head = {
        "entry": args.entry, "argv": args.argv, "files": list(args.files), "env": args.env,
        "cpu_s": max(1, math.ceil(args.cpu_limit_s)),
    }  # fmt: skip
    given = b"" if args.input is None else msgspec.json.encode(args.input)
    return Asked(
        body=body_of(head, [args.code.encode(), given, *args.files.values()]),
        paths=args.outputs,
        wall_s=args.timeout_s,
        output_bytes=args.output_limit_kb << 10,
        answer_bytes=ANSWER_BYTES,
    )


def result_of(answer: Answer, queued_s: float) -> FnCallResult:
    """Return what the caller gets; `oom_killed` is for whoever can ask."""
    status = answer.status
    return FnCallResult(
        value_json=answer.value,
        exit_code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        timed_out=answer.timed_out,
        output_truncated=answer.truncated,
        stdout=answer.stdout,
        stderr=answer.stderr,
        files=answer.files,
        queued_s=queued_s,
        started_s=answer.started_s,
        run_s=answer.run_s,
        restored_s=answer.emptied_s,
    )


def outcome_of(result: FnCallResult) -> str:
    """Return how it ended in one word, for metrics."""
    if result.ok:
        return "ok"
    if result.timed_out:
        return "timed_out"
    return "oom_killed" if result.oom_killed else "failed"


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise InvalidArgument(f"{field}: {message}", field=field)


def check(args: DSecFnCallArgs) -> None:
    """Raise `InvalidArgument` for what no pool could do."""
    module, _, name = args.entry.rpartition(":")
    _require(name.isidentifier(), "entry", "a function's name, or module:function")
    _require(
        bool(args.code) + bool(module) + bool(args.argv) == 1, "code",
        "give exactly one of code, an entry of the form module:function, and argv",
    )  # fmt: skip
    for field in ("timeout_s", "cpu_limit_s"):
        value = getattr(args, field)
        _require(math.isfinite(value) and 0 < value <= 86400, field, "above 0, at most 86,400 s")
    _require(1 <= args.files_limit_mb <= 1 << 20, "files_limit_mb", "1 MiB to 1 TiB")
    _require(1 <= args.output_limit_kb <= 1024, "output_limit_kb", "1 KiB to 1 MiB")
    _require(len(args.files) <= 1000, "files", "at most 1,000")
    _require(len(args.outputs) <= 100, "outputs", "at most 100")
    _require(len(args.pool) <= 128, "pool", "at most 128 characters")
    _require(args.key is None or 0 < len(args.key) <= 128, "key", "1 to 128 characters")
    for field in ("files", "outputs"):
        for path in getattr(args, field):
            good = path and not path.startswith("/") and "\0" not in path
            plain = ".." not in path.split("/") and not path.endswith("/")
            _require(bool(good and plain), field, f"{path!r} is not a relative path to a file")
            _require(len(path.encode()) < MAX_PATH, field, f"{path[:40]!r}... is too long")
    for module in args.imports:
        parts = module.split(".")
        _require(all(map(str.isidentifier, parts)), "imports", f"{module!r} is not a module")
    for word in args.argv:
        _require("\0" not in word, "argv", "arguments hold no NUL")
    for name, value in args.env.items():
        good = name and "=" not in name and "\0" not in name + value
        _require(bool(good), "env", f"{name!r} is not a name, or its value holds a NUL")
