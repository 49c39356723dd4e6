"""`network="nat"` and its host: recovery, other firewalls and daemons, and what the probe says."""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
from pathlib import Path

import pytest

from dsecd.host import network_survey
from dsecd.host.netns import Netns
from dsecd.host.network import Attachment, Nat
from tests.system.network_lab import (
    ANY,
    INTERNET,
    QUICK_S,
    UPLINK,
    Lab,
    command,
    config,
    connect,
    cut_off,
    in_namespace,
    lab,
    listen,
    nat,
    reaches,
    sandbox,
    write,
)

__all__ = ["lab", "nat"]

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


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
        server.accept()[0] as peer,
        connect(dead_ns.fd, INTERNET[4], 80),
    ):
        await crash(before)
        command(lab.host, "ip", "link", "delete", lost.ifname)
        after = Nat(config(tmp_path), netns_fd=lab.host)
        assert await after.recover([("kept", kept), ("lost", lost)]) == ["lost"]
        assert lab.link_names() == lab.links | {kept.ifname}
        assert dead.address not in lab.rules() + lab.connections()
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
    """Counted in turns of the loop, for a busy host delays whatever is timed."""
    await sandbox(lab, nat, "warm")
    namespaces = [lab.namespace() for _ in range(50)]
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    turning = asyncio.create_task(turn())
    attached: list[Attachment] = []
    attaching: list[int] = []
    detaching: list[int] = []
    for number, ns in enumerate(namespaces):
        before = turns
        attached.append(await nat.attach(ns, f"s{number}"))
        attaching.append(turns - before)
    for attachment in attached[:15]:
        before = turns
        await nat.detach(attachment)
        detaching.append(turns - before)
    await asyncio.gather(*(nat.detach(a) for a in attached[15:]))
    turning.cancel()
    # a loop that does the work itself comes round a few times, to begin and to end it
    assert statistics.median(attaching) > 15, attaching
    assert statistics.median(detaching) > 15, detaching


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
