"""A small world for network tests: an internet, a host and sandboxes, each a namespace of ours.

    internet 198.51.100.1, 2001:db8:1::1  <-veth->  198.51.100.2, 2001:db8:1::2 host
    lan 192.168.7.1 <-veth-> 192.168.7.2 host

Sockets belong to the namespace they were opened in, so one process plays all parts.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from dsec_bench.policy.world import command, in_namespace

from dsecd import fastpath
from dsecd.host import netns
from dsecd.host.netns import Netns
from dsecd.host.network import Attachment, Nat, NatConfig
from dsecd.host.network_veth import settle_carrier

INTERNET = {4: "198.51.100.1", 6: "2001:db8:1::1"}
UPLINK = {4: "198.51.100.2", 6: "2001:db8:1::2"}
ANY = {4: "0.0.0.0", 6: "::"}
METADATA = "169.254.169.254"
QUICK_S = 0.4  # long enough for a packet to arrive that must not
PATIENCE_S = 5.0  # for what must come, on a busy machine


def read(fd: int, path: str) -> str:
    def work() -> str:
        return Path(path).read_text().strip()

    return in_namespace(fd, work)


def write(fd: int, path: str, value: str) -> None:
    def work() -> None:
        Path(path).write_text(value)

    in_namespace(fd, work)


def family(version: int) -> socket.AddressFamily:
    return socket.AF_INET if version == 4 else socket.AF_INET6


def listen(fd: int, address: str, port: int, version: int = 4) -> socket.socket:
    """Return a TCP socket that listens in namespace `fd`."""

    def work() -> socket.socket:
        server = socket.socket(family(version), socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if version == 6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        server.bind((address, port))
        server.listen()
        server.settimeout(PATIENCE_S)
        return server

    return in_namespace(fd, work)


def datagrams(fd: int, address: str, port: int, version: int = 4) -> socket.socket:
    """Return a bound UDP socket of namespace `fd`."""

    def work() -> socket.socket:
        sock = socket.socket(family(version), socket.SOCK_DGRAM)
        sock.bind((address, port))
        sock.settimeout(PATIENCE_S)
        return sock

    return in_namespace(fd, work)


def connect(
    fd: int, address: str, port: int, version: int = 4, patience_s: float = PATIENCE_S
) -> socket.socket:
    """Return a TCP connection made from namespace `fd`; OSError when there is none in time."""

    def work() -> socket.socket:
        client = socket.socket(family(version), socket.SOCK_STREAM)
        client.settimeout(patience_s)
        try:
            client.connect((address, port))
        except OSError:
            client.close()
            raise
        return client

    return in_namespace(fd, work)


def reaches(
    fd: int, address: str, port: int, version: int = 4, patience_s: float = PATIENCE_S
) -> bool:
    try:
        connect(fd, address, port, version, patience_s).close()
    except OSError:
        return False
    return True


def cut_off(fd: int, address: str, port: int, version: int = 4) -> bool:
    """Whether no connection comes about in the time a packet needs."""
    return not reaches(fd, address, port, version, QUICK_S)


def _settle(name: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        settle_carrier(control.fileno(), name)


class Lab:
    """The namespaces, and what is left in the host's one."""

    def __init__(self) -> None:
        self.host = fastpath.make_netns()
        self.internet = fastpath.make_netns()
        self.lan = fastpath.make_netns()
        self._sandboxes: list[int] = []
        # a new namespace inherits these from the real host
        write(self.host, "/proc/sys/net/ipv4/ip_forward", "0")
        self._wire(self.internet, "wan0", 101, "198.51.100", "2001:db8:1")
        self._wire(self.lan, "lan0", 102, "192.168.7", "2001:db8:7")
        for version, uplink in INTERNET.items():
            command(self.host, "ip", f"-{version}", "route", "add", "default", "via", uplink)
        for version, gateway in ((4, "192.168.7.2"), (6, "2001:db8:7::2")):
            command(self.lan, "ip", f"-{version}", "route", "add", "default", "via", gateway)
        command(self.internet, "ip", "address", "add", f"{METADATA}/32", "dev", "lo")
        self.links = self.link_names()

    def _wire(self, other: int, name: str, index: int, net4: str, net6: str) -> None:
        """Join the host with `other`: .2 on the host, .1 at the far end.

        `index` must not be the peer's: linkwatch takes a device that is its own lower link for
        unimportant and lets its carrier wait for a second.
        """
        peer = ["peer", "name", "eth0", "netns", f"/proc/self/fd/{other}"]
        argv = ["nsenter", f"--net=/proc/self/fd/{self.host}", "ip", "link", "add", name]
        argv += ["index", str(index)]
        subprocess.run([*argv, "type", "veth", *peer], pass_fds=[self.host, other], check=True)
        for fd, dev, last in ((self.host, name, "2"), (other, "eth0", "1")):
            # without duplicate address detection the link-local address serves at once
            write(fd, f"/proc/sys/net/ipv6/conf/{dev}/accept_dad", "0")
            command(fd, "ip", "address", "add", f"{net4}.{last}/24", "dev", dev)
            command(fd, "ip", "address", "add", f"{net6}::{last}/64", "dev", dev, "nodad")
            command(fd, "ip", "link", "set", dev, "up")
        in_namespace(self.host, lambda: _settle(name))

    def namespace(self) -> netns.Netns:
        """A namespace for a sandbox."""
        fd = fastpath.make_netns()
        self._sandboxes.append(fd)
        return netns.Netns(fd)

    def link_names(self) -> set[str]:
        text = command(self.host, "ip", "-o", "link")
        return {line.split(": ")[1].split("@")[0] for line in text.splitlines()}

    def rules(self) -> str:
        return command(self.host, "nft", "list", "ruleset")

    def connections(self) -> str:
        return read(self.host, "/proc/thread-self/net/nf_conntrack")

    def assert_untouched(self) -> None:
        """Nothing of ours is in the host."""
        assert self.link_names() == self.links
        assert self.rules() == ""
        assert "10.213." not in self.connections()
        assert read(self.host, "/proc/sys/net/ipv4/ip_forward") == "0"
        assert read(self.host, "/proc/sys/net/ipv6/conf/all/forwarding") == "0"

    def close(self) -> None:
        for fd in (self.host, self.internet, self.lan, *self._sandboxes):
            os.close(fd)


