"""`network="nat"` in namespaces of our own: what a sandbox reaches, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsecd.host import netns, network_survey
from dsecd.host.netns import Netns
from dsecd.host.network import Attachment, Nat, NatConfig
from tests.system.network_lab import (
    ANY,
    INTERNET,
    METADATA,
    QUICK_S,
    UPLINK,
    Lab,
    command,
    connect,
    cut_off,
    datagrams,
    family,
    in_namespace,
    lab,
    listen,
    reaches,
    write,
)

__all__ = ["lab"]

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
BOTH = pytest.mark.parametrize("version", [4, 6])


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


@BOTH
async def test_the_first_packet_is_not_lost(lab: Lab, nat: Nat, version: int) -> None:
    """Connecting took a second: the host's queue was not yet active, or the IPv6 address tentative
    (the kernel then sends from ::1, which is dropped)."""
    with listen(lab.internet, ANY[version], 80, version):
        assert reaches(lab.host, INTERNET[version], 80, version)  # the lab's own neighbours
        for number in range(20):
            ns, attachment = await sandbox(lab, nat, f"s{number}")
            started = time.monotonic()
            assert reaches(ns.fd, INTERNET[version], 80, version)
            assert time.monotonic() - started < 0.9, "as long as a retransmission takes"
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
            sock.settimeout(2)
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
        started = time.monotonic()
        assert cut_off(ns.fd, UPLINK[version], 22, version)
        assert time.monotonic() - started < QUICK_S / 2, "refused, not silently dropped"
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
    await asyncio.sleep(0.05)
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


# --- the host before and after ----------------------------------------------------------------


async def crash(nat: Nat) -> None:
    """Let go of everything as a killed daemon does, without cleaning up."""
    if nat._watching is not None:
        asyncio.get_running_loop().remove_reader(nat._watching)
    await nat._submit(lambda plane: plane.close())
    if nat._remover is not None:
        nat._remover.close()
    nat._thread.shutdown()
    nat._removal_thread.shutdown()


async def test_recovery_keeps_the_living_and_removes_the_rest(lab: Lab, tmp_path: Path) -> None:
    before = Nat(config(tmp_path), netns_fd=lab.host)
    kept_ns, kept = await sandbox(lab, before, "kept")
    dead_ns, dead = await sandbox(lab, before, "dead")
    _, lost = await sandbox(lab, before, "lost")
    with (
        listen(lab.internet, ANY[4], 80) as server,
        connect(kept_ns.fd, INTERNET[4], 80) as client,
        connect(dead_ns.fd, INTERNET[4], 80),
    ):
        peer, _ = server.accept()
        await crash(before)
        command(lab.host, "ip", "link", "delete", lost.ifname)
        after = Nat(config(tmp_path), netns_fd=lab.host)
        assert await after.recover([("kept", kept), ("lost", lost)]) == ["lost"]
        assert lab.link_names() == lab.links | {kept.ifname}
        assert dead.address not in lab.rules() + lab.connections()
        with peer:
            client.sendall(b"still here")
            assert peer.recv(100) == b"still here"
    assert reaches_again(lab, kept_ns)
    new = await after.attach(lab.namespace(), "new")
    assert new.address not in (kept.address, lost.address)
    for attachment in (kept, lost, new):
        await after.detach(attachment)
    await after.shutdown()
    lab.assert_untouched()


def reaches_again(lab: Lab, ns: Netns) -> bool:
    with listen(lab.internet, ANY[4], 81):
        return reaches(ns.fd, INTERNET[4], 81)


async def test_recovery_with_nobody_left_restores_the_host(lab: Lab, tmp_path: Path) -> None:
    before = Nat(config(tmp_path), netns_fd=lab.host)
    await sandbox(lab, before)
    await crash(before)
    after = Nat(config(tmp_path), netns_fd=lab.host)
    assert await after.recover([]) == []
    lab.assert_untouched()
    await after.shutdown()
    assert not (tmp_path / "forwarding.json").exists()


async def test_shutdown_with_live_sandboxes_keeps_their_network(lab: Lab, tmp_path: Path) -> None:
    nat = Nat(config(tmp_path), netns_fd=lab.host)
    ns, attachment = await sandbox(lab, nat)
    await nat.shutdown()
    assert reaches_again(lab, ns)
    after = Nat(config(tmp_path), netns_fd=lab.host)
    assert await after.recover([(attachment.sandbox, attachment)]) == []
    await after.detach(attachment)
    await after.shutdown()
    lab.assert_untouched()


async def test_router_advertisements_still_reach_the_host(lab: Lab, nat: Nat) -> None:
    path = "/proc/sys/net/ipv6/conf/wan0/accept_ra"
    write(lab.host, path, "1")
    _, attachment = await sandbox(lab, nat)
    assert command(lab.host, "cat", path) == "2\n"
    await nat.detach(attachment)
    await nat.shutdown()
    assert command(lab.host, "cat", path) == "1\n"


async def test_a_router_stays_a_router(lab: Lab, tmp_path: Path) -> None:
    write(lab.host, "/proc/sys/net/ipv4/ip_forward", "1")
    nat = Nat(config(tmp_path), netns_fd=lab.host)
    _, attachment = await sandbox(lab, nat)
    command(lab.internet, "ip", "route", "add", "192.168.7.1", "via", UPLINK[4])
    with listen(lab.internet, ANY[4], 80):
        assert reaches(lab.lan, INTERNET[4], 80)
    await nat.detach(attachment)
    await nat.shutdown()
    assert command(lab.host, "cat", "/proc/sys/net/ipv4/ip_forward") == "1\n"


async def test_a_pool_that_overlaps_a_route_is_refused(lab: Lab, tmp_path: Path) -> None:
    command(lab.host, "ip", "route", "add", "10.213.64.0/18", "via", INTERNET[4])
    nat = Nat(config(tmp_path), netns_fd=lab.host)
    with pytest.raises(Exception, match=r"overlap routes.*10\.213\.64\.0/18.*network\.pool4"):
        await nat.attach(lab.namespace(), "s")
    await nat.shutdown()
    lab.assert_untouched()


@pytest.mark.parametrize("patient", [True, False])
async def test_rules_that_somebody_flushed_come_back(lab: Lab, nat: Nat, patient: bool) -> None:
    one, _ = await sandbox(lab, nat, "one")
    two, target = await sandbox(lab, nat, "two")
    command(lab.host, "nft", "flush", "ruleset")
    if patient:
        for _ in range(500):
            await asyncio.sleep(0.01)
            if "from_sandbox" in lab.rules():
                break
        assert "from_sandbox" in lab.rules()
    else:
        await sandbox(lab, nat, "three")
    assert reaches_again(lab, one)
    with listen(two.fd, ANY[4], 80):
        assert cut_off(one.fd, target.address, 80)


async def test_rules_come_back_from_a_flush_during_their_repair(lab: Lab, nat: Nat) -> None:
    await sandbox(lab, nat)
    for _ in range(30):
        command(lab.host, "nft", "flush", "ruleset")
        await asyncio.sleep(0.003)
    for _ in range(500):
        if "from_sandbox" in lab.rules():
            break
        await asyncio.sleep(0.01)
    assert "from_sandbox" in lab.rules()


async def test_two_daemons_share_a_host(lab: Lab, nat: Nat, tmp_path: Path) -> None:
    other_config = config(
        tmp_path,
        state=tmp_path / "other.json",
        name="dsec-test-b",
        prefix="dt",
        pool4="10.214.0.0/24",
        pool6="fd5d:ed::/64",
    )
    other = Nat(other_config, netns_fd=lab.host)
    one, attachment = await sandbox(lab, nat, "one")
    two, foreign = await sandbox(lab, other, "two")
    with listen(two.fd, ANY[4], 80):
        assert cut_off(one.fd, foreign.address, 80)
    assert await nat.recover([("one", attachment)]) == []
    assert reaches_again(lab, two)
    assert reaches_again(lab, one)
    await other.detach(foreign)
    await other.shutdown()
    assert reaches_again(lab, one)


async def test_the_event_loop_is_not_blocked(lab: Lab, nat: Nat) -> None:
    await sandbox(lab, nat, "warm")
    namespaces = [lab.namespace() for _ in range(50)]
    delays: list[float] = []

    async def tick() -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            delays.append(time.perf_counter() - started - 0.001)

    ticker = asyncio.create_task(tick())
    attached = [await nat.attach(ns, f"s{i}") for i, ns in enumerate(namespaces)]
    await asyncio.gather(*(nat.detach(a) for a in attached))
    ticker.cancel()
    delays.sort()
    assert delays[len(delays) // 2] < 0.002


async def test_ipv4_only_host(lab: Lab, tmp_path: Path) -> None:
    write(lab.host, "/proc/sys/net/ipv6/conf/all/disable_ipv6", "1")
    nat = Nat(config(tmp_path), netns_fd=lab.host)
    ns, attachment = await sandbox(lab, nat)
    assert attachment.address6 == ""
    assert reaches_again(lab, ns)
    with pytest.raises(OSError, match="unreachable"):
        in_namespace(ns.fd, lambda: socket.create_connection((INTERNET[6], 80), QUICK_S))
    await nat.detach(attachment)
    await nat.shutdown()
    lab.assert_untouched()


# --- the probe --------------------------------------------------------------------------------


def test_check_tries_everything_and_gives_reasons(lab: Lab) -> None:
    rows = {row.name: row for row in in_namespace(lab.host, network_survey.check)}
    assert all(row.available != bool(row.reason) for row in rows.values())
    assert all(row.available for row in rows.values()), rows
    lab.assert_untouched()


def test_check_names_a_firewall_that_would_drop_everything(lab: Lab) -> None:
    command(lab.host, "nft", "add table ip filter")
    hook = "{ type filter hook forward priority 0; policy drop; }"
    command(lab.host, "nft", f"add chain ip filter FORWARD {hook}")
    rows = {row.name: row for row in in_namespace(lab.host, network_survey.check)}
    assert not rows["forwarding"].available
    assert "ip filter FORWARD" in rows["forwarding"].reason


def test_check_without_nft_says_what_to_install(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsecd.host.network_nft.shutil.which", lambda *_, **__: None)
    rows = {row.name: row for row in in_namespace(lab.host, network_survey.check)}
    assert rows["nftables nat"].reason == "nft is not installed"
    assert rows["veth"].available


async def test_a_host_without_nft_starts_and_stops(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsecd.host.network_nft.shutil.which", lambda *_, **__: None)
    nat = Nat(config(tmp_path), netns_fd=lab.host)
    assert await nat.recover([]) == []
    with pytest.raises(Exception, match="install the package nftables"):
        await nat.attach(lab.namespace(), "s")
    await nat.shutdown()
    lab.assert_untouched()
