"""The attempts on the network as root of a guest's kernel, which refuses nothing, and frames.

One microVM makes them all twice: without rules, to see that they are real, and with the policy.
What counts is what arrives in the world.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsecd.host.network_veth import finish_checksums
from libdsec import DSecClient, DSecMicroVMRunArgs
from tests.security.network_wire import ATTEMPTS, FRAMES, POLICY, Ran, Wire, attempts, selected
from tests.system.compat.debian import SMALL, build, lend
from tests.system.daemon import daemon
from tests.system.network_lab import in_namespace
from tests.system.world_lab import world

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.needs("bpf_cgroup", "bpf_fs", "veth", "nftables"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]
# Attempts that get nowhere with rules or without: why
REFUSED = {
    "tcp_from_another_address": "the guest's kernel has no route from it; frames come from any",
    "tcp_by_a_source_route": "kernels drop what is source routed",
    "frame_of_ip_options": "the same",
    "frame_of_a_routing_header": "the same",
    "mptcp_connect": "the guest's kernel has no such protocol; raw sockets send any",
    "sctp_connect": "the same", "sctp_datagram": "the same", "dccp_connect": "the same",
    "udp_encapsulating": "the same", "raw6_with_extension_headers": "the same",
    "ping": "for groups that its sysctl names; raw_icmp sends the same", "ping6": "the same",
    "udplite_sendto": "the firewall passes what it can masquerade",
    "udp_broadcast": "no broadcast is routed", "udp_multicast": "no multicast is routed",
    "packet_socket": "for no hardware address; frames are for the gateway's",
    "the_metadata_service": "the host's firewall", "rebinding_to_the_metadata_service": "the same",
    "an_address_of_the_host": "the host's firewall", "the_gateway": "it is nobody's address",
    "vsock_to_the_host": "the machine has no such device",
    "a_listener_that_answers": "nobody outside gets in",
    "frame_from_an_allowed_address": "the firewall drops a foreign source",
    "frame_from_another_sandbox": "the same", "frame_from_the_gateway": "the same",
    "frame_from_the_resolver": "the same", "frame_from_loopback": "the same",
    "frame_from_a_foreign_address_of_ipv6": "the same",
    "frame_of_a_machine_behind_the_guest": "the same",
    "frame_for_all_hardware": "only what is for its own hardware address is routed",
    "frame_for_the_hardware_of_the_host": "the same",
    "frame_of_a_vlan": "the tap is in none", "frame_of_the_wrong_protocol": "it is malformed",
    "frame_of_802_3": "only Ethernet's types are IP's",
    "frame_of_a_later_fragment": "the firewall waits for the first",
    "frames_of_fragments_that_overlap": "the firewall drops such a datagram",
}  # fmt: skip
# Attempts whose success, without a packet, would be one
BY_OUTCOME = {
    "vsock_to_the_host", "a_listener_that_answers", "an_address_of_the_host", "the_gateway",
}  # fmt: skip
# Attempts on what stands between a container's root and the kernel. In a guest the kernel is root's
# own, so they prove nothing; what they do must not reach the world.
OF_THE_GUEST = {
    "packet_socket_in_disguise", "tunnel_device", "device_node_of_a_tunnel", "xdp_socket",
    "kernel_crypto_socket", "connect_by_io_uring", "a_network_namespace_of_its_own",
    "a_user_and_network_namespace", "the_namespace_of_init", "a_route_of_its_own",
    "an_interface_of_its_own", "closing_sockets_of_the_resolver",
    "taking_the_place_of_the_resolver", "the_programs_by_bpf", "the_pins_of_the_programs",
    "the_cgroup_of_another", "a_socket_of_init", "the_descriptors_of_init", "loopback_of_the_host",
}  # fmt: skip


def end_checksums() -> None:
    """Have the world get packets as from a network card: a veth leaves checksums to its peer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        finish_checksums(control.fileno(), "up0")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(
    request: pytest.FixtureRequest, guest_kernel: Path
) -> AsyncIterator[tuple[Ran, Ran]]:
    """The attempts with the policy and without one."""
    names = selected(request)
    layer = await build(SMALL)
    with world() as internet:
        internet.names = {
            "good.example": ["203.0.113.10", "2600:db8::10"], "rebind.example": ["169.254.169.254"],
            "inside.example": ["10.99.0.1"],
        }  # fmt: skip
        internet.serve(80)
        internet.serve(80, 6)
        internet.serve(8100)
        in_namespace(internet.host, end_checksums)
        wire = Wire(internet)
        vm = {"enabled": "yes", "kernel": str(guest_kernel), "templates": 0}
        async with daemon(base=False, netns=internet.host, vm=vm) as running:
            await lend(layer, running.state)
            async with DSecClient(f"unix:{running.socket}") as client:
                args = DSecMicroVMRunArgs(
                    image=SMALL, memory_limit_mb=256, layers="block", network="nat"
                )
                guest = await client.run_microvm(args, timeout=120)
                free = await attempts(guest, internet, wire, names, 240)
                await guest.update_network(policy=POLICY)
                ruled = await attempts(guest, internet, wire, names, 240)
                await guest.stop()
        wire.socket.close()
        yield ruled, free


@pytest.mark.parametrize("name", [*ATTEMPTS, *FRAMES])
async def test_attempt(both: tuple[Ran, Ran], name: str) -> None:
    ruled, free = both
    if name.startswith("frame"):  # made, and not only meant
        assert {ruled.outcomes[name], free.outcomes[name]} <= {"sent", "ok"}
    assert not ruled.succeeded(name, BY_OUTCOME), f"{name} got through: {ruled.outcomes[name]}"
    if name not in REFUSED and name not in OF_THE_GUEST:
        assert free.succeeded(name, BY_OUTCOME), f"{name} fails anyway: {free.outcomes[name]}"


async def test_nothing_else_left_the_guest(both: tuple[Ran, Ran]) -> None:
    """But for the names that are allowed and the one port that is open."""
    ruled, _ = both
    # neighbour discovery and multicast groups of the host itself
    beyond = {(a, p) for a, p in ruled.wire if not a.startswith(("type", "ff02:", "fe80:", "224."))}
    open_ones = {("203.0.113.10", 80), ("2600:db8::10", 80)}
    assert beyond <= {("192.0.2.53", 53), ("2001:db8:1::1", 0), *open_ones}
    assert ruled.asked <= {"good.example", "rebind.example", "inside.example"}
