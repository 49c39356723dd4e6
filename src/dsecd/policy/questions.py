"""Questions to a policy in plain words, as ``dsec policy test`` asks them. Pure.

    tcp 192.0.2.1 443      udp example.org 53      icmp 2001:db8::1      name pypi.org
    read /etc/shadow       rename /a /b            mount tmpfs /mnt      ioctl TIOCSTI
    unix /run/x.sock       unix @name              vsock 2 1024

The answer is that of the reference model, with the entries of the policy that decided.
"""

from __future__ import annotations

import ipaddress
import posixpath
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from dsecd.policy import compile_system, globs, reference, targets
from dsecd.policy.compile import Compiled
from dsecd.policy.lines import Line
from dsecd.policy.rules import FilePolicy, NetPolicy, SystemPolicy, Verdict
from libdsec.errors import InvalidArgument

FORMS = (
    "tcp|udp ADDRESS|NAME PORT, icmp ADDRESS|NAME, name NAME, read|write|execute PATH, "
    "rename PATH PATH, mount TYPE PATH, ioctl REQUEST, unix PATH|@NAME, vsock CID PORT"
)
_Decide = Callable[[NetPolicy, FilePolicy, SystemPolicy], Verdict]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`because` are the entries that decided; () when it was the default of `table`."""

    verdict: Verdict
    table: str
    because: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.verdict}: {' and '.join(self.because) or f'{self.table}.default'}"


def ask(compiled: Compiled, words: Sequence[str]) -> Answer:
    """Return what `compiled` says to a question. Raises `InvalidArgument` for a malformed one."""
    table, decide = _question(list(words))
    verdict = decide(compiled.net, compiled.files, compiled.system)
    because = tuple(str(line) for line in compiled.lines if _decides(line, verdict, decide))
    return Answer(verdict=verdict, table=table, because=because)


def _decides(line: Line, verdict: Verdict, decide: _Decide) -> bool:
    """Say whether the rules of a line alone turn the opposite default into this verdict."""
    other: Verdict = "allow" if verdict == "deny" else "deny"
    system = SystemPolicy(
        ioctls=line.ioctls, mounts=line.mounts, unix=line.unix, vsock=line.vsock,
        ioctl_default=other, mount_default=other, unix_default=other, vsock_default=other,
    )  # fmt: skip
    net = NetPolicy(rules=line.nets, names=line.names, default=other)
    files = FilePolicy(rules=line.files, hidden=line.hidden, default=other)
    return line.verdict == verdict and decide(net, files, system) == verdict


def _question(words: list[str]) -> tuple[str, _Decide]:
    """Return the table that a question is about, and the function that decides it."""
    match words:
        case [("tcp" | "udp") as kind, peer, port]:
            return "network", _peer(kind, peer, targets.port(port, "question"))
        case ["icmp", peer]:
            return "network", _peer("icmp", peer, 0)
        case ["name", name]:
            asked = _name(name)
            return "network", lambda net, files, system: _answered(net, asked)
        case [("read" | "write" | "execute") as word, path]:
            access, where = word, _path(path)
            return "files", lambda net, files, system: reference.decide_file(files, access, where)
        case ["rename", path, to]:
            ends = _path(path), _path(to)
            return "files", lambda net, files, system: reference.decide_rename(files, *ends)
        case ["mount", kind, path]:
            where = _path(path)
            return "mounts", lambda net, files, system: reference.decide_mount(system, kind, where)
        case ["ioctl", text]:
            request = compile_system.request(text, "question")
            return "ioctls", lambda net, files, system: reference.decide_ioctl(system, request)
        case ["unix", socket]:
            name = socket if socket.startswith("@") else _path(socket)
            return "unix", lambda net, files, system: reference.decide_unix(system, name)
        case ["vsock", cid, port] if cid.isdecimal() and port.isdecimal():
            end = int(cid), int(port)
            return "vsock", lambda net, files, system: reference.decide_vsock(system, *end)
    raise InvalidArgument(f"question: {' '.join(words)!r} is none of {FORMS}", field="question")


def _peer(word: str, peer: str, port: int) -> _Decide:
    """Return what decides about a peer: an address, or each address of a name."""
    kind = cast(reference.NameKind, word)
    if targets.is_network(peer):
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            targets.refuse("question", f"{peer!r} is not an address")
        return lambda net, files, system: reference.decide_net(net, kind, address, port)
    name = _name(peer)
    return lambda net, files, system: _opened(net, name, kind, port)


def _opened(net: NetPolicy, name: str, kind: reference.NameKind, port: int) -> Verdict:
    """Return the verdict on a name's addresses, if no rule is about the addresses themselves."""
    decision = reference.decide_name(net, name)
    opened = any(
        opening.protocol == kind and opening.first_port <= port <= opening.last_port
        for opening in decision.openings
    )
    return "allow" if opened or (decision.answered and net.default == "allow") else "deny"


def _answered(net: NetPolicy, name: str) -> Verdict:
    return "allow" if reference.decide_name(net, name).answered else "deny"


def _name(text: str) -> str:
    if text.startswith("*"):
        targets.refuse("question", f"{text!r} is a pattern; ask about one name")
    return targets.domain(text, "question")


def _path(text: str) -> str:
    if not text.startswith("/") or globs.name_fault(text.replace("*", "")):
        targets.refuse("question", f"{text!r} is not an absolute path")
    return posixpath.normpath("/" + text.lstrip("/"))
