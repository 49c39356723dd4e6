"""Network rules of the language become `NetRule`s and `NameRule`s. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from dsecd.policy import targets
from dsecd.policy.catalogue import Catalogue, Service
from dsecd.policy.language import Network, NetworkRule
from dsecd.policy.lines import Line
from dsecd.policy.rules import NameRule, NetRule, Protocol, Verdict

EVERYWHERE = ("0.0.0.0/0", "::/0")
_PARTS: dict[Protocol, tuple[Protocol, ...]] = {"any": ("tcp", "udp", "icmp")}

Opening = tuple[Protocol, int, int]  # protocol, first and last port


def lines(network: Network, layer: str, catalogue: Catalogue) -> Iterator[Line]:
    """Yield a line for each entry of `services` and of `rules`; `layer` is the preset's name or "".

    Raises `InvalidArgument` that names the entry.
    """
    for target, allowed in network.services.items():
        place = f"network.services.{target}"
        rule = NetworkRule(allow=target) if allowed else NetworkRule(deny=target)
        yield _line(rule, place, layer, catalogue)
    for index, rule in enumerate(network.rules):
        yield _line(rule, f"network.rules[{index}]", layer, catalogue)


def _line(rule: NetworkRule, place: str, layer: str, catalogue: Catalogue) -> Line:
    if (rule.allow is None) == (rule.deny is None):
        targets.refuse(place, "give exactly one of allow and deny")
    verdict: Verdict = "deny" if rule.allow is None else "allow"
    target = rule.allow if rule.allow is not None else rule.deny
    assert target is not None
    if rule.private and verdict == "deny":
        targets.refuse(place, "private is for names that are allowed; leave it out")
    service = catalogue.get(target)
    if service is not None:
        if rule.ports or rule.protocol or rule.private:
            targets.refuse(
                place, f"{target} has ports and protocol in the catalogue; leave them out here"
            )
        nets, names = _service(service, verdict, place)
    else:
        nets, names = _target(target, rule, verdict, place, catalogue)
    return Line(
        place=place, layer=layer, verdict=verdict, text=target, nets=tuple(nets), names=tuple(names)
    )


def _service(
    service: Service, verdict: Verdict, place: str
) -> tuple[list[NetRule], list[NameRule]]:
    """Return the rules of a service: denied, all that its names and networks could be used for."""
    ports = targets.ports(service.ports, service.protocol, place)
    openings = _openings(verdict, service.protocol, ports) if verdict == "allow" else _ALL
    private = service.private and verdict == "allow"
    nets = [rule for text in service.networks for rule in _prefixes(text, verdict, openings, place)]
    names = [
        rule
        for host in (*service.hosts, *service.mirrors)
        for rule in _names(targets.domain(host, place), verdict, openings, private)
    ]
    return nets, names


_ALL: tuple[Opening, ...] = (("any", *targets.ALL_PORTS[0]),)


def _target(
    target: str, rule: NetworkRule, verdict: Verdict, place: str, catalogue: Catalogue
) -> tuple[list[NetRule], list[NameRule]]:
    ports = targets.ports(rule.ports, rule.protocol, place)
    wide = _openings("deny", rule.protocol, ports)  # nothing said means everything
    if target == "*":
        if rule.private:
            targets.refuse(place, "private is for domains; name those that may be private")
        nets = [new for text in EVERYWHERE for new in _prefixes(text, verdict, wide, place)]
        return nets, list(_names("*", verdict, wide, False))
    if targets.is_network(target):
        if rule.private:
            targets.refuse(place, "private is for domains; a network is allowed as it is written")
        return list(_prefixes(target, verdict, wide, place)), []
    if "." not in target:
        targets.refuse(place, f"unknown service {target!r}{_suggestion(target, catalogue)}")
    openings = _openings(verdict, rule.protocol, ports)
    return [], list(_names(targets.domain(target, place), verdict, openings, rule.private))


def _suggestion(target: str, catalogue: Catalogue) -> str:
    near = difflib.get_close_matches(target.lower(), catalogue, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return "; the catalogue has " + ", ".join(sorted(catalogue))


def _openings(
    verdict: Verdict, protocol: Protocol | None, ports: list[targets.PortRange]
) -> tuple[Opening, ...]:
    """Return protocols with ports. Whoever names ports means tcp and udp, be they all ports."""
    if verdict == "allow" and protocol != "icmp":
        ports = ports or targets.ports(targets.WEB_PORTS, "tcp", "")
        protocol = protocol or "tcp"
    if not ports:
        return ((protocol or "any", *targets.ALL_PORTS[0]),)
    parts: tuple[Protocol, ...] = ("tcp", "udp") if protocol in (None, "any") else (protocol,)
    return tuple((part, first, last) for part in parts for first, last in ports)


def _prefixes(
    text: str, verdict: Verdict, openings: tuple[Opening, ...], place: str
) -> Iterator[NetRule]:
    """Yield rules for a network; a denial reaches what translators and tunnels make of it."""
    prefix = targets.network(text, place)
    for each in (prefix, *(targets.embedded(prefix) if verdict == "deny" else ())):
        for protocol, first, last in openings:
            yield NetRule(
                verdict=verdict, protocol=protocol, prefix=each, first_port=first, last_port=last
            )


def _names(
    pattern: str, verdict: Verdict, openings: tuple[Opening, ...], private: bool
) -> Iterator[NameRule]:
    """Yield rules for a name; one that allows names its protocols."""
    for protocol, first, last in openings:
        parts = _PARTS.get(protocol, (protocol,)) if verdict == "allow" else (protocol,)
        for part in parts:
            yield NameRule(
                verdict=verdict, pattern=pattern, protocol=part, first_port=first, last_port=last,
                private=private,
            )  # fmt: skip
