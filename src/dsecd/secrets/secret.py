"""What a caller gives as `secrets`, checked: hosts, and the headers added to their requests. Pure.

No error, log line or representation made here holds a value.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec

from dsecd.policy import targets
from libdsec.errors import InvalidArgument

Given = Mapping[str, Mapping[str, str] | str]  # of `DSecContainerRunArgs.secrets`

HIDDEN = "***"
NAMES_MOST = 32
HEADERS_MOST = 8  # of one name
VALUE_MOST = 8 << 10  # characters; servers refuse heads that are longer
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")  # RFC 9110 section 5.6.2
_VALUE = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")
# They frame the message or say whom it is for: a secret in one of them would change the request
_FRAMING = frozenset((
    "accept-encoding", "connection", "content-length", "content-type", "expect", "host",
    "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
))  # fmt: skip


class Header(msgspec.Struct, frozen=True):
    """A header field that is added to every request."""

    name: str
    value: str

    def __repr__(self) -> str:
        return f"Header({self.name!r}, {HIDDEN!r})"


class Secret(msgspec.Struct, frozen=True):
    """The headers of one host's requests; `host` is as `rules.NameRule` has names."""

    host: str
    headers: tuple[Header, ...]


def parse(given: Given) -> tuple[Secret, ...]:
    """Return the secrets of a request, by host. Raises `InvalidArgument`, never with a value."""
    if len(given) > NAMES_MOST:
        _refuse(f"{len(given)} names, at most {NAMES_MOST} are taken")
    found: dict[str, Secret] = {}
    for name, headers in given.items():
        host = targets.domain(name, "secrets")
        if "*" in host:
            _refuse(f"{name!r}: a secret is for one host; write each name in full")
        if host in found:
            _refuse(f"{host} is given twice; put all its headers into one entry")
        pairs = [_split(host, headers)] if isinstance(headers, str) else list(headers.items())
        found[host] = Secret(host, _headers(host, pairs))
    return tuple(found[host] for host in sorted(found))


def _split(host: str, line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon:
        _refuse(f'{host}: write "Header-Name: value"')
    return name.strip(), value.strip()


def _headers(host: str, pairs: Sequence[tuple[str, str]]) -> tuple[Header, ...]:
    if not 1 <= len(pairs) <= HEADERS_MOST:
        _refuse(f"{host}: 1 to {HEADERS_MOST} headers are needed, {len(pairs)} are given")
    seen = set()
    for name, value in pairs:
        if not _TOKEN.fullmatch(name):
            _refuse(f"{host}: a header's name is letters, digits and hyphens")
        if name.lower() in _FRAMING or name.lower().startswith("proxy-"):
            _refuse(f"{host}: {name} is the proxy's own to write; use another header")
        if name.lower() in seen:
            _refuse(f"{host}: {name} is given twice")
        seen.add(name.lower())
        if value == HIDDEN:
            _refuse(f"{host}: {name} is hidden, as the daemon shows it; give its value again")
        if len(value) > VALUE_MOST or not _VALUE.fullmatch(value):
            _refuse(
                f"{host}: the value of {name} must be 1 to {VALUE_MOST} printable ASCII "
                "characters on one line, without blanks around it"
            )
    return tuple(Header(name, value) for name, value in pairs)


def redacted(given: Given) -> dict[str, dict[str, str] | str]:
    """Return `given` with the values hidden: what may be shown, logged and journalled.

    A line is cut to its name; what is hidden already stays as it is.
    """
    shown: dict[str, dict[str, str] | str] = {}
    for host, headers in given.items():
        if isinstance(headers, str):
            headers = dict([_split(host, headers)])
        shown[host] = dict.fromkeys(headers, HIDDEN)
    return shown


def digest(given: Given, salt: str) -> bytes:
    """Return what tells whether two requests gave the same secrets; b"" for none.

    Not for showing: short values can be found from it by trying them.
    """
    if not given:
        return b""
    encoded = msgspec.msgpack.encode(given, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=16, key=salt.encode()[:64]).digest()


def _refuse(reason: str) -> None:
    raise InvalidArgument(f"secrets: {reason}", field="secrets")
