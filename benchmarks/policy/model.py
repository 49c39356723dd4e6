"""The model against the kernel: what `cases` makes up is bound, tried with real calls and packets,
and compared with what the reference says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import itertools
import random
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

import dns.message
import dns.rcode
import dns.rdatatype
import msgspec
from dsec_bench.policy import cases
from dsec_bench.policy.cases import Attempt, Scenario
from dsec_bench.policy.world import BOX, Agent, Cgroups, Wire, WorldError, in_namespace

from dsecd.host import netpolicy, nettable
from dsecd.host.netpolicy import Access, NetworkPolicies, sandbox_level
from dsecd.policy.rules import NetPolicy, opens_dns
from dsecd.policy.table import compile_table
from dsecd.resolver import Lookups, Opening, SandboxResolver
from dsecd.resolver.messages import Answer
from dsecd.resolver.reserved import Address

ATTEMPTS = 160  # under each policy, beside those of standing sockets
STANDING = 60
NUMBERS = {"tcp": 6, "udp": 17, "other": 132}  # of protocols, beside ICMP's two
ICMP = {4: 1, 6: 58}
_TYPES = {4: "A", 6: "AAAA"}
_BITS = {"tcp": nettable.TCP, "udp": nettable.UDP, "icmp": nettable.ICMP}
_RCVBUFFORCE = 33  # not in the socket module
_ETHER = bytes.fromhex("020000000009" * 2)
_FOREVER_NS = 1 << 62
_PATIENCE_S = 10.0
_REDUCED = 3  # so many disagreements of a run are brought down to the rules that matter
_AGENT = Path(__file__).with_name("agent.py")


@dataclasses.dataclass(frozen=True, slots=True)
class Disagreement:
    """Where the kernel (or the resolver) and the model part."""

    scenario: Scenario
    attempt: Attempt | str
    kernel: object
    model: object

    def __str__(self) -> str:
        net = self.scenario.net
        rules = "\n".join(f"    {rule}" for rule in (*net.rules, *net.names))
        return (
            f"{self.attempt}\n  kernel: {self.kernel}, model: {self.model}\n"
            f"  policy: {self.scenario.written}\n  names asked for: {self.scenario.names}\n"
            f"  rules that suffice, default {net.default}:\n"
            f"{rules}"
        )


@dataclasses.dataclass(slots=True)
class Result:
    """How many cases of each way were compared, and those that came out differently."""

    compared: Counter[str] = dataclasses.field(default_factory=Counter)
    allowed: Counter[str] = dataclasses.field(default_factory=Counter)
    disagreements: list[Disagreement] = dataclasses.field(default_factory=list)

    @property
    def cases(self) -> int:
        return self.compared.total()


Believed = Callable[[Scenario], Scenario]  # what the model is asked about; another to be caught


class Lab:
    """A sandbox in namespaces of our own, whose processes try what they are told to."""

    def __init__(self, rng: random.Random) -> None:
        with contextlib.ExitStack() as undo:
            self._groups = undo.enter_context(contextlib.closing(Cgroups()))
            self._wire = undo.enter_context(contextlib.closing(Wire()))
            level = sandbox_level(self._groups.path)
            self.policies = NetworkPolicies(self._groups.fd, level=level, pins=None)
            undo.callback(self.policies.close)
            self.policies.start()
            self._open, self._box = self._groups.make("open"), self._groups.make("box")
            self._wire.filter(self.policies.link_program)
            everything = Access(table=compile_table(NetPolicy(default="allow")), dns_only=False)
            for cgroup in (self._open, self._box):
                self.policies.bind(cgroup, everything)
            procs = self._groups.procs("box")
            self._agent = Agent(procs, self._wire.box, _AGENT)
            undo.enter_context(contextlib.closing(self._agent))
            self._arrivals = undo.enter_context(contextlib.closing(Arrivals(self._wire.world)))
            self.standing = cases.standing(rng, STANDING)
            self._agent.stand([(each.address, each.port) for each in self.standing])
            self._undo = undo.pop_all()

    def close(self) -> None:
        self._undo.close()

    def bind(self, scenario: Scenario) -> list[Disagreement]:
        """Bind the policy, ask for the names; return where the resolver parts from the model."""
        table = compile_table(scenario.net)
        resolvers = tuple(map(ipaddress.ip_address, cases.RESOLVERS))
        dns_only = not opens_dns(scenario.net)
        made = Access(table=table, resolvers=resolvers, dns_only=dns_only)
        self.policies.bind(self._box, made)
        resolver = SandboxResolver(
            scenario.net, cast(Lookups, _Answers()), _Sink(self.policies, self._box),
            on_refusal=lambda refusal: None,
        )  # fmt: skip
        wrong = []
        for name, (version, rdtype) in itertools.product(scenario.names, _TYPES.items()):
            told, expected = _ask(resolver, name, rdtype), cases.told(scenario.net, name, version)
            if told != expected:
                wrong.append(Disagreement(scenario, f"{name} {rdtype}", told, expected))
        return wrong

    def judge(self, attempts: Sequence[Attempt]) -> list[bool]:
        """Return what the kernel lets through under the policy that is bound."""
        by_way = {way: [a for a in attempts if a.way == way] for way in cases.WAYS}
        found: dict[Attempt, bool] = {}
        calls = [*by_way["connect"], *by_way["sendto"]]
        tried = self._agent.calls([(a.way, a.kind, a.address, a.port) for a in calls])
        found.update(zip(calls, tried, strict=True))
        if by_way["egress"]:
            found.update(zip(self.standing, self._agent.send_all(), strict=True))
        for way, send in (("ping", self._pings), ("frame", self._frames)):
            if by_way[way]:
                found.update(send(by_way[way]))
        return [found[attempt] for attempt in attempts]

    def _pings(self, attempts: list[Attempt]) -> dict[Attempt, bool]:
        """The link lets everything through meanwhile, so the cgroup's programs alone decide."""
        self.policies.bind_link(self._open, self._wire.index)
        numbers = dict(zip(self._arrivals.numbers, attempts, strict=False))
        self._agent.pings([(each.address, number) for number, each in numbers.items()])
        return self._arrived(numbers, [])

    def _frames(self, attempts: list[Attempt]) -> dict[Attempt, bool]:
        self.policies.bind_link(self._box, self._wire.index)
        numbers = dict(zip(self._arrivals.numbers, attempts, strict=False))
        return self._arrived(numbers, [frame(each, n) for n, each in numbers.items()])

    def _arrived(self, numbers: dict[int, Attempt], sent: list[bytes]) -> dict[Attempt, bool]:
        """Send frames and one that every policy allows; when that is there, all others are."""
        last = next(self._arrivals.numbers)
        end = frame(Attempt("frame", "udp", cases.RESOLVERS[0], 53), last)
        self._agent.frames([each.hex() for each in (*sent, end)])
        arrived = self._arrivals.until(last)
        return {attempt: number in arrived for number, attempt in numbers.items()}


