"""Bytes of netlink messages and the text of the firewall, without a kernel."""

from __future__ import annotations

import ipaddress
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsecd.host import conntrack, network_nft, network_veth, rtnetlink
from dsecd.host.network import Attachment, Nat
from dsecd.host.network_plane import NatConfig
from libdsec.errors import InvalidArgument

LINK = network_veth.Link(
    name="ds7",
    index=0x46410007,
    group=0x46410000,
    mtu=1400,
    alias="a-b-1-c",
    address=ipaddress.IPv4Address("10.213.0.7"),
    address6=ipaddress.IPv6Address("fd5d:ec::7"),
)


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 100), st.binary(max_size=40), max_size=8))
def test_attributes_survive_packing(fields: dict[int, bytes]) -> None:
    data = b"".join(rtnetlink.attr(kind, value) for kind, value in fields.items())
    assert len(data) % 4 == 0
    assert rtnetlink.attributes(data) == fields


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_broken_attributes_are_no_crash(data: bytes) -> None:
    rtnetlink.attributes(data)


def test_the_pair_is_described_as_the_kernel_expects() -> None:
    payload = network_veth.create(LINK, 42).payload
    fields = rtnetlink.attributes(payload, 16)
    info = rtnetlink.attributes(fields[network_veth.IFLA_LINKINFO])
    assert info[network_veth.IFLA_INFO_KIND] == b"veth"
    data = rtnetlink.attributes(info[network_veth.IFLA_INFO_DATA])
    peer = rtnetlink.attributes(data[network_veth.VETH_INFO_PEER], 16)
    assert peer[network_veth.IFLA_NET_NS_FD] == struct.pack("=I", 42)
    assert peer[network_veth.IFLA_IFNAME] == b"eth0\0"
    assert fields[network_veth.IFLA_GROUP] == struct.pack("=I", LINK.group)
    assert network_veth.parse(payload).name == "ds7"


def test_ipv4_only_hosts_get_no_ipv6_message() -> None:
    link = network_veth.Link(
        **{name: getattr(LINK, name) for name in LINK.__struct_fields__ if name != "address6"},
        address6=None,
    )
    for message in network_veth.host_end(link) + network_veth.inside_end(link):
        assert message.payload[0] != network_veth.AF_INET6
        assert "link-local" not in message.what


def rules(**changes: object) -> network_nft.Rules:
    fields: dict[str, object] = {
        "table": "dsec",
        "group": 7000,
        "pool4": ipaddress.IPv4Network("10.213.0.0/16"),
        "pool6": ipaddress.IPv6Network("fd5d:ec::/64"),
    }
    return network_nft.Rules(**(fields | changes))  # type: ignore[arg-type]


def test_other_traffic_is_dropped_only_where_the_host_was_no_router() -> None:
    assert "jump guard" not in network_nft.render(rules())
    text = network_nft.render(rules(guard=("ipv6",)))
    assert "meta nfproto ipv6 jump guard" in text
    assert "meta nfproto ipv4 jump" not in text


def test_rules_carry_the_sandboxes_of_a_recovery() -> None:
    entry = network_nft.Entry(77, LINK.address, LINK.address6)
    text = network_nft.render(rules(), [entry])
    assert "77 . 10.213.0.7 : 77" in text
    assert "77 . fd5d:ec::7 : 77" in text
    assert "masquerade" in network_nft.render(rules(pool6=None), [entry])
    assert "fd5d:ec::/64" not in network_nft.render(rules(pool6=None))


def test_both_groups_are_filtered_so_that_a_leaving_sandbox_is_not_free() -> None:
    text = network_nft.render(rules())
    assert text.count("iifgroup { 7000, 7001 }") == 3


def test_names_of_daemons_give_distinct_marks(tmp_path: Path) -> None:
    tags = {NatConfig(state=tmp_path, name=name).tag for name in ("dsec", "dsec-test-a", "b")}
    assert len(tags) == 3
    assert all(0x4000 <= tag < 0x8000 for tag in tags)


def test_interface_names_fit_in_fifteen_characters(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        Nat(NatConfig(state=tmp_path, prefix="dsec-test-xyz"))


def test_an_attachment_is_plain_data() -> None:
    attachment = Attachment(
        sandbox="s",
        slot=1,
        index=2,
        ifname="ds1",
        address="10.213.0.1",
        address6="",
        gateway="169.254.1.1",
        gateway6="",
        resolv_conf="",
    )
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(attachment), type=Attachment)
    assert again == attachment


def test_a_guest_has_the_addresses_and_its_namespace_only_that_of_the_resolver() -> None:
    messages = network_veth.guest_end(LINK, 9)
    added = [message for message in messages if message.kind == network_veth.RTM_NEWADDR]
    (fields,) = (rtnetlink.attributes(message.payload, 8) for message in added)
    assert fields[network_veth.IFA_LOCAL] == network_veth.RESOLVER.packed
    neighbours = {
        (message.payload[4], rtnetlink.attributes(message.payload, 12)[network_veth.NDA_DST])
        for message in messages
        if message.kind == network_veth.RTM_NEWNEIGH
    }
    assert LINK.address6 is not None
    assert neighbours == {
        (network_veth.INSIDE_INDEX, network_veth.GATEWAY.packed),
        (network_veth.INSIDE_INDEX, network_veth.GATEWAY6.packed),
        (9, LINK.address.packed),
        (9, LINK.address6.packed),
    }


def test_a_tracked_connection_says_where_it_goes() -> None:
    def tuple_of(kind: int, ip: bytes) -> bytes:
        return rtnetlink.nest(kind, rtnetlink.nest(1, ip))

    source, target = ipaddress.ip_address("10.213.0.7"), ipaddress.ip_address("203.0.113.10")
    there = tuple_of(1, rtnetlink.attr(1, source.packed) + rtnetlink.attr(2, target.packed))
    back = tuple_of(2, rtnetlink.attr(1, target.packed) + rtnetlink.attr(2, source.packed))
    assert conntrack.parse(bytes(4) + there + back) == [target]
    target6 = ipaddress.ip_address("2600:db8::10")
    six = tuple_of(1, rtnetlink.attr(3, bytes(16)) + rtnetlink.attr(4, target6.packed))
    assert conntrack.parse(bytes(4) + six) == [target6]
    assert conntrack.parse(bytes(4)) == []
