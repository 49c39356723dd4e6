"""What travels inside calls: arguments and results, shared by every process of DSec.

Structs are maps on the wire; fields at their default are left out; unknown fields of *arguments*
are refused, so that a misspelt option is an error and never silently ignored. Paths are bytes:
Linux file names are. Times are seconds since the epoch unless a name says otherwise.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from libdsec.model_fncall import DSecFnCallArgs as DSecFnCallArgs
from libdsec.model_fncall import FnCallResult as FnCallResult
from libdsec.model_layers import Checkpoint as Checkpoint
from libdsec.model_layers import CheckpointRef as CheckpointRef
from libdsec.model_layers import CollectArgs as CollectArgs
from libdsec.model_layers import Collected as Collected
from libdsec.model_layers import ImageConfig as ImageConfig
from libdsec.model_layers import ImportProgress as ImportProgress
from libdsec.model_layers import LayerCollapse as LayerCollapse
from libdsec.model_layers import LayerImport as LayerImport
from libdsec.model_layers import LayerInfo as LayerInfo
from libdsec.model_layers import LayerRef as LayerRef
from libdsec.model_layers import PackArgs as PackArgs
from libdsec.model_layers import Packed as Packed
from libdsec.model_pause import CpuClass as CpuClass
from libdsec.model_pause import PauseArgs as PauseArgs
from libdsec.model_pause import Paused as Paused
from libdsec.model_pause import PauseManyArgs as PauseManyArgs
from libdsec.model_pause import Resumed as Resumed
from libdsec.model_pause import ResumeManyArgs as ResumeManyArgs
from libdsec.model_pause import SetCpuClass as SetCpuClass
from libdsec.model_policy import NetworkMode as NetworkMode
from libdsec.model_policy import PolicyAnswer as PolicyAnswer
from libdsec.model_policy import PolicyArgs as PolicyArgs
from libdsec.model_policy import PolicyRow as PolicyRow
from libdsec.model_policy import PolicySummary as PolicySummary
from libdsec.model_policy import PolicyTest as PolicyTest
from libdsec.model_policy import SandboxPolicy as SandboxPolicy
from libdsec.model_policy import UpdateNetwork as UpdateNetwork
from libdsec.model_usage import HostStats as HostStats
from libdsec.model_usage import Metrics as Metrics
from libdsec.model_verify import KeptPath as KeptPath
from libdsec.model_verify import KeptWarning as KeptWarning
from libdsec.model_verify import Record as Record
from libdsec.model_verify import VerifyArgs as VerifyArgs
from libdsec.model_verify import VerifyKey as VerifyKey
from libdsec.model_vm import DSecFullVMRunArgs as DSecFullVMRunArgs
from libdsec.model_vm import DSecMicroVMRunArgs as DSecMicroVMRunArgs
from libdsec.model_vm import FullVmArgs as FullVmArgs
from libdsec.model_vm import MouseButton as MouseButton
from libdsec.model_vm import Screenshot as Screenshot
from libdsec.model_vm import VmArgs as VmArgs

State = Literal["creating", "running", "paused", "stopping", "stopped", "failed"]
FileType = Literal["file", "dir", "symlink", "fifo", "socket", "char", "block"]
# what a create may ask for as `backend`; a daemon says in `Welcome.capabilities` what it has
CONTAINER, MICROVM, FULLVM = "container", "microvm", "fullvm"


class _Args(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Base of arguments."""


