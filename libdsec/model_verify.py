"""The part of `libdsec.model` that is about grading; import it from there."""

from __future__ import annotations

from typing import Literal

import msgspec

RECORD_VERSION = 1


class _Args(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Base of arguments."""


class _Info(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Base of results; a newer peer may add fields."""


class VerifyArgs(_Args):
    """op `sandbox.verify`: stream of `Output` of the grader, reply `Verified`.

    Exactly one of `argv` and `shell`, which runs in the platform's own shell. `keep` holds absolute
    paths inside; `toolkits` are layers with the grader's files. `env` is put over the image's and
    the defaults for Python; None of `user`, `cwd`: the image's. Without `workspace` the sandbox's
    workspace layer is left out. `strict` refuses what would only be a warning.
    """

    id: str
    argv: list[bytes] | None = None
    shell: bytes | None = None
    keep: list[bytes] = []
    toolkits: list[str] = []
    timeout_s: float | None = None
    env: dict[str, str] = {}
    user: str | None = None
    cwd: bytes | None = None
    workspace: bool = True
    strict: bool = False


class KeptPath(_Info):
    """What was graded at one path. `sha256` is that of a file's content, of a link's target, or
    of a directory the digest of its tree as a layer (docs/environments.md)."""

    path: str
    kind: Literal["file", "directory", "link", "absent"]
    sha256: str = ""
    size_bytes: int = 0
    entries: int = 0


class KeptWarning(_Info):
    """Something among the kept paths that could change a grader's mind (docs/verify.md).

    `dropped`: it was left out of what was graded. Else it is there, and was made or changed since
    the sandbox began.
    """

    kind: str
    path: str
    count: int = 1
    dropped: bool = False


class Record(_Info):
    """What was graded, by what, and how it ended. Digests are of layers, bottom first."""

    sandbox: str
    grader: str  # the fresh sandbox
    node: str
    software: str  # version of dsecd
    image: str  # as the sandbox's creator named it
    layers: list[str]  # what the sandbox began with, and the grader lay on
    kept: str  # the layer of the kept paths
    toolkits: list[str]
    paths: list[KeptPath]
    warnings: list[KeptWarning]
    limits: dict[str, int]
    started_ms: int  # since the epoch; no number has a fraction, which programs write differently
    ended_ms: int
    stdout_sha256: str
    stdout_bytes: int
    stderr_sha256: str
    stderr_bytes: int
    notes: list[str] = []  # of the grader's sandbox: what of its policy this host cannot enforce
    workspace: str = ""
    argv: list[str] = []
    shell: str = ""
    env: dict[str, str] = {}
    user: str = ""
    cwd: str = ""
    strict: bool = False
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    output_truncated: bool = False
    version: int = RECORD_VERSION


class VerifyKey(_Info):
    """Reply of op `host.verify_key`: the public key of this host's records, 32 bytes."""

    key: bytes
