"""The same API without ``await``: `DSecClientSync`, `SandboxSync` and what they give.

Every class mirrors one of the asynchronous API, method by method, on one event loop in a
background thread per client; any thread may call. Callbacks run on that background thread.

    with DSecClientSync() as client:
        with client.run_container(args) as sandbox:
            print(sandbox.run_shell("echo hello").stdout)
"""

from __future__ import annotations

import asyncio
from typing import Any

from libdsec.bridge import Portal, Registry
from libdsec.client import DSecClient
from libdsec.commands import CommandHandle, Commands
from libdsec.display import Display
from libdsec.files import Files
from libdsec.forward import ForwardServer
from libdsec.layers import Layers
from libdsec.pty import Pty
from libdsec.sandbox import Sandbox
from libdsec.session import Session
from libdsec.watch import WatchHandle

_registry = Registry()

CommandHandleSync = _registry.mirror(CommandHandle, "CommandHandleSync")
CommandsSync = _registry.mirror(Commands, "CommandsSync")
DisplaySync = _registry.mirror(Display, "DisplaySync")
FilesSync = _registry.mirror(Files, "FilesSync")
ForwardServerSync = _registry.mirror(ForwardServer, "ForwardServerSync")
LayersSync = _registry.mirror(Layers, "LayersSync")
PtySync = _registry.mirror(Pty, "PtySync")
SandboxSync = _registry.mirror(Sandbox, "SandboxSync")
SessionSync = _registry.mirror(Session, "SessionSync")
WatchHandleSync = _registry.mirror(WatchHandle, "WatchHandleSync")
StreamReaderSync = _registry.mirror(asyncio.StreamReader, "StreamReaderSync")
StreamWriterSync = _registry.mirror(asyncio.StreamWriter, "StreamWriterSync")
_Client = _registry.mirror(DSecClient, "_Client")


class DSecClientSync(_Client):  # type: ignore[misc, valid-type]
    """`DSecClient` without ``await``. Takes the same arguments; close it to end its thread."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        token: str | None = None,
        ca_file: str | None = None,
        tls_server_name: str | None = None,
        reconnect_timeout: float = 30.0,
        request_timeout: float = 60.0,
    ) -> None:
        self._object = DSecClient(
            endpoint,
            token=token,
            ca_file=ca_file,
            tls_server_name=tls_server_name,
            reconnect_timeout=reconnect_timeout,
            request_timeout=request_timeout,
        )
        self._portal = Portal()

    def open(self) -> Any:
        """Connect; see `DSecClient.open`. A client that cannot connect is closed."""
        try:
            return super().open()
        except BaseException:
            self._portal.close()
            raise

    def __enter__(self) -> Any:
        return self.open()

    def close(self) -> None:
        """Disconnect and end the thread. Closing twice is no error."""
        try:
            if not self._portal.closed:
                super().close()
        finally:
            self._portal.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


__all__ = [
    "CommandHandleSync", "CommandsSync", "DSecClientSync", "DisplaySync", "FilesSync",
    "ForwardServerSync", "LayersSync", "PtySync", "SandboxSync", "SessionSync", "StreamReaderSync",
    "StreamWriterSync", "WatchHandleSync",
]  # fmt: skip
