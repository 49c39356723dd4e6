"""What one sandbox is told when it asks: the policy's names, the guard of answers, the budget.

    query → rate → rule → type → cache or upstream (budget) → guard → pins (admit) → reply

An address is open before the reply that holds it is sent. Everything refused is NXDOMAIN, at once:
libc does not ask again and programs say "unknown host".
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import dns.rcode
import dns.rdatatype
import msgspec

from dsecd.policy.rules import NetPolicy
from dsecd.resolver import queries, reserved
from dsecd.resolver.budget import Bucket, Clock, Limits, Outflow
from dsecd.resolver.lookup import Lookups
from dsecd.resolver.messages import Answer
from dsecd.resolver.names import NameTable, Ruling
from dsecd.resolver.pins import FLOOR_S, Pin, Pins, Sink
from dsecd.resolver.queries import Query
from libdsec.errors import DSecError

log = logging.getLogger(__name__)

Reason = Literal["not allowed", "not global", "budget", "not opened"]

_NXDOMAIN = Answer(rcode=dns.rcode.NXDOMAIN, ttl_s=0.0)
_SERVFAIL = Answer(rcode=dns.rcode.SERVFAIL, ttl_s=0.0)
_NOTHING = Answer(rcode=dns.rcode.NOERROR, ttl_s=0.0)
# RFC 6761 section 6.3: never asked elsewhere
_LOCALHOST: dict[int, reserved.Address] = {
    dns.rdatatype.A: ipaddress.ip_address("127.0.0.1"),
    dns.rdatatype.AAAA: ipaddress.ip_address("::1"),
}
_LOCALHOST_TTL_S = 3600.0
_OVERRIDE_TTL_S = 60.0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A name that was not answered in full, for the client and the log.

    `name` is as asked, in master file form (printable ASCII). "not global": addresses were left
    out; "budget": see `Limits`; "not opened": too many addresses are, or the sink failed.
    `unreported` refusals came before this one and were too many to report.
    """

    name: str
    rdtype: str
    reason: Reason
    unreported: int = 0


class Counts(msgspec.Struct, kw_only=True):
    """Totals of one sandbox."""

    queries: int = 0
    refused: int = 0
    dropped: int = 0
    upstream: int = 0


