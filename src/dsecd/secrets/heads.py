"""Heads of requests and answers: what is refused, what is taken out, what is put in. Pure.

A request is never passed on as it came. It is parsed by one parser (h11, which refuses what is
malformed), checked here, and written anew, so that whatever two parsers might read differently
(RFC 9112 section 11.2) does not reach the second one.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import h11

from dsecd.resolver.names import plain
from dsecd.secrets.mask import Mask
from dsecd.secrets.secret import Secret

Fields = list[tuple[bytes, bytes]]

HEAD_MOST = 64 << 10  # bytes of a head, or of the size line and extensions of a chunk
_REFUSED_METHODS = frozenset((b"CONNECT", b"TRACE", b"TRACK"))
# RFC 9110 section 7.6.1, and older clients' Proxy-Connection. Upgrade is among them: what follows
# one is no HTTP any more, and a server may always answer as if it had not been asked.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade http2-settings".split()
)
_KEPT = frozenset((b"content-length", b"content-type"))  # whatever Connection says of them


class Refused(Exception):
    """Answered by the proxy itself, with `status` and a line of text. Nothing was sent upstream."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def forward(request: h11.Request, secret: Secret) -> h11.Request:
    """Return the request to send in place of `request`. Raises `Refused`."""
    if request.http_version not in (b"1.0", b"1.1"):
        raise Refused(505, "only HTTP/1.1 is spoken here")
    if request.method.upper() in _REFUSED_METHODS:
        raise Refused(405, f"{request.method.decode()} would show or bypass what is added here")
    _check_host(request, secret.host)
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and (
        b"content-length" in names or request.http_version == b"1.0"
    ):
        raise Refused(400, "Transfer-Encoding with Content-Length, or in HTTP/1.0: two framings")
    added = {header.name.lower().encode() for header in secret.headers}
    if added:
        added.add(b"accept-encoding")
    fields: Fields = [(b"Host", secret.host.encode())]
    fields += _passed(request, added | {b"host", b"expect"})
    if b"transfer-encoding" in names:
        fields.append((b"Transfer-Encoding", b"chunked"))  # the only coding that h11 takes
    fields += [(header.name.encode(), header.value.encode()) for header in secret.headers]
    if added:  # an encoded body could not be looked at for the secret
        fields.append((b"Accept-Encoding", b"identity"))
    fields.append((b"Connection", b"close"))
    return h11.Request(
        method=request.method, target=_origin_form(request.target, secret.host), headers=fields
    )


def named_host(request: h11.Request) -> str:
    """Return the name that a request says it is for; `forward` holds it to that.

    Raises `Refused` when it says none.
    """
    values = [value for name, value in request.headers if name == b"host"]
    if not values:
        raise Refused(400, "a Host header is required")
    found = plain(values[0].partition(b":")[0].removesuffix(b".").split(b"."))
    if not found:
        raise Refused(403, "the Host header holds no name")
    return found


def answer(response: h11.Response, mask: Mask) -> h11.Response:
    """Return the answer to pass on. A redirection is the client's to follow, without the secret."""
    # HTTP/3 at the same name would go around the proxy
    dropped = {b"alt-svc"}
    if b"transfer-encoding" in [name for name, _ in response.headers]:
        dropped.add(b"content-length")
    fields = [(name, mask.clean(value)) for name, value in _passed(response, dropped)]
    return h11.Response(
        status_code=response.status_code, reason=mask.clean(response.reason), headers=fields
    )


def _check_host(request: h11.Request, host: str) -> None:
    """Raise `Refused` unless every place that names a host names this one."""
    hosts = [value for name, value in request.headers if name == b"host"]
    if not hosts:  # HTTP/1.0 allows it
        raise Refused(400, "a Host header is required")
    for value in hosts:
        _check_authority(value.decode("latin-1"), host)
    if request.target[:1] not in (b"/", b"*"):
        _check_authority(_absolute(request.target)[0], host)


def _check_authority(text: str, host: str) -> None:
    name, colon, port = text.lower().partition(":")
    if name.removesuffix(".") != host or (colon and port not in ("80", "443")):
        raise Refused(421, f"only {host} is served here")


def _absolute(target: bytes) -> tuple[str, str]:
    """Return authority, and path with query, of a target in absolute form."""
    try:
        parts = urlsplit(target.decode("ascii"))
    except ValueError:
        raise Refused(400, "the request's target is no URL") from None
    if parts.scheme not in ("http", "https"):
        raise Refused(400, "the request's target is neither a path nor an http URL")
    path = parts.path or "/"
    return parts.netloc, f"{path}?{parts.query}" if parts.query else path


def _origin_form(target: bytes, host: str) -> bytes:
    if target == b"*":
        return target
    if target.startswith(b"*"):
        raise Refused(400, f"{host} has no such target")
    return target if target.startswith(b"/") else _absolute(target)[1].encode()


def _passed(message: h11.Request | h11.Response, dropped: set[bytes]) -> Fields:
    """Return the fields meant for the other end, with their letter case, without `dropped`.

    Some servers take an underscore for a hyphen, so `Api_Key` goes with `Api-Key`.
    """
    nominated = {
        option.strip().lower()
        for name, value in message.headers
        if name == b"connection"
        for option in value.split(b",")
    }
    gone = dropped | _HOP_BY_HOP | (nominated - _KEPT)
    return [
        (name, value)
        for name, value in message.headers.raw_items()
        if name.lower().replace(b"_", b"-") not in gone
    ]
