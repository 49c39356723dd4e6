"""libdsec: the client of DSec.

>>> client = DSecClient()                                    # doctest: +SKIP
>>> await client.open()                                      # doctest: +SKIP
>>> args = DSecContainerRunArgs(container_image="base/debian:12")
>>> sandbox = await client.run_container(args, timeout=120)  # doctest: +SKIP
>>> result = await sandbox.run_shell("echo hello world")     # doctest: +SKIP
>>> await sandbox.stop()                                     # doctest: +SKIP

`libdsec.sync` is the same without ``await``. ``python -m libdsec FILE`` runs a script that uses
``await`` at its top level.
"""

from libdsec.build import BuildStep
from libdsec.client import DSecClient
from libdsec.commands import CommandHandle, Commands
from libdsec.errors import (
    AlreadyExists,
    CommandFailed,
    DSecError,
    Exhausted,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Timeout,
    Unavailable,
    Unsupported,
    WrongState,
)
from libdsec.files import EntryInfo, Files, WriteEntry, WriteInfo
from libdsec.forward import ForwardServer
from libdsec.layers import Layers
from libdsec.model import (
    CommandInfo,
    CpuClass,
    DSecContainerRunArgs,
    DSecFnCallArgs,
    DSecFullVMRunArgs,
    DSecMicroVMRunArgs,
    Event,
    Feature,
    FnCallResult,
    HostStats,
    ImageConfig,
    ImportProgress,
    KeptPath,
    KeptWarning,
    LayerInfo,
    Metrics,
    Output,
    Packed,
    Paused,
    PolicyRow,
    PtySize,
    Record,
    Resumed,
    SandboxInfo,
    SandboxPolicy,
)
from libdsec.pty import Pty
from libdsec.record import SignedRecord, Verified, check_record
from libdsec.result import CommandResult
from libdsec.sandbox import Sandbox
from libdsec.session import Session
from libdsec.version import __version__
from libdsec.watch import FileEvent, WatchHandle

__all__ = [
    "AlreadyExists", "BuildStep", "CommandFailed", "CommandHandle", "CommandInfo", "CommandResult",
    "Commands", "CpuClass", "DSecClient", "DSecContainerRunArgs", "DSecError", "DSecFnCallArgs",
    "DSecFullVMRunArgs", "DSecMicroVMRunArgs", "Display",
    "EntryInfo", "Event", "Exhausted", "Feature", "FileEvent", "Files",
    "FnCallResult", "ForwardServer", "HostStats", "ImageConfig", "ImportProgress", "Internal",
    "InvalidArgument", "KeptPath", "KeptWarning", "LayerInfo", "Layers", "Metrics", "NotFound",
    "Output", "Packed", "Paused", "PermissionDenied", "PolicyRow", "Pty", "PtySize", "Record",
    "Resumed", "Sandbox", "SandboxInfo", "SandboxPolicy", "Session", "SignedRecord", "Timeout",
    "Unavailable", "Unsupported", "Verified", "WatchHandle", "WriteEntry", "WriteInfo",
    "WrongState", "__version__", "check_record",
]  # fmt: skip