class SandboxResolver:
    """Answers the queries of one sandbox. Belongs to one event loop.

    `overrides` are addresses on the sandbox's own loopback of names that the policy allows: nobody
    is asked for these names, and no address of theirs is opened. `relay` is the one of all other
    names when the policy has them checked.
    """

    def __init__(
        self,
        policy: NetPolicy,
        lookups: Lookups,
        sink: Sink,
        *,
        on_refusal: Callable[[Refusal], None],
        refused: Iterable[reserved.Network] = (),
        overrides: Mapping[str, reserved.Address] | None = None,
        relay: reserved.Address | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        floor_s: float = FLOOR_S,
        clock: Clock = time.monotonic,
    ) -> None:
        self.limits = limits
        self.counts = Counts()
        self.rate = Bucket(limits.queries_burst, limits.queries_per_s, clock)
        self._table = NameTable(policy)
        self._lookups = lookups
        self._on_refusal = on_refusal
        self._refused = tuple(refused)
        self._overrides = dict(overrides or {})
        self._relay = relay
        self._pins = Pins(sink, clock, floor_s=floor_s, most=limits.pinned)
        self._outflow = Outflow(limits, clock)
        self._events = Bucket(limits.events_burst, limits.events_per_s, clock)
        self._unreported = 0
        self._waiting = 0

    def answer_now(self, wire: bytes, *, stream: bool) -> bytes | Query | None:
        """Return the reply to `wire`, or the query when it has to be waited for (`answer`).

        None: there is nothing to say.
        """
        self.counts.queries += 1
        try:
            query = queries.parse_query(wire)
        except queries.BadQuery as error:
            return error.reply
        if query.name == "localhost" or query.name.endswith(".localhost"):
            return self._localhost(query, stream)
        ruling = self._table.judge(query.name)
        if not ruling.answered:
            return self._refuse(query, "not allowed", stream)
        if query.rdtype not in queries.ADDRESS_TYPES:
            return queries.reply(query, _NOTHING, 0, stream=stream)
        if query.name in self._overrides:
            return self._override(query, self._overrides[query.name], stream)
        if ruling.checked:
            if self._relay is None:
                return self._refuse(query, "not opened", stream)
            return self._override(query, self._relay, stream)
        known = self._lookups.known(query.name, query.rdtype)
        if known is None:
            return self._admit_upstream(query, ruling, stream)
        return self._finish(query, ruling, known, stream)

    def _admit_upstream(self, query: Query, ruling: Ruling, stream: bool) -> bytes | Query | None:
        """Return `query` when it may be waited for, else what to say instead.

        It is counted here and not when its task begins: a batch of datagrams has none yet.
        """
        if self._waiting >= self.limits.waiting:
            self.counts.dropped += 1
            return queries.reply(query, _SERVFAIL, 0, stream=True) if stream else None
        if not self._lookups.flying(query.name, query.rdtype):
            if not self._outflow.charge(query.name, ruling.chosen):
                return self._refuse(query, "budget", stream)
            self.counts.upstream += 1
        self._waiting += 1
        return query

    async def answer(self, query: Query, *, stream: bool) -> bytes:
        """Return the reply to a query that `answer_now` returned; once for each."""
        try:
            found = await self._lookups.find(query.name, query.rdtype)
        finally:
            self._waiting -= 1
        ruling = self._table.judge(query.name)  # may be another policy by now
        if not ruling.answered or ruling.checked:
            return self._refuse(query, "not allowed", stream)
        return self._finish(query, ruling, found, stream)

    async def find(self, name: str) -> list[reserved.Address]:
        """Return the addresses of an allowed name for the sandbox's relay, IPv4 first.

        They are asked for on the sandbox's budget; [] when that is used up.
        """
        ruling = self._table.judge(name)
        found: list[reserved.Address] = []
        for rdtype in queries.ADDRESS_TYPES if ruling.answered else ():
            asks = self._lookups.known(name, rdtype) is None
            if asks and not self._lookups.flying(name, rdtype):
                if not self._outflow.charge(name, ruling.chosen):
                    return []
                self.counts.upstream += 1
            answer = await self._lookups.find(name, rdtype)
            found += reserved.keep(answer.addresses, private=ruling.private, refused=self._refused)
        return found

    def _finish(self, query: Query, ruling: Ruling, found: Answer, stream: bool) -> bytes:
        """Open what the answer may hold, then render it."""
        kept = reserved.keep(found.addresses, private=ruling.private, refused=self._refused)
        if len(kept) < len(found.addresses):
            self._report(query, "not global")
        try:
            self._pins.admit(query.name, ruling, kept, found.ttl_s)
        except (DSecError, OSError) as error:
            log.warning("addresses of %s are not opened: %s", query.name, error)
            self._report(query, "not opened")
            return queries.reply(query, _SERVFAIL, 0, stream=stream)
        answer = msgspec.structs.replace(found, addresses=kept)
        return queries.reply(query, answer, max(1, int(found.ttl_s)), stream=stream)

    def _localhost(self, query: Query, stream: bool) -> bytes:
        address = _LOCALHOST.get(query.rdtype)
        answer = msgspec.structs.replace(_NOTHING, addresses=(address,)) if address else _NOTHING
        return queries.reply(query, answer, int(_LOCALHOST_TTL_S), stream=stream)

    def _override(self, query: Query, address: reserved.Address, stream: bool) -> bytes:
        wanted = dns.rdatatype.A if address.version == 4 else dns.rdatatype.AAAA
        own = (address,) if query.rdtype == wanted else ()
        answer = msgspec.structs.replace(_NOTHING, addresses=own)
        return queries.reply(query, answer, int(_OVERRIDE_TTL_S), stream=stream)

    def _refuse(self, query: Query, reason: Reason, stream: bool) -> bytes:
        self._report(query, reason)
        return queries.reply(query, _NXDOMAIN, 0, stream=stream)

    def _report(self, query: Query, reason: Reason) -> None:
        self.counts.refused += 1
        if not self._events.take():
            self._unreported += 1
            return
        unreported, self._unreported = self._unreported, 0
        self._on_refusal(
            Refusal(
                name=query.text(),
                rdtype=dns.rdatatype.to_text(dns.rdatatype.RdataType.make(query.rdtype)),
                reason=reason,
                unreported=unreported,
            )
        )

    def replace(self, policy: NetPolicy, relay: reserved.Address | None = None) -> None:
        """Follow a new policy; addresses of names that it refuses are closed before the return.

        Raises what the sink raises; then all addresses of names are closed.
        """
        self._table, self._relay = NameTable(policy), relay
        self._pins.replace(self._table.judge)

    def expire(self) -> None:
        """Close addresses nobody can know any more. To be called every few seconds."""
        self._pins.expire()

    def held(self) -> list[Pin]:
        """Return the open addresses, for the journal."""
        return self._pins.held()

    def restore(self, pins: Iterable[Pin]) -> None:
        """Open what a daemon before this one had open. Raises what the sink raises."""
        self._pins.restore(pins, self._table.judge)

    def close(self) -> None:
        """Close all addresses of names."""
        self._pins.clear()