@pytest.fixture
def lab() -> Iterator[Lab]:
    before = len(list(Path("/proc/self/fd").iterdir()))
    world = Lab()
    yield world
    world.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "a descriptor was left open"


def config(tmp_path: Path, **changes: object) -> NatConfig:
    fields: dict[str, object] = {"state": tmp_path / "forwarding.json", "quarantine_s": 0.0}
    return NatConfig(**(fields | changes))  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def nat(lab: Lab, tmp_path: Path) -> AsyncIterator[Nat]:
    network = Nat(config(tmp_path, resolvers=(UPLINK[4],)), netns_fd=lab.host)
    yield network
    for slot in list(network._live):
        await network.detach(attachment_of(network, slot))
    await network.shutdown()
    lab.assert_untouched()


def attachment_of(network: Nat, slot: int) -> Attachment:
    sandbox, entry = network._live[slot]
    return Attachment(
        sandbox=sandbox,
        slot=slot,
        index=entry.index,
        ifname=f"ds{slot}",
        address=str(entry.address),
        address6=str(entry.address6),
        gateway="",
        gateway6="",
        resolv_conf="",
    )


async def sandbox(lab: Lab, nat: Nat, name: str = "a-b-1-x") -> tuple[Netns, Attachment]:
    ns = lab.namespace()
    return ns, await nat.attach(ns, name)


def own_address(attachment: Attachment, version: int) -> str:
    return attachment.address if version == 4 else attachment.address6
