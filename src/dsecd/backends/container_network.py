"""What containers reach: their links to the world, the policies in force on them, their names.

A container with a network gets a link (`host.network`). What it may be used for is decided in the
kernel, by programs on the parent of all containers' cgroups and on the link (`host.netpolicy`): of
a container that was not bound yet nothing passes, so it is bound when its cgroup is there, after
its init started and before anything of the caller's can. One whose creator gave no rules is bound
to a policy that allows all; the host's firewall still keeps it from the host and its neighbours.

Programs, bindings and opened addresses are pinned and outlive the daemon; its resolver does not:
while it is away, connections go on and names are not answered.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import time
from pathlib import Path

import msgspec

from dsecd.backends.abc import GuestNetwork, Listener
from dsecd.backends.container_holding import Holding
from dsecd.backends.container_names import KernelSink, Names, resolv_conf
from dsecd.backends.container_relays import Relays
from dsecd.backends.spec import Spec
from dsecd.config import Config
from dsecd.host import addresses, bpf, netpolicy, network_veth, probe, sockdiag
from dsecd.host.cgroup import TreeDriver
from dsecd.host.netns import NetnsPool
from dsecd.host.netpolicy import Access, NetworkPolicies
from dsecd.host.nettable import Denied, IpAddress
from dsecd.host.network import Attachment, Nat
from dsecd.host.network_plane import DEFAULT_BLOCKED
from dsecd.policy.mechanisms import NEEDS
from dsecd.policy.rules import NetPolicy, opens_dns
from dsecd.policy.table import compile_table
from dsecd.resolver.sandbox import Refusal
from dsecd.resolver.service import Resolver
from dsecd.resolver.upstream import upstreams
from libdsec.errors import Unsupported, WrongState
from libdsec.model import WriteArgs

logger = logging.getLogger("dsecd.container")
OPEN = NetPolicy(default="allow")
FORGET_S = 60.0  # between two looks at addresses that an earlier daemon's resolver had opened
CUT_AT_ONCE = 64  # connections: under a millisecond
_PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp"}


class Networks:
    """The networks of all containers of one daemon. Methods belong to one event loop."""

    _driver: TreeDriver

    def __init__(self, config: Config, netns: NetnsPool, nat: Nat) -> None:
        self._config, self._netns, self._nat = config, netns, nat
        self._pins = config.runtime / "bpf"
        self._parent = -1
        self._policies: NetworkPolicies | None = None
        self._resolver: Resolver | None = None
        self._listener: Listener | None = None
        self._relays = Relays(netns, self._tell)
        self._bound: dict[int, Holding] = {}  # by the id of their cgroups
        self._inherited: dict[int, list[tuple[IpAddress, netpolicy.Opening]]] = {}
        self._forgetting: asyncio.Task[None] | None = None

    # --- start and end --------------------------------------------------------------------------

    def start(self, driver: TreeDriver) -> None:
        """Load the programs, or take over those of the daemon before.

        Living containers are recovered before `begin`. Where the kernel enforces no rules, a
        container that has some is closed.
        """
        if not probe.has(NEEDS["bpf_cgroup"]):
            return
        bpf.ensure_bpf_fs(self._pins)
        self._driver = driver
        self._parent = driver.files.open_directory(driver.tree.parent)
        level = netpolicy.sandbox_level(Path(driver.tree.parent))
        self._policies = NetworkPolicies(self._parent, level=level, pins=self._pins)
        self._resolver = self._make_resolver()

    def _make_resolver(self) -> Resolver:
        network = self._config.network
        servers = network.resolvers or tuple(addresses.daemon_resolvers())
        refused = (network.pool4, network.pool6, *DEFAULT_BLOCKED)
        return Resolver(
            upstreams(servers), refused=[ipaddress.ip_network(text) for text in refused]
        )

    async def begin(self, listener: Listener | None) -> None:
        """All living containers are bound: enforce, and listen to what is denied."""
        if self._policies is None:
            return
        self._listener = listener
        for holding in self._bound.values():
            if holding.policy is not None and holding.attachment is not None:
                await self._nat.judge(holding.attachment, self._policies.link_program)
        self._policies.start()
        asyncio.get_running_loop().add_reader(self._policies.event_fd, self._hear)
        if self._inherited:
            self._forgetting = asyncio.create_task(self._forget_inherited())

    async def close(self, *, leave_nothing: bool) -> None:
        """Let go; containers that live on keep their links, policies and open addresses."""
        for holding in self._bound.values():
            await self._relays.close(holding)
            if holding.names is not None:
                await holding.names.close(leave=True)
        self._bound.clear()
        if self._forgetting is not None:
            self._forgetting.cancel()
            await asyncio.gather(self._forgetting, return_exceptions=True)
        if self._resolver is not None:
            await self._resolver.close()
        if self._policies is not None:
            asyncio.get_running_loop().remove_reader(self._policies.event_fd)
            self._policies.close(remove=leave_nothing)
            os.close(self._parent)
        if leave_nothing:
            bpf.remove_bpf_fs(self._pins)

    # --- one container --------------------------------------------------------------------------

    async def connect(self, holding: Holding, spec: Spec) -> None:
        """Give a container its network namespace and its link; nothing passes before `judge`."""
        holding.netns = await self._netns.acquire()
        policy = spec.policy.net if spec.policy is not None else None
        if spec.network == "none" or (policy is not None and self._policies is None):
            return
        program = self._policies.link_program if policy is not None and self._policies else None
        owner = None
        if spec.tap_user is not None:
            assert holding.range is not None
            owner = holding.range.uid_base + spec.tap_user
        holding.attachment = await self._nat.attach(holding.netns, holding.sandbox, program, owner)
        if policy is not None:
            holding.policy = policy
            await self._open_names(holding)
            await self._relays.open(holding, policy)

    async def _open_names(self, holding: Holding, *, taken_over: bool = False) -> None:
        """Bind the resolver's sockets inside, and have them named in resolv.conf."""
        attachment, netns = holding.attachment, holding.netns
        assert attachment is not None
        assert netns is not None

        def open_inside() -> None:
            holding.names = Names(attachment, taken_over=taken_over)

        await self._netns.run_inside(netns, open_inside)
        holding.attachment = msgspec.structs.replace(
            attachment, resolv_conf=resolv_conf(attachment)
        )

    def judge(self, holding: Holding) -> None:
        """Put the policy of a container in force whose cgroup is there. Raises `Exhausted`."""
        if self._policies is None or holding.attachment is None or holding.cgroup is None:
            return
        holding.cgroup_id = number = self._driver.identify(holding.cgroup)
        self._bound[number] = holding
        kept = self._policies.earlier_openings(number)
        self._policies.bind(number, _access(holding), kept)
        if kept:
            self._inherited[number] = kept
        if holding.policy is not None:
            self._policies.bind_link(number, holding.attachment.index)
            self._serve(holding, holding.policy)

    def _serve(self, holding: Holding, policy: NetPolicy) -> None:
        """Answer the container's questions for names from now on."""
        names = holding.names
        assert self._policies is not None
        assert self._resolver is not None
        assert names is not None

        def refused(refusal: Refusal) -> None:
            detail = {"where": "name", "name": refusal.name, "type": refusal.rdtype}
            self._tell(holding, detail | {"reason": refusal.reason}, refusal.unreported)

        sink = KernelSink(self._policies, holding.cgroup_id, names)
        overrides = {name: ipaddress.ip_address(own) for name, own in holding.overrides.items()}
        names.serve(
            self._resolver.open(
                policy,
                sink,
                names.sockets,
                on_refusal=refused,
                overrides=overrides,
                relay=holding.relay,
            )
        )

    async def recover(self, holding: Holding) -> None:
        """Take over a living container, whose other fields are known: bind what was in force.

        Raises `Unsupported` when rules can no longer be enforced: then it must end.
        """
        if holding.policy is not None:
            if self._policies is None:
                raise Unsupported("this host no longer enforces network rules; see dsec check")
            await self._open_names(holding, taken_over=True)
            await self._relays.open(holding, holding.policy, taken_over=True)
        self.judge(holding)

    async def disconnect(self, holding: Holding, *, clean: bool) -> None:
        """Take everything back, whose processes are gone; what is gone already is fine."""
        await self._relays.close(holding)
        if holding.names is not None:
            await holding.names.close()
            holding.names = None
        if holding.cgroup_id:
            assert self._policies is not None
            self._policies.unbind(holding.cgroup_id)
            self._bound.pop(holding.cgroup_id, None)
            self._inherited.pop(holding.cgroup_id, None)
            holding.cgroup_id = 0
        if holding.attachment is not None:
            await self._nat.detach(holding.attachment)
            holding.attachment = None
            clean = False  # not looked at since its interface went
        if holding.netns is not None:
            self._netns.release(holding.netns, clean)
            holding.netns = None

    async def addresses(self, name: str, *, private: bool) -> list[IpAddress]:
        """Return what the host's resolvers say of a name, less what no name may lead to."""
        return [] if self._resolver is None else await self._resolver.find(name, private=private)

    # --- another policy -------------------------------------------------------------------------

    async def update(self, holding: Holding, policy: NetPolicy) -> None:
        """Put another policy in force. A failure leaves the former one. Raises `WrongState`."""
        if self._policies is None or holding.attachment is None or not holding.cgroup_id:
            raise WrongState(
                f"sandbox {holding.sandbox} was created without a network, so no rules can open "
                'one; create it with network="nat" and rules that close it'
            )
        before = holding.policy
        await self._relays.open(holding, policy)
        try:
            if before is None:
                await self._begin_to_judge(holding, policy)
            else:
                try:
                    self._replace(holding, policy)
                except BaseException:
                    self._replace(holding, before)
                    raise
        finally:
            await self._relays.follow(holding)
        await self._cut(holding)

    def _replace(self, holding: Holding, policy: NetPolicy) -> None:
        assert self._policies is not None
        names, number = holding.names, holding.cgroup_id
        assert names is not None
        assert names.served is not None
        holding.policy = policy
        # what an earlier daemon's resolver opened has no name any more to be judged by
        kept = [pair for pair in self._policies.openings(number) if pair[1].name]
        self._inherited.pop(number, None)
        self._policies.bind(number, _access(holding), kept)
        names.served.resolver.replace(policy, holding.relay)

    async def _begin_to_judge(self, holding: Holding, policy: NetPolicy) -> None:
        """Give a container its first rules: until now it reached what the host does."""
        assert self._policies is not None
        attachment = holding.attachment
        assert attachment is not None
        assert holding.channel is not None
        if holding.names is None:
            await self._open_names(holding)
        self._policies.bind_link(holding.cgroup_id, attachment.index)
        await self._nat.judge(attachment, self._policies.link_program)
        text = resolv_conf(attachment).encode()
        arguments = WriteArgs(path=b"/etc/resolv.conf", user="root", data=text)
        raw = msgspec.Raw(msgspec.msgpack.encode(arguments))
        await holding.channel.call("files.write", raw)
        holding.policy = policy
        try:
            self._policies.bind(holding.cgroup_id, _access(holding))
            self._serve(holding, policy)
        except BaseException:
            holding.policy = None
            self._policies.bind(holding.cgroup_id, _access(holding))
            raise

    async def _cut(self, holding: Holding) -> None:
        """Close the connections that are no longer allowed. Their packets are dropped already.

        Some at a time: a container may have thousands, and the others wait for none of them.
        """
        policies, names, number = self._policies, holding.names, holding.cgroup_id
        assert policies is not None
        assert names is not None
        assert names.diag is not None
        found = sockdiag.connected(names.diag)
        for start in range(0, len(found), CUT_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            if names.diag is None:  # it ends
                return
            some = found[start : start + CUT_AT_ONCE]
            sockdiag.cut(names.diag, some, lambda *remote: policies.allows(number, *remote))

    # --- what happens by itself -----------------------------------------------------------------

    def _hear(self) -> None:
        """Pass on what the kernel denied since the last time."""
        assert self._policies is not None
        for event in self._policies.events():
            holding = self._bound.get(event.cgroup)
            if holding is not None:
                self._tell(holding, _described(event))

    def _tell(self, holding: Holding, detail: dict[str, str], unreported: int = 0) -> None:
        if unreported:
            detail["unreported"] = str(unreported)
        if self._listener is not None:
            self._listener.denied(holding.sandbox, detail)

    def denied(self, holding: Holding) -> int:
        """Return how many calls, packets and sockets of a container were denied so far."""
        if self._policies is None or not holding.cgroup_id:
            return 0
        counts = self._policies.counters(holding.cgroup_id)
        return counts.denied_calls + counts.denied_packets + counts.denied_sockets

    async def _forget_inherited(self) -> None:
        """Close what the resolver of an earlier daemon had opened when it is over: no new call is
        let through by then, and no connection is left."""
        while self._inherited:
            await asyncio.sleep(FORGET_S)
            for number in list(self._inherited):
                try:
                    self._forget_idle(number)
                except OSError as error:
                    logger.warning("cannot list connections: %s", error)

    def _forget_idle(self, number: int) -> None:
        """Close those of one container that are over. Raises `OSError`."""
        names = self._bound[number].names
        assert self._policies is not None
        if names is None or names.diag is None:
            return
        busy, now, left = names.peers(), time.monotonic_ns(), []
        for address, opening in self._inherited.pop(number):
            if opening.until_ns > now or address in busy:
                left.append((address, opening))
            else:
                self._policies.forget(number, address, opening.name)
        if left:
            self._inherited[number] = left


def _access(holding: Holding) -> Access:
    """Return what binds a container: a policy of its own, or all that the firewall leaves."""
    attachment, policy = holding.attachment, holding.policy
    assert attachment is not None
    own = tuple(
        ipaddress.ip_address(text) for text in (attachment.address, attachment.address6) if text
    )
    if policy is None:
        return Access(table=compile_table(OPEN), dns_only=False, own=own, raw=True)
    return Access(table=compile_table(policy), dns_only=not opens_dns(policy), own=own)


def guest_network(attachment: Attachment | None) -> GuestNetwork | None:
    """Return the network of the guest inside, if there is to be one."""
    if attachment is None or not attachment.guest:
        return None
    gateways = tuple(filter(None, (attachment.gateway, attachment.gateway6)))
    mac = network_veth.TAP_MAC.hex(":")
    return GuestNetwork(
        addresses=(
            f"{attachment.address}/32",
            *([f"{attachment.address6}/128"] if attachment.address6 else []),
        ),
        gateways=gateways,
        neighbours=tuple((gateway, mac) for gateway in gateways),
        mtu=attachment.mtu,
        resolv_conf=attachment.resolv_conf,
    )


def _described(event: Denied) -> dict[str, str]:
    """Return the detail of an event: what was tried, and where it was stopped."""
    number = event.protocol
    protocol = _PROTOCOLS.get(number, str(number))
    detail = {"where": event.where, "protocol": protocol}
    if not event.address.is_unspecified:
        detail["address"] = str(event.address)
    if protocol in ("tcp", "udp"):
        detail["port"] = str(event.port)
    return detail