def run(
    lab: Lab,
    rng: random.Random,
    policies: int,
    believed: Believed = lambda scenario: scenario,
    after: Callable[[], None] = lambda: None,
) -> Result:
    """Compare the model with the kernel under so many policies; `after` is called for each."""
    result = Result()
    for _ in range(policies):
        scenario = cases.scenario(rng)
        attempts = [*cases.attempts(rng, scenario, ATTEMPTS), *lab.standing]
        attempts = list(dict.fromkeys(attempts))
        result.disagreements += lab.bind(scenario)
        result.compared["name"] += 2 * len(scenario.names)
        model = cases.model(believed(scenario))
        for attempt, kernel in zip(attempts, lab.judge(attempts), strict=True):
            result.compared[attempt.way] += 1
            result.allowed[attempt.way] += kernel
            if kernel != model(attempt):
                result.disagreements.append(Disagreement(scenario, attempt, kernel, model(attempt)))
        after()
    for place, found in enumerate(result.disagreements[:_REDUCED]):
        result.disagreements[place] = _smallest(lab, found, believed)
    return result


def _smallest(lab: Lab, found: Disagreement, believed: Believed) -> Disagreement:
    """Leave out rules as long as the two do not agree; return what is left."""
    attempt = found.attempt
    if isinstance(attempt, str):
        return found
    for smaller in _reductions(found.scenario):
        lab.bind(smaller)
        kernel = lab.judge([attempt])[0]
        allowed = cases.model(believed(smaller))(attempt)
        if kernel != allowed:
            return _smallest(lab, Disagreement(smaller, attempt, kernel, allowed), believed)
    return found


def _reductions(scenario: Scenario) -> Iterable[Scenario]:
    net = scenario.net
    for field, rules in (("rules", net.rules), ("names", net.names)):
        for index in range(len(rules)):
            fewer = {field: (*rules[:index], *rules[index + 1 :])}
            yield dataclasses.replace(scenario, net=msgspec.structs.replace(net, **fewer))


# --- names --------------------------------------------------------------------------------------


class _Answers:
    """A cache of `Lookups` that knows every name already."""

    def known(self, name: str, rdtype: int) -> Answer:
        version = 4 if rdtype == dns.rdatatype.A else 6
        texts = cases.ANSWERS[name]
        addresses = [ipaddress.ip_address(text) for text in texts]
        of_type = tuple(address for address in addresses if address.version == version)
        return Answer(rcode=dns.rcode.NOERROR, ttl_s=60.0, addresses=of_type)


