"""The machinery of the synchronous twin: one event loop in a thread, and mirrored classes.

`mirror` reads a class of the asynchronous API and makes its twin: each ``async def`` becomes a
method that runs it on the loop's thread and waits, each async iterator an iterator. Nothing of
the API is written twice; `libdsec.sync` lists the classes and `libdsec/sync.pyi` (made by
`libdsec.stubs`) gives their types.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

from libdsec.errors import WrongState

T = TypeVar("T")


class Portal:
    """An event loop in a daemon thread. Closed by its client."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="libdsec-sync", daemon=True
        )
        self._thread.start()

    def run(self, make: Callable[[], Awaitable[T]]) -> T:
        """Run ``await make()`` on the loop and return its result; Ctrl-C cancels it there."""
        if threading.current_thread() is self._thread:
            raise WrongState("a callback cannot make synchronous calls: use the async API in it")
        if self._loop.is_closed():
            raise WrongState("the client is closed", state="closed")

        async def work() -> T:
            return await make()

        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                concurrent.futures.wait([future], timeout=10)
            raise

    @property
    def closed(self) -> bool:
        """Whether the loop has ended."""
        return self._loop.is_closed()

    def close(self) -> None:
        """Stop the loop and its thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


class Mirrored:
    """Base of every twin: the asynchronous object and the portal to its loop."""

    _portal: Portal
    _object: Any

    def __repr__(self) -> str:
        return f"<sync {self._object!r}>"


class Registry:
    """Which twin stands for which asynchronous class."""

    def __init__(self) -> None:
        self.twins: dict[type[Any], type[Mirrored]] = {}

    def mirror(self, original: type[Any], name: str, doc: str | None = None) -> type[Any]:
        """Make and register the twin of `original`, called `name`."""
        members: dict[str, Any] = {"__doc__": doc or original.__doc__, "__module__": "libdsec.sync"}
        for attribute, value in _public(original):
            members[attribute] = self._member(attribute, value)
        if hasattr(original, "__aenter__"):
            members["__enter__"] = self._method("__aenter__", original.__aenter__)
            members["__exit__"] = self._method("__aexit__", original.__aexit__)
        if hasattr(original, "__anext__"):
            members["__iter__"] = lambda twin: twin
            members["__next__"] = _next
        twin = type(name, (Mirrored,), members)
        self.twins[original] = twin
        return twin

    def wrap(self, portal: Portal, value: Any) -> Any:
        """Return `value` as the caller of the twin sees it."""
        twin = self.twins.get(type(value))
        if twin is not None:
            made = twin.__new__(twin)
            made._portal, made._object = portal, value
            return made
        if isinstance(value, tuple):
            return tuple(self.wrap(portal, item) for item in value)
        if hasattr(value, "__anext__"):
            return self._iterate(portal, value)
        return value

    def _member(self, name: str, value: Any) -> Any:
        if isinstance(value, property):
            return property(self._getter(name), doc=value.__doc__)
        return self._method(name, value)

    def _getter(self, name: str) -> Callable[[Mirrored], Any]:
        return lambda twin: self.wrap(twin._portal, getattr(twin._object, name))

    def _method(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(twin: Mirrored, /, *args: Any, **kwargs: Any) -> Any:
            async def work() -> Any:
                answer = getattr(twin._object, name)(*args, **kwargs)
                return await answer if inspect.isawaitable(answer) else answer

            result = twin._portal.run(work)
            return twin if result is twin._object else self.wrap(twin._portal, result)

        method.__name__, method.__doc__ = name, original.__doc__
        described: Any = method
        described.__signature__ = inspect.signature(original)  # help() and editors show this one
        return method

    def _iterate(self, portal: Portal, stream: AsyncIterator[Any]) -> Iterator[Any]:
        try:
            while True:
                try:
                    value = portal.run(lambda: anext(stream))
                except StopAsyncIteration:
                    return
                yield self.wrap(portal, value)
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                portal.run(close)


def _next(twin: Mirrored) -> Any:
    try:
        return twin._portal.run(lambda: anext(twin._object))
    except StopAsyncIteration:
        raise StopIteration from None


def _public(original: type[Any]) -> Iterator[tuple[str, Any]]:
    for name, value in inspect.getmembers_static(original):
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            yield name, value
