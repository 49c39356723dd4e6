"""Every attempt of `network_attempts` against a policy, and without one to see that it is real.

What counts is what arrives in the world, read from the wire: a call that reports an error and sends
its packet all the same has got through. Attempts that end inside the sandbox count by outcome.
Only attempts whose tests were selected are made. The guest makes them, too: its kernel has the
security modules, and is another.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from libdsec import DSecClient, DSecContainerRunArgs
from tests.security.conftest import LIMITS
from tests.security.network_wire import ATTEMPTS, POLICY, Ran, Wire, attempts, selected
from tests.system.compat.debian import SMALL, build, lend
from tests.system.daemon import daemon
from tests.system.world_lab import World, world

pytestmark = [
    pytest.mark.root,
    pytest.mark.vm,
    pytest.mark.needs("bpf_cgroup", "bpf_fs", "veth", "nftables"),
    pytest.mark.asyncio(loop_scope="module"),
]
_PATIENCE = float(os.environ.get("DSEC_TEST_PATIENCE", "1"))  # slow guests
# Refused by the platform or the kernel in every sandbox, with rules or without: why
REFUSED = {
    "tcp_from_another_address": "what leaves with a foreign source is dropped by the firewall",
    "tcp_transparent": "needs a capability over the namespace, which the host owns",
    "tcp_with_a_mark": "needs a capability over the namespace, which the host owns",
    "tcp_by_a_source_route": "kernels drop what is source routed",
    "sctp_connect": "no module is loaded for a sandbox", "sctp_datagram": "the same",
    "dccp_connect": "the same", "udp_encapsulating": "the host's firewall passes no such packet",
    "udplite_sendto": "the firewall passes what it can masquerade",
    "udp_broadcast": "there is nobody on the link", "udp_multicast": "no multicast is routed",
    "udp_not_checked_for_errors": "there is no neighbour on the link but the gateway",
    "raw_icmp": "raw sockets need a capability over the namespace", "raw_ip": "the same",
    "raw_tunnel": "the same", "raw_gre": "the same", "raw6_with_extension_headers": "the same",
    "packet_socket": "the filter of calls knows no such family",
    "packet_socket_in_disguise": "the same", "xdp_socket": "the same",
    "vsock_to_the_host": "the same", "kernel_crypto_socket": "the same",
    "tunnel_device": "there is no such device", "device_node_of_a_tunnel": "no nodes are made",
    "connect_by_io_uring": "the filter of calls", "a_network_namespace_of_its_own": "the same",
    "a_user_and_network_namespace": "the same", "the_programs_by_bpf": "the same",
    "the_namespace_of_init": "init is of another user", "a_socket_of_init": "the same",
    "the_descriptors_of_init": "the same", "a_route_of_its_own": "the host owns the namespace",
    "an_interface_of_its_own": "the same", "closing_sockets_of_the_resolver": "the same",
    "the_pins_of_the_programs": "no such mount in a user namespace",
    "the_cgroup_of_another": "the same", "a_listener_that_answers": "nobody outside gets in",
    "the_metadata_service": "the host's firewall", "the_gateway": "it is nobody's address",
    "rebinding_to_the_metadata_service": "the host's firewall",
    "an_address_of_the_host": "the host's firewall",
    "loopback_of_the_host": "loopback is the sandbox's own",
}  # fmt: skip
# Attempts that succeed without a packet: by what they return
BY_OUTCOME = {
    "packet_socket_in_disguise", "xdp_socket", "vsock_to_the_host", "kernel_crypto_socket",
    "tunnel_device", "device_node_of_a_tunnel", "connect_by_io_uring",
    "a_network_namespace_of_its_own", "a_user_and_network_namespace", "the_namespace_of_init",
    "taking_the_place_of_the_resolver", "a_route_of_its_own", "an_interface_of_its_own",
    "closing_sockets_of_the_resolver",
    "the_programs_by_bpf", "the_pins_of_the_programs", "the_cgroup_of_another",
    "a_socket_of_init", "the_descriptors_of_init", "a_listener_that_answers",
    "an_address_of_the_host", "loopback_of_the_host", "the_gateway",
}  # fmt: skip


async def run(
    client: DSecClient,
    internet: World,
    wire: Wire,
    policy: dict[str, Any] | None,
    names: list[str],
) -> Ran:
    args = DSecContainerRunArgs(container_image=SMALL, network="nat", policy=policy, **LIMITS)
    sandbox = await client.run_container(args, timeout=60 * _PATIENCE)
    found = await attempts(sandbox, internet, wire, names, 110 * min(_PATIENCE, 5))
    await sandbox.stop()
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Ran, Ran]]:
    """The attempts with the policy and without one."""
    names = selected(request)
    layer = await build(SMALL)
    with world() as internet:
        internet.names = {
            "good.example": ["203.0.113.10"], "rebind.example": ["169.254.169.254"],
            "inside.example": ["10.99.0.1"],
        }  # fmt: skip
        internet.serve(80)
        internet.serve(80, 6)
        internet.serve(8100)
        wire = Wire(internet)
        async with daemon(base=False, netns=internet.host) as running:
            await lend(layer, running.state)
            async with DSecClient(f"unix:{running.socket}") as client:
                ruled = await run(client, internet, wire, POLICY, names)
                free = await run(client, internet, wire, None, names)
        wire.socket.close()
        yield ruled, free


async def test_there_are_as_many_attempts_as_promised() -> None:
    assert len(ATTEMPTS) >= 80
    assert set(REFUSED) <= set(ATTEMPTS)
    assert set(ATTEMPTS) >= BY_OUTCOME


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_attempt(both: tuple[Ran, Ran], name: str) -> None:
    ruled, free = both
    assert not ruled.succeeded(name, BY_OUTCOME), f"{name} got through: {ruled.outcomes[name]}"
    if name not in REFUSED:
        assert free.succeeded(name, BY_OUTCOME), f"{name} fails anyway: {free.outcomes[name]}"


async def test_nothing_else_left_the_sandbox(both: tuple[Ran, Ran]) -> None:
    """But for the names that are allowed and the one port that is open."""
    ruled, _ = both
    # neighbour discovery and multicast groups of the host itself
    beyond = {(a, p) for a, p in ruled.wire if not a.startswith(("type", "ff02:", "fe80:", "224."))}
    assert beyond <= {("192.0.2.53", 53), ("203.0.113.10", 80), ("2001:db8:1::1", 0)}
    assert ruled.asked <= {"good.example", "rebind.example", "inside.example"}