class _Info(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Base of results; a newer peer may add fields."""


# --- connection -------------------------------------------------------------------------------


class Hello(_Args):
    """op `hello`, the first call on a connection."""

    protocol: int
    client: str = ""
    token: str = ""


class Welcome(_Info):
    """Reply to `hello`."""

    protocol: int
    server: str
    node: str = ""
    capabilities: list[str] = []


# --- sandboxes (answered by dsecd) ------------------------------------------------------------


class DSecContainerRunArgs(_Args):
    """What a container sandbox is made of.

    `container_image` names a base layer (``base/debian:12``), a snapshot, a digest, or an image of
    a registry (``docker.io/library/python:3.12``), which is imported at its first use. `workspace`
    and `toolkits` are layers stacked on top; `from_checkpoint` (``SANDBOX/CHECKPOINT``) takes the
    files of another sandbox instead of all three. `init_user`, `workdir` and `env` default to what
    the image says. `ttl_running_stop`
    stops the sandbox after that many seconds without any call from outside; `max_lifetime_s`
    after that many seconds in any case. `cpu_cores_limit` may be fractional. `disk_limit_mb`
    bounds the writable upper layer; `upper` chooses where it lives. `cpu_class` says who goes first
    when CPUs are short (docs/density.md).

    `policy` says what may be reached and done (docs/policy.md): a preset's name, or a policy in the
    form of its TOML; `network_rules` alone is short for one that turns services on and off, and
    with `policy` they are more of its `services`. With either the sandbox has a network when
    something is open, or with `network` "nat": give that if its network is to be opened later. What
    this host cannot enforce is in `SandboxInfo.notes`; with `strict` it is an error instead.

    `secrets` are headers, by host, that are added to HTTP requests outside of the sandbox and never
    get into it: ``{"api.example.com": {"Authorization": "Bearer ..."}}``, or the header as a line.
    The policy must open the host at port 443. What the daemon answers has ``***`` for the values.
    """

    container_image: str
    workspace: str | None = None
    toolkits: list[str] = []
    from_checkpoint: str | None = None
    memory_limit_mb: int = 1024
    cpu_cores_limit: float = 1.0
    cpu_class: CpuClass = "standard"
    pids_limit: int = 1024
    disk_limit_mb: int = 1024
    upper: Literal["auto", "memory", "disk"] = "auto"
    ttl_running_stop: float | None = None
    max_lifetime_s: float | None = None
    network: NetworkMode = "none"
    network_rules: dict[str, bool] | None = None
    policy: str | dict[str, Any] | None = None
    strict: bool = False
    secrets: dict[str, dict[str, str] | str] = {}
    init_user: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    hostname: str | None = None
    labels: dict[str, str] = {}
    no_new_privileges: bool = False
    output_limit_mb: int = 64
    spool_limit_mb: int = 256


class CreateArgs(_Args):
    """op `sandbox.create` → `SandboxInfo`. The same `key` gives the same sandbox.

    `backend` is what the sandbox runs in, `vm` what only machines have; `args` are shared by all.
    With `progress` a stream of `ImportProgress` while an image is pulled from its registry.
    """

    key: str
    args: DSecContainerRunArgs
    backend: str = CONTAINER
    vm: VmArgs | None = None
    timeout_s: float | None = None
    progress: bool = False


class CreateManyArgs(_Args):
    """op `sandbox.create_many`: a stream of `Created` in order of completion, reply None."""

    keys: list[str]
    args: DSecContainerRunArgs
    backend: str = CONTAINER
    vm: VmArgs | None = None
    timeout_s: float | None = None


class SandboxInfo(_Info):
    """A sandbox as its daemon sees it. `reason` says why it is failed or stopped."""

    id: str
    state: State
    image: str
    backend: str = CONTAINER
    created_at: float = 0.0
    ended_at: float | None = None
    expires_at: float | None = None
    reason: str = ""
    node: str = ""
    address: str = ""
    address6: str = ""
    labels: dict[str, str] = {}
    notes: list[str] = []
    cpu_class: CpuClass = "standard"
    args: DSecContainerRunArgs | None = None


class MicroVMInfo(SandboxInfo):
    """What op `sandbox.get` says of a microVM; that of a container has no `vm`."""

    vm: VmArgs | None = None


class Created(_Info):
    """One item of `sandbox.create_many`: the sandbox or its error, by `key`."""

    key: str
    info: SandboxInfo | None = None
    error: dict[str, object] | None = None


class SandboxRef(_Args):
    """op `sandbox.get`, `sandbox.stop` → `SandboxInfo`; op `sandbox.metrics` → `Metrics`.

    `sandbox.get` of a microVM → `MicroVMInfo`.
    """

    id: str


class ListArgs(_Args):
    """op `sandbox.list` → list of `SandboxInfo`; `all` includes ended ones still remembered."""

    labels: dict[str, str] = {}
    all: bool = False


class SetTimeout(_Args):
    """op `sandbox.set_timeout` → `SandboxInfo`: a new idle timeout, counted from now."""

    id: str
    ttl_running_stop: float | None


class Event(_Info):
    """An item of op `events.subscribe` (args `EventFilter`): something happened to a sandbox.

    dropped: the subscriber read too slowly, detail["count"] events are missing.
    denied: the policy refused something, detail says what (docs/policy.md).
    policy: the sandbox has another policy.
    """

    time: float
    sandbox: str
    kind: Literal[
        "created", "stopped", "failed", "oom", "disk_full", "expired", "readopted", "packed",
        "checkpoint", "checkpoint_deleted", "rollback", "dropped", "denied", "policy", "verified",
        "paused", "resumed",
    ]  # fmt: skip
    detail: dict[str, str] = {}


class EventFilter(_Args):
    sandbox: str = ""


class Feature(_Info):
    """A row of op `host.check` → list of `Feature`: a kernel feature tried on this host."""

    name: str
    available: bool
    reason: str = ""
    needed_for: str = ""


# --- commands (op target = sandbox id; answered by dsec-init through dsecd) --------------------


class PtySize(_Args):
    rows: int = 24
    cols: int = 80


class ExecArgs(_Args):
    """op `exec.start` → `CommandInfo`, returns once the command runs; op `exec.run`: stream of
    `Output`, reply `CommandResult`.

    `cid` is chosen by the caller and names the command; starting a cid that exists attaches to
    it instead of running it twice. Exactly one of `argv` and `shell`. With `session` the shell
    string runs inside that session; else in `interpreter`, the path of a shell in the sandbox, or
    without that in the platform's own shell (a static bash of the host, as ``bash -p``). `stdin`
    keeps a stream open for `exec.stdin`. A `background` command outlives its call and its
    connection. `env` is merged over the sandbox's.
    """

    cid: str
    argv: list[bytes] | None = None
    shell: bytes | None = None
    interpreter: str | None = None
    session: str | None = None
    env: dict[str, str] = {}
    cwd: bytes | None = None
    user: str | None = None  # name, uid, or "uid:gid"; default: the sandbox's init_user
    groups: list[int] | None = None  # supplementary; default: the user's own from /etc/group
    stdin: bool = False
    input: bytes | None = None  # small stdin given at once; at most wire.INLINE bytes
    pty: PtySize | None = None
    timeout_s: float | None = None
    background: bool = False
    stream: bool = False  # exec.run: send Output as it comes, else one reply when small
    output_limit_bytes: int | None = None  # below the sandbox's own cap


class CommandInfo(_Info):
    """A command known to the sandbox; op `exec.list` → list of `CommandInfo`."""

    cid: str
    running: bool
    pid: int = 0  # as seen inside the sandbox
    command: bytes = b""
    background: bool = False
    session: str = ""
    started_at: float = 0.0


class Output(_Info):
    """An item of a command's stream: bytes of one of its outputs at `offset`."""

    stream: Literal[1, 2]  # 1 stdout (and pty), 2 stderr
    offset: int
    data: bytes


class CommandResult(_Info):
    """How a command ended. Exactly one of `exit_code` and `signal` is set.

    `stdout` and `stderr` hold the output that was not already streamed. `stdout_total` counts the
    bytes the command wrote; with `output_truncated` only the first ones, up to the cap, were kept.
    """

    cid: str
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    disk_full: bool = False
    output_truncated: bool = False
    session_ended: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_total: int = 0
    stderr_total: int = 0
    duration_s: float = 0.0


class Verified(_Info):
    """How the grader ended, without its output, and the record as JSON with its signature.

    `record` is canonical: keys sorted, no spaces, defaults left out. `signature` is Ed25519 over
    it (RFC 8032), `key` the public key it was made with, 32 bytes.
    """

    result: CommandResult
    record: bytes
    signature: bytes
    key: bytes


class AttachArgs(_Args):
    """op `exec.attach`: stream of `Output` from these offsets on, reply `CommandResult` at the end;
    op `exec.wait` → `CommandResult` without output."""

    cid: str
    stdout_offset: int = 0
    stderr_offset: int = 0


class StdinArgs(_Args):
    """op `exec.stdin` → None once the pipe took it all; `eof` closes the stream afterwards."""

    cid: str
    data: bytes = b""
    eof: bool = False


class SignalArgs(_Args):
    """op `exec.signal` → None: to the command's main process; op `exec.kill` → None: SIGKILL to its
    whole tree; with `exec.forget` → None a finished command's record and output are dropped."""

    cid: str
    signal: int = 15


class ResizeArgs(_Args):
    """op `exec.resize` → None: the terminal's new size."""

    cid: str
    rows: int
    cols: int


class SessionArgs(_Args):
    """op `session.open` → None: a shell whose cwd, variables and functions persist.
    op `session.close` → None kills every process the session started; `session.list` → list of
    str.
    """

    name: str
    env: dict[str, str] = {}
    cwd: bytes | None = None
    user: str | None = None
    shell: str | None = None  # a path in the sandbox; default: the platform's own


# --- files (op target = sandbox id) -----------------------------------------------------------


class FileStat(_Info):
    """op `files.stat` → `FileStat`; op `files.list` → list of `FileStat` (name: bytes in the
    directory).
    """

    name: bytes
    type: FileType
    size: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime: float = 0.0
    target: bytes | None = None  # of a symlink


class PathArgs(_Args):
    """ops `files.stat` (`follow`), `files.list`, `files.glob` (pattern in `path` → list of bytes),
    `files.mkdir` (parents are made), `files.remove` (`recursive`), `files.watch` (stream of
    `WatchEvent`). Relative paths start at the sandbox's workdir; the call acts with the rights
    of `user`.
    """

    path: bytes
    user: str | None = None
    follow: bool = True
    recursive: bool = False
    mode: int | None = None


class RenameArgs(_Args):
    """op `files.rename` → None; an existing file at `target` is replaced atomically."""

    path: bytes
    target: bytes
    user: str | None = None


class ChangeArgs(_Args):
    """op `files.chmod`, `files.chown` → None; `owner` is "user", "user:group", or numbers."""

    path: bytes
    user: str | None = None
    mode: int | None = None
    owner: str | None = None
    recursive: bool = False


class ReadArgs(_Args):
    """op `files.read`: stream of bytes, reply `Transferred`; `length` None reads to the end."""

    path: bytes
    user: str | None = None
    offset: int = 0
    length: int | None = None


class WriteArgs(_Args):
    """op `files.write` → `Transferred`: content in `data`, or streamed by the caller as items
    and `End` when `data` is None. The file appears, or is replaced, atomically at the end;
    `append` adds to it.
    """

    path: bytes
    user: str | None = None
    data: bytes | None = None
    append: bool = False
    mode: int | None = None


class TarArgs(_Args):
    """op `files.download`: stream of a tar of the tree at `path`; op `files.upload`: the caller
    streams a tar that is unpacked below `path`. Reply `Transferred`.
    """

    path: bytes
    user: str | None = None


class Transferred(_Info):
    """`data` holds content that was small enough not to be streamed."""

    size: int
    data: bytes | None = None


class WatchEvent(_Info):
    """An item of `files.watch`: `name` is relative to the watched directory."""

    kind: Literal["create", "modify", "remove", "rename_from", "rename_to", "attrib", "overflow"]
    name: bytes = b""


class ForwardArgs(_Args):
    """op `net.forward`: a duplex byte stream to a TCP port on the sandbox's loopback; `End`
    half-closes.
    """

    port: int
