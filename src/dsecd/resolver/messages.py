"""What an upstream is asked, and what is believed of its response. Parsing is dnspython's.

Only the chain of aliases from the asked name and the addresses at its end are taken, so records
about other names cannot poison anything.
"""

from __future__ import annotations

import ipaddress
import struct

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.rrset
import msgspec

from dsecd.resolver.reserved import Address

PAYLOAD = 1232  # bytes of a datagram, which is never fragmented then (DNS flag day 2020)
RESPONSE_MOST = 8192  # bytes of an upstream's response: parsing 64 KiB would hold up the daemon
ADDRESSES_MOST = 32  # of an answer
CHAIN_MOST = 12  # aliases of an answer
HEADER = 12  # bytes


class BadAnswer(Exception):
    """An upstream's response that is not believed; the text says why.

    `rcode` is set when all that is wrong with it is that the upstream reports a failure.
    """

    def __init__(self, reason: str, rcode: dns.rcode.Rcode | None = None) -> None:
        super().__init__(reason)
        self.rcode = rcode


class Truncated(Exception):
    """The response did not fit into a datagram: ask over TCP."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about (name, type): NXDOMAIN, SERVFAIL, or addresses, maybe none.

    `chain` are the names from the first alias' target to the owner of the addresses.
    """

    rcode: dns.rcode.Rcode
    ttl_s: float
    chain: tuple[dns.name.Name, ...] = ()
    addresses: tuple[Address, ...] = ()


def make_query(name: dns.name.Name, rdtype: int, identity: int, *, edns: bool) -> bytes:
    """Return the wire form of a query to an upstream; the case of `name` is kept."""
    message = dns.message.make_query(name, dns.rdatatype.RdataType.make(rdtype))
    message.id = identity
    if edns:
        message.use_edns(0, payload=PAYLOAD)
    return message.to_wire()


def echoes(wire: bytes, identity: int) -> bool:
    """Return whether `wire` claims to be the response to the query `identity`."""
    return len(wire) >= HEADER and struct.unpack_from("!H", wire)[0] == identity


def read_answer(wire: bytes, asked: dns.name.Name, rdtype: int) -> Answer:
    """Return what the response says of `asked`. Raises `BadAnswer`, `Truncated`.

    The question has to be the one asked to the letter case, which is random.
    """
    if len(wire) > RESPONSE_MOST:
        raise BadAnswer(f"{len(wire)} bytes are no answer about addresses")
    try:
        message = dns.message.from_wire(wire)
    except Exception as error:  # whatever a parser may raise on hostile bytes
        raise BadAnswer(f"malformed: {error}") from error
    if not message.flags & dns.flags.QR or message.opcode() != 0 or len(message.question) != 1:
        raise BadAnswer("not a response to a query")
    question = message.question[0]
    same = question.name.labels == asked.labels and question.rdclass == dns.rdataclass.IN
    if not same or question.rdtype != rdtype:
        raise BadAnswer("the response answers another question")
    if message.flags & dns.flags.TC:
        raise Truncated
    if message.rcode() not in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
        rcode = message.rcode()
        raise BadAnswer(f"the upstream says {dns.rcode.to_text(rcode)}", rcode)
    return _follow(message, asked, rdtype)


def _follow(message: dns.message.Message, asked: dns.name.Name, rdtype: int) -> Answer:
    """Return the addresses at the end of the chain of aliases that starts at `asked`."""
    aliases: dict[dns.name.Name, dns.rrset.RRset] = {}
    found: dict[dns.name.Name, dns.rrset.RRset] = {}
    for rrset in message.answer:
        if rrset.rdclass == dns.rdataclass.IN and rrset.rdtype == dns.rdatatype.CNAME:
            aliases[rrset.name] = rrset
        elif rrset.rdclass == dns.rdataclass.IN and rrset.rdtype == rdtype:
            found[rrset.name] = rrset
    owner, ttls = asked, []
    chain: list[dns.name.Name] = []
    while owner not in found and owner in aliases:
        alias = aliases[owner]
        if len(chain) == CHAIN_MOST:
            raise BadAnswer("its aliases loop or go on for too long")
        owner = alias[0].target
        chain.append(owner)
        ttls.append(alias.ttl)
    if message.rcode() == dns.rcode.NOERROR and owner in found:
        records = found[owner]
        addresses = tuple(ipaddress.ip_address(record.address) for record in records)
        return Answer(
            rcode=dns.rcode.NOERROR,
            ttl_s=min(*ttls, records.ttl) if ttls else records.ttl,
            chain=tuple(chain),
            addresses=addresses[:ADDRESSES_MOST],
        )
    return Answer(rcode=message.rcode(), ttl_s=_negative_ttl(message), chain=tuple(chain))


def _negative_ttl(message: dns.message.Message) -> float:
    """Return how long the absence may be believed (RFC 2308); 0 when the response does not say."""
    soas = [rrset for rrset in message.authority if rrset.rdtype == dns.rdatatype.SOA]
    return float(min((min(soa.ttl, soa[0].minimum) for soa in soas), default=0))
