"""Grading that the graded cannot reach: a fresh sandbox, what is kept of the agent's, the grader.

The grader's sandbox is made of the layers that the agent's began with, the kept paths on them and
the toolkits on top, so that nothing the agent made stands in the place of a file of the grader's.
It is of the same kind as the agent's.
It has no network, the image's environment, and none of the agent's processes. It is never the
client's: it ends with the call, and after a restart of the daemon by itself.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from dsecd import __version__, log
from dsecd.backends.abc import KeepArgs, Kept
from dsecd.engine import own
from dsecd.engine.backends import require
from dsecd.engine.grading import Running
from dsecd.engine.manager import Manager
from dsecd.engine.sandbox import Sandbox
from dsecd.engine.signing import Signer
from dsecd.engine.snapshots import exclusive
from dsecd.engine.waiter import completed
from libdsec import record as records
from libdsec.errors import InvalidArgument, PermissionDenied, Unsupported
from libdsec.model import DSecContainerRunArgs, ExecArgs, Output, Record, Verified, VerifyArgs

logger = logging.getLogger("dsecd.engine")
LABEL = "dsec.verify"  # on the grader's sandbox: the agent's
LIFETIME_S = 120.0  # of the grader's sandbox, beyond the grader's own time
# Nothing that the agent may have planted beside what it hands in is imported by its name alone
PYTHON = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
Send = Callable[[Output], Awaitable[None]]


async def verify(
    manager: Manager, signer: Signer, owner: str, args: VerifyArgs, send: Send
) -> Verified:
    """Grade what the sandbox holds at the kept paths; the grader's output goes to `send`.

    Raises `NotFound`, `WrongState`, `InvalidArgument` for what cannot be kept, `Unsupported`
    without a shell of the platform's, `PermissionDenied` for hooks with `strict`, and what making a
    sandbox raises.
    """
    _check(args)
    _check_offered(manager.get(args.id), args)
    wanted = KeepArgs(
        paths=tuple(args.keep), toolkits=tuple(args.toolkits), workspace=args.workspace
    )
    async with exclusive(manager, args.id) as (sandbox, handle):
        kept = await sandbox.backend.keep(handle, wanted)
    _refuse_hooks(args, kept)
    async with _grader(manager, owner, sandbox, kept, args) as grader:
        started = _now_ms()
        running = Running(manager, grader, _command(args))
        async with contextlib.aclosing(running.outputs()) as outputs:
            async for output in outputs:
                await send(output)
        assert running.result is not None
        made = _record(sandbox, grader, kept, args, running, started)
    encoded = records.encode(made)
    manager.events.emit(sandbox.id, "verified", kept=kept.digest, frozen_ms=str(kept.frozen_ms))
    return Verified(
        result=running.result,
        record=encoded,
        signature=signer.sign(encoded),
        key=signer.public(),
    )


def _check(args: VerifyArgs) -> None:
    if (args.argv is None) == (args.shell is None) or args.argv == []:
        raise InvalidArgument("exactly one of argv and shell is required", field="argv")
    if args.timeout_s is not None and not 0 < args.timeout_s < 1e9:
        raise InvalidArgument("timeout_s: a positive number of seconds, or none", field="timeout_s")


def _check_offered(sandbox: Sandbox, args: VerifyArgs) -> None:
    require(sandbox.backend, "pack")
    if args.shell is not None and not sandbox.backend.capabilities.shell:
        raise Unsupported(
            "this host has no shell of its own for shell text (see platform_shell in dsec check); "
            "give the grader as an argv, or install bash-static",
            reason="no platform shell",
        )


def _refuse_hooks(args: VerifyArgs, kept: Kept) -> None:
    found = [f"{one.kind} {one.path}" for one in kept.warnings if not one.dropped]
    found = [what for what in found if not what.startswith("absent ")]
    if args.strict and found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise PermissionDenied(
            "strict: what was kept could change the grader's mind: "
            + ", ".join(found[:5])
            + more
            + "; keep less, or grade without strict and look at the record's warnings"
        )


@contextlib.asynccontextmanager
async def _grader(
    manager: Manager, owner: str, sandbox: Sandbox, kept: Kept, args: VerifyArgs
) -> AsyncIterator[Sandbox]:
    """Lend the grader's sandbox; it is gone afterwards, however the use of it ended."""
    wanted = _sandbox_args(sandbox, kept, args)
    grader = await own.create(manager, owner, "verify", sandbox.kind, wanted)
    try:
        with log.about(grader.id):
            yield grader
    finally:
        own.end(manager, grader, "graded")
        await completed(grader.gone, manager.config.limits.stop_timeout_s)


def _sandbox_args(sandbox: Sandbox, kept: Kept, args: VerifyArgs) -> DSecContainerRunArgs:
    """Return the agent's limits on pristine layers; nothing else of the agent's sandbox."""
    lifetime = None if args.timeout_s is None else args.timeout_s + LIFETIME_S
    given = sandbox.args
    return DSecContainerRunArgs(
        container_image=kept.layers[0],
        toolkits=[*kept.layers[1:], kept.digest, *kept.toolkits],
        memory_limit_mb=given.memory_limit_mb,
        cpu_cores_limit=given.cpu_cores_limit,
        pids_limit=given.pids_limit,
        disk_limit_mb=given.disk_limit_mb,
        upper=given.upper,
        output_limit_mb=given.output_limit_mb,
        spool_limit_mb=given.spool_limit_mb,
        max_lifetime_s=lifetime,
        network="none",
        policy="grader",
        labels={LABEL: sandbox.id},
    )


def _command(args: VerifyArgs) -> ExecArgs:
    return ExecArgs(
        cid=secrets.token_hex(16),
        argv=args.argv,
        shell=args.shell,
        env=PYTHON | args.env,
        cwd=args.cwd,
        user=args.user,
        timeout_s=args.timeout_s,
        stream=True,
    )


def _record(
    sandbox: Sandbox,
    grader: Sandbox,
    kept: Kept,
    args: VerifyArgs,
    running: Running,
    started: int,
) -> Record:
    given, result = sandbox.args, running.result
    assert result is not None
    out, err = running.streams[1], running.streams[2]
    return Record(
        sandbox=sandbox.id,
        grader=grader.id,
        node=grader.node,
        software=__version__,
        image=given.container_image,
        workspace=given.workspace or "",
        layers=list(kept.layers),
        kept=kept.digest,
        toolkits=list(kept.toolkits),
        paths=kept.paths,
        warnings=kept.warnings,
        notes=grader.notes,
        argv=[_text(word) for word in args.argv or ()],
        shell=_text(args.shell or b""),
        env=PYTHON | args.env,
        user=args.user or "",
        cwd=_text(args.cwd or b""),
        strict=args.strict,
        limits={
            "memory_mb": given.memory_limit_mb,
            "cpu_millicores": round(given.cpu_cores_limit * 1000),
            "pids": given.pids_limit,
            "disk_mb": given.disk_limit_mb,
            "timeout_ms": round((args.timeout_s or 0) * 1000),
        },
        started_ms=started,
        ended_ms=_now_ms(),
        exit_code=result.exit_code,
        signal=result.signal,
        timed_out=result.timed_out,
        oom_killed=result.oom_killed,
        output_truncated=result.output_truncated,
        stdout_sha256=out.text(),
        stdout_bytes=out.size,
        stderr_sha256=err.text(),
        stderr_bytes=err.size,
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _text(raw: bytes) -> str:
    """JSON has text only: bytes that are none are shown escaped."""
    return raw.decode("utf-8", "backslashreplace")
