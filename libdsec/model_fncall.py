"""Calls of functions in pools of warm workers (docs/fncall.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from libdsec.model_pause import CpuClass
from libdsec.model_policy import NetworkMode


class DSecFnCallArgs(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """op `fncall.run` → `FnCallResult`: one call of a function, or of a program.

    `container_image`, `workspace` and `toolkits` are the layers that it depends on, `imports` the
    modules that are imported before it is made: with the limits of memory, processors, processes
    and files, the class of CPU use, the network's policy and the name `pool` they choose the pool,
    whose workers are warm. `code` is Python text that defines the function `entry`; or `entry` is
    ``module:function`` of the layers. It is given `input`, if that is not None, and what it returns
    must be something that JSON holds. With `argv` a program runs instead, `input` as JSON on its
    stdin.

    `files` (relative path → content) are there when it begins, in the directory it begins in;
    `outputs` are the paths below it to bring back. What it writes lives in memory, at most
    `files_limit_mb` in each of /tmp, /var/tmp and /dev/shm. `output_limit_kb` bounds value, stdout,
    stderr and each file of `outputs`; all of it together is bounded by 3 MiB. `cpu_limit_s`
    counts each process for itself.

    `network`, `network_rules`, `policy` and `strict` are those of `DSecContainerRunArgs`; without
    them a call has no socket but unix ones. With `key` the same call is made once, however often it
    is asked for: a repeat gets the result of the first, for ten minutes. It is made anew only if
    its worker was lost.
    """

    container_image: str
    workspace: str | None = None
    toolkits: list[str] = []
    imports: list[str] = []
    code: str = ""
    entry: str = "main"
    argv: list[str] = []
    input: Any = None
    files: dict[str, bytes] = {}
    outputs: list[str] = []
    env: dict[str, str] = {}
    timeout_s: float = 60.0
    cpu_limit_s: float = 60.0
    memory_limit_mb: int = 512
    cpu_cores_limit: float = 1.0
    cpu_class: CpuClass = "standard"
    files_limit_mb: int = 64
    output_limit_kb: int = 256
    pids_limit: int = 128
    network: NetworkMode = "none"
    network_rules: dict[str, bool] | None = None
    policy: str | dict[str, Any] | None = None
    strict: bool = False
    pool: str = ""
    key: str | None = None


class FnCallResult(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How a call ended. Of `exit_code` and `signal` one is set; 0 is a value returned.

    Times in seconds: `queued_s` until a worker was free, `started_s` until the process that waited
    there was given the request, `run_s` to its end, `restored_s` until nothing of it was left.
    """

    value_json: bytes = b""
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    output_truncated: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    files: dict[str, bytes] = {}
    queued_s: float = 0.0
    started_s: float = 0.0
    run_s: float = 0.0
    restored_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it returned, or its program ended with 0."""
        return self.exit_code == 0

    @property
    def value(self) -> Any:
        """What the function returned; None when it did not."""
        if not self.ok or not self.value_json or self.output_truncated:
            return None
        return msgspec.json.decode(self.value_json)