class _Sink:
    """Opens in the kernel what the resolver says."""

    def __init__(self, policies: NetworkPolicies, cgroup: int) -> None:
        self._policies, self._cgroup = policies, cgroup

    def admit(self, opening: Opening, addresses: Sequence[Address], ttl_s: float) -> None:
        ports = nettable.PortRange(opening.first_port, opening.last_port, _BITS[opening.protocol])
        made = netpolicy.Opening(str(opening), (ports,), _FOREVER_NS)
        for address in addresses:
            self._policies.admit(self._cgroup, address, made)

    def withdraw(self, opening: Opening, addresses: Sequence[Address]) -> None:
        for address in addresses:
            self._policies.forget(self._cgroup, address, str(opening))

    def in_use(self, addresses: Sequence[Address]) -> Iterable[Address]:
        return ()


def _ask(resolver: SandboxResolver, name: str, rdtype: str) -> set[str] | None:
    """Return the addresses that the resolver tells, None for NXDOMAIN."""
    wire = resolver.answer_now(dns.message.make_query(name, rdtype).to_wire(), stream=True)
    if not isinstance(wire, bytes):
        raise WorldError(f"the resolver did not answer a question for {name}")
    reply = dns.message.from_wire(wire)
    if reply.rcode() == dns.rcode.NXDOMAIN:
        return None
    return {str(each) for rrset in reply.answer for each in rrset}


# --- packets ------------------------------------------------------------------------------------


def frame(attempt: Attempt, number: int) -> bytes:
    """Return an Ethernet frame that carries `number` where `Arrivals` looks for it."""
    version = 6 if ":" in attempt.address else 4
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    ends = [socket.inet_pton(family, text) for text in (BOX[version], attempt.address)]
    protocol = NUMBERS.get(attempt.kind, ICMP[version])
    payload = _payload(attempt, version, number, b"".join(ends))
    if version == 6:
        head = struct.pack("!IHBB", 6 << 28, len(payload), protocol, 64)
        return _ETHER + b"\x86\xdd" + head + b"".join(ends) + payload
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), number, 0, 64, protocol, 0)
    check = _checksum(head + b"".join(ends))
    return _ETHER + b"\x08\0" + head[:10] + struct.pack("!H", check) + b"".join(ends) + payload


def _payload(attempt: Attempt, version: int, number: int, ends: bytes) -> bytes:
    if attempt.kind == "udp":
        return struct.pack("!HHHH", number, attempt.port, 12, 0) + b"data"
    if attempt.kind == "tcp":
        return struct.pack("!HHIIBBHHH", number, attempt.port, 1, 0, 0x50, 2, 1024, 0, 0)
    if attempt.kind == "other":
        return struct.pack("!HHII", number, attempt.port, 0, 0)
    echo = struct.pack("!BBHHH", 8 if version == 4 else 128, 0, 0, 1, number)
    pseudo = ends + struct.pack("!II", len(echo), ICMP[6]) if version == 6 else b""
    return echo[:2] + struct.pack("!H", _checksum(pseudo + echo)) + echo[4:]


def _checksum(data: bytes) -> int:
    """RFC 1071."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class Arrivals:
    """What gets to the world: raw sockets for the protocols, and the numbers packets carry."""

    def __init__(self, world: int) -> None:
        self.numbers = itertools.cycle(range(1024, 30000))  # below the ports that sockets choose
        kinds = [(4, number) for number in (*NUMBERS.values(), ICMP[4])]
        kinds += [(6, number) for number in (*NUMBERS.values(), ICMP[6])]
        self._sockets = in_namespace(world, lambda: {_raw(*kind): kind for kind in kinds})

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()

    def until(self, last: int) -> set[int]:
        """Return the numbers that arrived, up to `last`. Raises WorldError when that does not."""
        found: set[int] = set()
        deadline = time.monotonic() + _PATIENCE_S
        while last not in found:
            ready, _, _ = select.select(list(self._sockets), [], [], deadline - time.monotonic())
            if not ready:
                raise WorldError("a packet that every policy allows did not arrive")
            for sock in ready:
                found |= self._drain(sock)
        for sock in self._sockets:  # the last one may have been read first
            found |= self._drain(sock)
        return found

    def _drain(self, sock: socket.socket) -> set[int]:
        version, protocol = self._sockets[sock]
        at = (20 if version == 4 else 0) + (6 if protocol in ICMP.values() else 0)
        found = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                found |= set(struct.unpack_from("!H", sock.recv(256), at))
        return found


def _raw(version: int, protocol: int) -> socket.socket:
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_RAW, protocol)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, 4 << 20)
    return sock
