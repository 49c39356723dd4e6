"""One connection of a sandbox to the proxy: requests are read, checked, passed on and answered.

Every request has an upstream connection of its own: none is left open that has carried a secret,
and what a client leaves half-way can be abandoned. Both directions stream with bounded buffers; who
does not read is not read from. Nothing of a request is sent before its head was accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import h11
import msgspec

from dsecd.doors.link import GOODBYE_S, PIECE_BYTES, Link
from dsecd.secrets import heads
from dsecd.secrets.heads import HEAD_MOST, Refused
from dsecd.secrets.mask import Mask
from dsecd.secrets.secret import Secret
from libdsec.errors import DSecError

Dial = Callable[[str], Awaitable[Link]]
Turn = Callable[[], Awaitable[None]]
Grant = Callable[[h11.Request], Secret]


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How long a connection may be silent, in each of its situations."""

    head_s: float = 20.0  # from a request's first byte to the end of its head
    idle_s: float = 75.0  # between two requests
    silence_s: float = 900.0  # within a body, or before an answer: models think for minutes
    linger_s: float = 1.0  # after a refusal, for what is still being sent


class Gone(Exception):
    """The client left, or sent what cannot be answered any more."""


class Exchange:
    """Serves one connection until either side ends it.

    `grant` says to which host a request may go, and with what; it raises `heads.Refused`.
    """

    _secret: Secret

    def __init__(
        self,
        link: Link,
        grant: Grant,
        *,
        dial: Dial,
        turn: Turn,
        on_refusal: Callable[[str], None],
        timing: Timing,
    ) -> None:
        self._link, self._grant, self._dial, self._turn = link, grant, dial, turn
        self._on_refusal, self._timing = on_refusal, timing
        self._mask = Mask(())
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_MOST)

    async def serve(self) -> None:
        """Answer requests one after the other. A cancelled call leaves `link` to its owner."""
        try:
            while await self._answer_one():
                self._http.start_next_cycle()
            await self._finish()
        except (Gone, OSError):  # with TimeoutError; an answer cut short must look so
            self._link.abort()

    async def _answer_one(self) -> bool:
        """Answer one request; return whether another one may follow."""
        try:
            request = await self._next_request()
            if request is None:
                return False
            self._secret = self._grant(request)
            self._mask = Mask(header.value for header in self._secret.headers)
            await self._turn()
            await self._relay(heads.forward(request, self._secret))
        except Refused as refused:
            await self._refuse(refused)
            return False
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _next_request(self) -> h11.Request | None:
        """Return the next head, None when the client has none. Raises `Refused`, OSError."""
        pending = self._http.trailing_data[0]
        if not pending:
            async with asyncio.timeout(self._timing.idle_s):
                data = await self._link.reader.read(PIECE_BYTES)
            self._http.receive_data(data)
        async with asyncio.timeout(self._timing.head_s):
            event = await self._client_event()
        return event if isinstance(event, h11.Request) else None

    async def _client_event(self) -> h11.Event:
        """Return the client's next event. Raises `Refused` for what is not HTTP."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    await self._send(h11.InformationalResponse(status_code=100, headers=[]))
                async with asyncio.timeout(self._timing.silence_s):
                    self._http.receive_data(await self._link.reader.read(PIECE_BYTES))
        except h11.RemoteProtocolError as error:
            raise Refused(error.error_status_hint, f"malformed request: {error}") from error
        assert isinstance(event, h11.Event)  # PAUSED is for after the end of a message
        return event

    # --- there and back -------------------------------------------------------------------------

    async def _relay(self, head: h11.Request) -> None:
        """Pass on a request and its answer, both at once: a server may answer early.

        Raises `Refused` while nothing was answered, then `Gone`.
        """
        try:
            upstream = await self._dial(self._secret.host)
        except DSecError as error:
            raise Refused(502, error.message) from error
        server = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_MOST)
        sending = asyncio.create_task(self._pass_request(upstream, server, head))
        answering = asyncio.create_task(self._pass_answer(upstream, server))
        both = (sending, answering)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                sending.result()  # raises when the client is gone
            await answering
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            upstream.abort()

    async def _pass_request(
        self, upstream: Link, server: h11.Connection, head: h11.Request
    ) -> None:
        """Send the request; then watch the client, until it says more or leaves.

        An upstream that takes no more is no failure here: it may have answered already.
        """
        try:
            await self._write(upstream, server.send(head))
            while not isinstance(event := await self._client_event(), h11.EndOfMessage):
                if not isinstance(event, h11.Data):
                    raise Gone
                await self._write(upstream, server.send(h11.Data(data=bytes(event.data))))
            await self._write(upstream, server.send(h11.EndOfMessage()))  # without its trailers
        except _UpstreamFailed:
            return
        except (Refused, h11.LocalProtocolError) as error:
            raise Gone from error  # in the middle of a body: there is nothing to say
        data = await self._link.reader.read(PIECE_BYTES)
        if not data:
            raise Gone
        self._http.receive_data(data)  # of the next request

    async def _pass_answer(self, upstream: Link, server: h11.Connection) -> None:
        """Pass on the answer. Raises `Refused` before its head was, `Gone` after."""
        body = self._mask.stream()
        try:
            while not isinstance(event := await self._server_event(upstream, server), h11.Response):
                pass  # 100 was said by ourselves, 103 is a hint
            await self._send(heads.answer(event, self._mask))
            while isinstance(part := await self._server_event(upstream, server), h11.Data):
                await self._send_data(body.feed(bytes(part.data)))
            await self._send_data(body.end())
            await self._send(h11.EndOfMessage())
        except (_UpstreamFailed, h11.LocalProtocolError) as error:
            if self._http.our_state is h11.SEND_BODY:
                raise Gone from error
            raise Refused(502, f"{self._secret.host} gave no valid answer: {error}") from error

    async def _server_event(self, upstream: Link, server: h11.Connection) -> h11.Event:
        while (event := _next_event(server)) is h11.NEED_DATA:
            try:
                async with asyncio.timeout(self._timing.silence_s):
                    server.receive_data(await upstream.reader.read(PIECE_BYTES))
            except OSError as error:  # with TimeoutError
                raise _UpstreamFailed(str(error) or "it fell silent") from error
        if isinstance(event, h11.ConnectionClosed) or not isinstance(event, h11.Event):
            raise _UpstreamFailed("it closed the connection")
        return event

    # --- to the client --------------------------------------------------------------------------

    async def _send_data(self, data: bytes) -> None:
        if data:
            await self._send(h11.Data(data=data))

    async def _send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            async with asyncio.timeout(self._timing.silence_s):
                await self._link.send(data)

    async def _write(self, upstream: Link, data: bytes | None) -> None:
        """Raises `_UpstreamFailed`."""
        if not data:
            return
        try:
            async with asyncio.timeout(self._timing.silence_s):
                await upstream.send(data)
        except OSError as error:
            raise _UpstreamFailed(str(error)) from error

    async def _refuse(self, refused: Refused) -> None:
        """Answer in the upstream's place, as far as that is still possible."""
        self._on_refusal(refused.message)
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            raise Gone
        text = self._mask.clean(f"dsec: {refused.message}\n".encode())
        head = h11.Response(
            status_code=refused.status,
            headers=[
                ("Content-Type", "text/plain; charset=utf-8"),
                ("Content-Length", str(len(text))),
                ("Connection", "close"),
            ],
        )
        await self._send(head)
        await self._send(h11.Data(data=text))
        await self._send(h11.EndOfMessage())

    async def _finish(self) -> None:
        """Close once what was written is taken.

        A body that nobody wants any more is read to its end before: a socket closed with something
        unread is reset, and the answer lost.
        """
        with contextlib.suppress(h11.RemoteProtocolError):
            if self._http.their_state is h11.SEND_BODY:
                self._http.next_event()  # the end, when there is no body
        if self._http.their_state in (h11.SEND_BODY, h11.ERROR):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.linger_s):
                    while await self._link.reader.read(PIECE_BYTES):
                        pass
        await self._link.finish(GOODBYE_S)


class _UpstreamFailed(Exception):
    """The upstream connection is broken or closed."""


def _next_event(server: h11.Connection) -> object:
    """Raises `_UpstreamFailed` for what is no answer."""
    try:
        return server.next_event()
    except h11.RemoteProtocolError as error:
        closed = server.trailing_data[1]
        raise _UpstreamFailed("it closed the connection" if closed else str(error)) from error
