"""One worker of a pool: a sandbox of the engine's own, and the stream to its keeper of calls."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dsecd.backends.fncall_stream import Answer, Asked, Stream
from dsecd.engine import own
from dsecd.engine.manager import Manager
from dsecd.engine.request import Kind
from dsecd.engine.sandbox import Sandbox
from libdsec.model import DSecContainerRunArgs


class Environment(msgspec.Struct, frozen=True):
    """What a pool is for: its workers are made alike, and serve nobody else."""

    owner: str
    name: str
    worker: DSecContainerRunArgs
    imports: list[str]
    files_bytes: int


class Worker:
    """Made by `start`; used by one call at a time; ended by `end`."""

    def __init__(self, manager: Manager, sandbox: Sandbox, stream: Stream) -> None:
        self.sandbox, self.idle_since = sandbox, 0.0
        self._manager, self._stream = manager, stream

    @classmethod
    async def start(cls, manager: Manager, wanted: Environment) -> Worker:
        """Return a worker that is ready for a call.

        Raises what making a sandbox raises, and what `Stream.open` does.
        """
        backend = manager.backends.streaming()
        kind = Kind(backend=backend.name)
        sandbox = await own.create(manager, wanted.owner, "fncall", kind, wanted.worker)
        try:
            assert sandbox.handle is not None
            stream = await Stream.open(
                backend, sandbox.handle, wanted.imports, wanted.files_bytes,
                network=bool(sandbox.address),
            )  # fmt: skip
        except BaseException:
            own.end(manager, sandbox, "fncall: its start failed")
            raise
        return cls(manager, sandbox, stream)

    def tell(self, on_ready: Callable[[], None], on_lost: Callable[[str], None]) -> None:
        """Have `on_ready` told when the next call may be made, `on_lost` once that none may."""
        self._stream.on_ready, self._stream.on_lost = on_ready, on_lost

    async def call(self, asked: Asked) -> Answer:
        """Make a call. Cancelling it kills the call. Raises `Lost`."""
        return await self._stream.call(asked)

    def end(self, reason: str) -> None:
        """Begin to end the sandbox, and with it whatever is left; once."""
        self._stream.close(reason)
        own.end(self._manager, self.sandbox, f"fncall: {reason}")
