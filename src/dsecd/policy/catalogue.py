"""The catalogue: what the names of services in network rules stand for. Pure.

It is a TOML file that the operator may edit, one table per service:

    [pypi]
    title = "Python Package Index"
    hosts = ["pypi.org", "files.pythonhosted.org"]
    mirrors = ["pypi.example.org"]     # optional; treated like hosts
    networks = ["192.0.2.0/24"]        # optional; for what is reached by address
    ports = [443]                      # optional; 443 and 80 otherwise
    protocol = "tcp"                   # optional
    private = false                    # optional: the hosts may have addresses that are not global

`catalogue.toml` beside this module is the one that ships. A service of the operator's file takes
the place of the shipped one of the same name.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources

import msgspec

from dsecd.policy import targets
from dsecd.policy.rules import Protocol
from libdsec.errors import InvalidArgument

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


class Service(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One service: names and networks that belong together, with the ports they are used on."""

    title: str = ""
    hosts: list[str] = []
    mirrors: list[str] = []
    networks: list[str] = []
    ports: list[int | str] = msgspec.field(default_factory=lambda: list(targets.WEB_PORTS))
    protocol: Protocol = "tcp"
    private: bool = False


Catalogue = Mapping[str, Service]


def parse(text: str, origin: str = "catalogue") -> Catalogue:
    """Return the services in a TOML document. Raises `InvalidArgument` that names the service."""
    try:
        services = msgspec.convert(tomllib.loads(text), dict[str, Service])
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidArgument(f"{origin}: {error}", field=origin) from error
    for name, service in services.items():
        _check(service, name, f"{origin}.{name}")
    return services


def _check(service: Service, name: str, place: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{place}: a service's name is lower-case letters, digits, - and _", field=place
        )
    if not (service.hosts or service.mirrors or service.networks):
        raise InvalidArgument(f"{place}: give at least one of hosts and networks", field=place)
    for host in (*service.hosts, *service.mirrors):
        if host == "*":
            raise InvalidArgument(f"{place}: * is not a host; name the hosts", field=place)
        targets.domain(host, place)
    for network in service.networks:
        targets.network(network, place)
    targets.ports(service.ports, service.protocol, place)


@functools.cache
def shipped() -> Catalogue:
    """Return the catalogue that comes with DSec."""
    return parse(resources.files("dsecd.policy").joinpath("catalogue.toml").read_text("utf-8"))


def extended(text: str, origin: str = "catalogue") -> Catalogue:
    """Return the shipped catalogue with the services of the operator's file in front."""
    return {**shipped(), **parse(text, origin)}


def with_mirrors(catalogue: Catalogue, name: str, hosts: Iterable[str]) -> Catalogue:
    """Return `catalogue` with more hosts of a service: those that this host is set up to use."""
    service = catalogue[name]
    added = [host for host in hosts if host not in (*service.hosts, *service.mirrors)]
    service = msgspec.structs.replace(service, mirrors=[*service.mirrors, *added])
    _check(service, name, f"catalogue.{name}")
    return {**catalogue, name: service}
