"""Rules for files, ioctls, mounts, unix sockets and vsock become typed rules. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

from dsecd.policy import globs, seccomp
from dsecd.policy.ioctls import REQUESTS
from dsecd.policy.language import Files, Ioctls, Mounts, Policy, Unix, Vsock
from dsecd.policy.lines import Line
from dsecd.policy.rules import (
    Access,
    FileRule,
    IoctlRule,
    MountRule,
    UnixRule,
    Verdict,
    VsockRule,
)
from dsecd.policy.targets import refuse

_LAST_U32 = 0xFFFFFFFF
_FSTYPE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}|\*")
_PEER = re.compile(r"(\*|[0-9]{1,10})(?::([0-9]{1,10})(?:-([0-9]{1,10}))?)?")


def lines(policy: Policy, layer: str) -> Iterator[Line]:
    """Yield a line for each entry; `layer` is the preset's name or "".

    Raises `InvalidArgument` that names the entry.
    """
    yield from _files(policy.files, layer)
    yield from _ioctls(policy.ioctls, layer)
    yield from _mounts(policy.mounts, layer)
    yield from _unix(policy.unix, layer)
    yield from _vsock(policy.vsock, layer)


def _each(
    table: str, allow: Sequence[int | str], deny: Sequence[int | str]
) -> Iterator[tuple[str, Verdict, int | str]]:
    for index, value in enumerate(allow):
        yield f"{table}.allow[{index}]", "allow", value
    for index, value in enumerate(deny):
        yield f"{table}.deny[{index}]", "deny", value


def _pattern(text: str, place: str) -> str:
    fault = globs.fault(text)
    if fault:
        refuse(place, f"{text!r} {fault}")
    return text


def _files(files: Files, layer: str) -> Iterator[Line]:
    for index, text in enumerate(files.hide):
        place = f"files.hide[{index}]"
        hidden = (_pattern(text, place),)
        yield Line(place=place, layer=layer, verdict="deny", text=text, hidden=hidden)
    for index, rule in enumerate(files.rules):
        place = f"files.rules[{index}]"
        if not rule.paths or not (rule.allow or rule.deny):
            refuse(place, "give at least one path, and an access to allow or to deny")
        both = sorted(set(rule.allow) & set(rule.deny))
        if both:
            refuse(place, f"{' and '.join(both)} is both allowed and denied; remove one")
        patterns = [_pattern(text, place) for text in rule.paths]
        verdicts: tuple[tuple[Verdict, frozenset[Access]], ...] = (
            ("allow", frozenset(rule.allow)),
            ("deny", frozenset(rule.deny)),
        )
        for verdict, access in verdicts:
            if access:
                yield Line(
                    place=place, layer=layer, verdict=verdict,
                    text=f"{', '.join(sorted(access))} of {', '.join(rule.paths)}",
                    files=tuple(
                        FileRule(verdict=verdict, pattern=pattern, access=access)
                        for pattern in patterns
                    ),
                )  # fmt: skip


def _ioctls(ioctls: Ioctls, layer: str) -> Iterator[Line]:
    for place, verdict, value in _each("ioctls", ioctls.allow, ioctls.deny):
        number = request(value, place)
        if verdict == "allow" and seccomp.denies_ioctl(number):
            refuse(place, f"{value} is denied in every sandbox by the platform; remove the rule")
        rule = IoctlRule(verdict=verdict, request=number)
        yield Line(place=place, layer=layer, verdict=verdict, text=str(value), ioctls=(rule,))


def request(value: int | str, place: str) -> int:
    """Return the ioctl request of a name or number; `InvalidArgument` begins with `place`."""
    if isinstance(value, int):
        number = value
    elif value in REQUESTS:
        number = REQUESTS[value]
    else:
        try:
            number = int(value, 0)
        except ValueError:
            near = difflib.get_close_matches(value.upper(), REQUESTS, n=1)
            hint = f"did you mean {near[0]}?" if near else "write its number, as 0x5413"
            refuse(place, f"unknown ioctl {value!r}; {hint}")
    if not 0 <= number <= _LAST_U32:
        refuse(place, f"{value} is not a request: the kernel looks at 32 bits")
    return number


def _mounts(mounts: Mounts, layer: str) -> Iterator[Line]:
    for index, rule in enumerate(mounts.rules):
        place = f"mounts.rules[{index}]"
        if (rule.allow is None) == (rule.deny is None):
            refuse(place, "give exactly one of allow and deny")
        verdict: Verdict = "deny" if rule.allow is None else "allow"
        fstype = rule.allow if rule.allow is not None else str(rule.deny)
        if not _FSTYPE.fullmatch(fstype):
            refuse(place, f"{fstype!r} is not a file system type, bind, overlay or *")
        new = MountRule(verdict=verdict, fstype=fstype, pattern=_pattern(rule.at, place))
        text = f"{fstype} at {rule.at}"
        yield Line(place=place, layer=layer, verdict=verdict, text=text, mounts=(new,))


def _unix(unix: Unix, layer: str) -> Iterator[Line]:
    for place, verdict, value in _each("unix", unix.allow, unix.deny):
        text = str(value)
        fault = globs.name_fault(text[1:]) if text.startswith("@") else globs.fault(text)
        if fault:
            refuse(place, f"{text!r} {fault}; an abstract name starts with @")
        rule = UnixRule(verdict=verdict, pattern=text)
        yield Line(place=place, layer=layer, verdict=verdict, text=text, unix=(rule,))


def _vsock(vsock: Vsock, layer: str) -> Iterator[Line]:
    for place, verdict, value in _each("vsock", vsock.allow, vsock.deny):
        rule = _peer(str(value), verdict, place)
        yield Line(place=place, layer=layer, verdict=verdict, text=str(value), vsock=(rule,))


def _peer(text: str, verdict: Verdict, place: str) -> VsockRule:
    found = _PEER.fullmatch(text)
    if found is None:
        refuse(place, f'{text!r} is not a peer; write "2:1024", "2:1024-2000" or "*"')
    cid = None if found[1] == "*" else int(found[1])
    first = int(found[2]) if found[2] else 0
    last = int(found[3] or found[2]) if found[2] else _LAST_U32
    if (cid or 0) > _LAST_U32 or not first <= last <= _LAST_U32:
        refuse(place, f"{text!r}: numbers are 32 bits, and ports go from the lowest")
    return VsockRule(verdict=verdict, cid=cid, first_port=first, last_port=last)
