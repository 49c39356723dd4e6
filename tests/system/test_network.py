"""`network="nat"` in namespaces of our own: what a sandbox reaches, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from dsecd.host import netns
from dsecd.host.network import Nat
from tests.system.daemon import until
from tests.system.network_lab import (
    ANY,
    INTERNET,
    METADATA,
    PATIENCE_S,
    QUICK_S,
    UPLINK,
    Lab,
    command,
    config,
    connect,
    cut_off,
    datagrams,
    family,
    in_namespace,
    lab,
    listen,
    nat,
    own_address,
    reaches,
    sandbox,
)

__all__ = ["lab", "nat"]

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
BOTH = pytest.mark.parametrize("version", [4, 6])


# --- what a sandbox reaches -------------------------------------------------------------------


@BOTH
async def test_the_world_is_reached_with_the_hosts_address(
    lab: Lab, nat: Nat, version: int
) -> None:
    ns, _ = await sandbox(lab, nat)
    with (
        listen(lab.internet, ANY[version], 80, version) as server,
        connect(ns.fd, INTERNET[version], 80, version) as client,
    ):
        peer, address = server.accept()
        with peer:
            assert address[0] == UPLINK[version]
            client.sendall(b"question")
            assert peer.recv(100) == b"question"
            peer.sendall(b"answer")
            assert client.recv(100) == b"answer"


def retransmitted(client: socket.socket) -> int:
    """Return how many segments went out again (tcpi_total_retrans of <linux/tcp.h>)."""
    return int.from_bytes(
        client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[100:], "little"
    )


@BOTH
async def test_the_first_packet_is_not_lost(lab: Lab, nat: Nat, version: int) -> None:
    """Connecting took a second: the host's queue was not yet active, or the IPv6 address tentative
    (the kernel then sends from ::1, which is dropped)."""
    with listen(lab.internet, ANY[version], 80, version):
        assert reaches(lab.host, INTERNET[version], 80, version)  # the lab's own neighbours
        for number in range(20):
            ns, attachment = await sandbox(lab, nat, f"s{number}")
            with connect(ns.fd, INTERNET[version], 80, version) as client:
                assert retransmitted(client) == 0
            await nat.detach(attachment)


@BOTH
async def test_datagrams_are_masqueraded_too(lab: Lab, nat: Nat, version: int) -> None:
    ns, _ = await sandbox(lab, nat)
    with (
        datagrams(lab.internet, ANY[version], 5353, version) as server,
        datagrams(ns.fd, ANY[version], 0, version) as client,
    ):
        client.sendto(b"question", (INTERNET[version], 5353))
        data, address = server.recvfrom(100)
        assert (data, address[0]) == (b"question", UPLINK[version])
        server.sendto(b"answer", address)
        assert client.recv(100) == b"answer"


@BOTH
async def test_ping_reaches_the_world(lab: Lab, nat: Nat, version: int) -> None:
    ns, _ = await sandbox(lab, nat)
    home = netns.open_current()
    await asyncio.to_thread(netns.set_sysctls, ns.fd, home)
    os.close(home)
    proto, request, answer = {4: (1, 8, 0), 6: (58, 128, 129)}[version]

    def ping() -> bytes:
        with socket.socket(family(version), socket.SOCK_DGRAM, proto) as sock:
            sock.settimeout(PATIENCE_S)
            sock.sendto(bytes([request, 0, 0, 0, 0, 1, 0, 1]), (INTERNET[version], 0))
            return sock.recv(100)

    assert in_namespace(ns.fd, ping)[0] == answer


@BOTH
async def test_sandboxes_do_not_reach_each_other(lab: Lab, nat: Nat, version: int) -> None:
    one, _ = await sandbox(lab, nat, "one")
    two, address = await sandbox(lab, nat, "two")
    with (
        listen(two.fd, ANY[version], 80, version),
        datagrams(two.fd, ANY[version], 81, version) as quiet,
        datagrams(one.fd, ANY[version], 0, version) as sender,
    ):
        target = own_address(address, version)
        assert cut_off(one.fd, target, 80, version)
        sender.sendto(b"hello", (target, 81))
        quiet.settimeout(QUICK_S)
        with pytest.raises(TimeoutError):
            quiet.recv(100)
        assert reaches(two.fd, target, 80, version)
        assert reaches(lab.host, target, 80, version), "the host itself may"


@BOTH
async def test_services_of_the_host_are_not_reached(lab: Lab, nat: Nat, version: int) -> None:
    ns, _ = await sandbox(lab, nat)
    with listen(lab.host, ANY[version], 22, version):
        assert reaches(lab.internet, UPLINK[version], 22, version)
        with pytest.raises(ConnectionRefusedError):  # not silently dropped
            connect(ns.fd, UPLINK[version], 22, version)
        lan = {4: "192.168.7.2", 6: "2001:db8:7::2"}[version]
        assert cut_off(ns.fd, lan, 22, version)


async def test_only_dns_of_a_resolver_on_the_host_is_reached(lab: Lab, nat: Nat) -> None:
    ns, attachment = await sandbox(lab, nat)
    assert f"nameserver {UPLINK[4]}\n" in attachment.resolv_conf
    with (
        datagrams(lab.host, UPLINK[4], 53) as server,
        datagrams(ns.fd, ANY[4], 0) as client,
        listen(lab.host, UPLINK[4], 53),
    ):
        client.sendto(b"name?", (UPLINK[4], 53))
        data, address = server.recvfrom(100)
        assert data == b"name?"
        server.sendto(b"address", address)
        assert client.recv(100) == b"address"
        assert reaches(ns.fd, UPLINK[4], 53)


async def test_cloud_metadata_is_not_reached(lab: Lab, nat: Nat) -> None:
    ns, _ = await sandbox(lab, nat)
    with listen(lab.internet, METADATA, 80):
        assert reaches(lab.host, METADATA, 80), "the host does reach it"
        assert cut_off(ns.fd, METADATA, 80)


@BOTH
async def test_the_world_does_not_reach_a_sandbox(lab: Lab, nat: Nat, version: int) -> None:
    ns, attachment = await sandbox(lab, nat)
    target = own_address(attachment, version)
    command(lab.internet, "ip", f"-{version}", "route", "add", target, "via", UPLINK[version])
    with listen(ns.fd, ANY[version], 80, version):
        assert cut_off(lab.internet, target, 80, version)


@BOTH
async def test_the_host_does_not_become_a_router_for_others(
    lab: Lab, nat: Nat, version: int
) -> None:
    await sandbox(lab, nat)
    far = {4: "192.168.7.1", 6: "2001:db8:7::1"}[version]
    command(lab.internet, "ip", f"-{version}", "route", "add", far, "via", UPLINK[version])
    with listen(lab.internet, ANY[version], 80, version):
        assert cut_off(lab.lan, INTERNET[version], 80, version)


@BOTH
async def test_forged_source_addresses_are_dropped(lab: Lab, nat: Nat, version: int) -> None:
    """IPV6_FREEBIND lets an unprivileged process send from any IPv6 address."""
    ns, _ = await sandbox(lab, nat, "forger")
    _, victim = await sandbox(lab, nat, "victim")
    address = own_address(victim, version)
    command(ns.fd, "ip", f"-{version}", "address", "add", address, "dev", "eth0")
    await until(lambda: "tentative" not in command(ns.fd, "ip", "address"))  # else: no such address
    with (
        datagrams(lab.internet, ANY[version], 99, version) as server,
        datagrams(ns.fd, address, 0, version) as client,
    ):
        client.sendto(b"from somebody else", (INTERNET[version], 99))
        server.settimeout(QUICK_S)
        with pytest.raises(TimeoutError):
            server.recv(100)


async def test_bytes_are_counted_from_the_sandboxes_side(lab: Lab, nat: Nat) -> None:
    ns, attachment = await sandbox(lab, nat)
    with (
        datagrams(lab.internet, ANY[4], 99) as server,
        datagrams(ns.fd, ANY[4], 0) as client,
    ):
        client.sendto(bytes(1000), (INTERNET[4], 99))
        server.recv(2000)
    traffic = (await nat.traffic([attachment]))[attachment.sandbox]
    assert 1000 < traffic.tx_bytes < 3000
    assert traffic.rx_bytes < 1000
    await nat.detach(attachment)
    assert await nat.traffic([attachment]) == {}


# --- what is left behind ----------------------------------------------------------------------


async def test_detach_leaves_nothing(lab: Lab, nat: Nat) -> None:
    ns, attachment = await sandbox(lab, nat)
    _, other = await sandbox(lab, nat, "other")
    with (
        listen(lab.internet, ANY[4], 80),
        connect(ns.fd, INTERNET[4], 80),
        datagrams(ns.fd, ANY[6], 0, 6) as client,
    ):
        client.sendto(b"x", (INTERNET[6], 9))
        assert lab.connections().count(attachment.address) == 1
        await nat.detach(attachment)
    assert lab.link_names() == lab.links | {other.ifname}
    assert attachment.address not in lab.connections()
    assert "fd5d" not in lab.connections()
    rules = lab.rules()
    assert attachment.address not in rules
    assert attachment.address6 not in rules
    assert other.address in rules
    assert "eth0" not in command(ns.fd, "ip", "link")
    await nat.detach(attachment)  # idempotent


async def test_many_detaches_at_once_leave_nothing(lab: Lab, nat: Nat) -> None:
    pairs = [await sandbox(lab, nat, f"s{i}") for i in range(70)]
    with datagrams(pairs[3][0].fd, ANY[4], 0) as client:
        client.sendto(b"x", (INTERNET[4], 9))
        await asyncio.gather(*(nat.detach(a) for _, a in pairs), nat.detach(pairs[0][1]))
    assert lab.link_names() == lab.links
    assert pairs[3][1].address not in lab.connections()
    assert nat.stats().attached == 0


async def test_a_burst_of_100_attaches_all_succeed(lab: Lab, nat: Nat) -> None:
    attached = await asyncio.gather(*(nat.attach(lab.namespace(), f"s{i}") for i in range(100)))
    assert len({a.address for a in attached}) == len({a.address6 for a in attached}) == 100
    assert len({a.ifname for a in attached}) == 100


async def test_create_that_fails_half_way_leaks_no_interface_or_address(
    lab: Lab, nat: Nat, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sandbox(lab, nat, "bystander")
    links, rules = lab.link_names(), lab.rules()
    plane = nat._plane
    assert plane is not None
    for target, name in ((plane, "_configure_inside"), (plane._firewall, "add")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, _refuse)
            with pytest.raises(Exception, match="No space left"):
                await sandbox(lab, nat, "unlucky")
        assert lab.link_names() == links
        assert lab.rules() == rules
        assert nat.stats().attached == 1
    ns = lab.namespace()
    command(ns.fd, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "x")
    with pytest.raises(Exception, match="create veth"):
        await nat.attach(ns, "collision")
    assert lab.link_names() == links
    assert nat.stats().failures == 3


def _refuse(*_: object) -> None:
    raise OSError(28, "No space left")


async def test_a_cancelled_attach_leaves_nothing(lab: Lab, nat: Nat) -> None:
    for delay_s in (0.0, 0.0005, 0.02):
        task = asyncio.create_task(nat.attach(lab.namespace(), "cancelled"))
        await asyncio.sleep(delay_s)
        task.cancel()
        try:
            attachment = await task
        except asyncio.CancelledError:
            pass
        else:
            await nat.detach(attachment)
        assert lab.link_names() == lab.links
        assert nat.stats().attached == 0


async def test_a_reused_address_meets_no_old_connection(lab: Lab, tmp_path: Path) -> None:
    nat = Nat(config(tmp_path, pool4="10.213.0.0/29"), netns_fd=lab.host)
    first = [await sandbox(lab, nat, f"old{i}") for i in range(6)]
    with datagrams(first[0][0].fd, ANY[4], 4000) as client:
        client.sendto(b"x", (INTERNET[4], 4000))
    for _, attachment in first:
        await nat.detach(attachment)
    second = [await sandbox(lab, nat, f"new{i}") for i in range(6)]
    assert [a.address for _, a in second] == [a.address for _, a in first], "oldest first"
    assert second[0][1].address not in lab.connections()
    await nat.detach(first[0][1])  # a stale second detach does not touch the new owner
    assert second[0][1].ifname in lab.link_names()
    for _, attachment in second:
        await nat.detach(attachment)
    await nat.shutdown()
    lab.assert_untouched()
