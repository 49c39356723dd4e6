"""An internet for a whole dsecd: the daemon runs in a network namespace that plays the host.

    world (every address is local)  198.51.100.1, 2001:db8:1::1  <-veth->  .2, ::2  host, dsecd

Servers are opened in the world; its DNS server, a real one of dnspython's messages, answers what
`World.names` says. Sandboxes have the names and addresses of an internet, and no packet leaves.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from dsecd import fastpath
from dsecd.host import netns
from tests.system.compat.debian import build, lend
from tests.system.daemon import Daemon, daemon
from tests.system.network_lab import INTERNET, UPLINK, command, datagrams, listen, write

RESOLVER = "192.0.2.53"  # the one that `daemon.Daemon` configures


class World:
    """The two namespaces, a DNS server, and TCP servers that say who called.

    `asked` are the names that the DNS server was asked for, those of other types than A and AAAA
    with their type: ``leak.example TXT``.
    """

    def __init__(self) -> None:
        self.host, self.world = fastpath.make_netns(), fastpath.make_netns()
        self.names: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self._closing, self._wake = os.pipe()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._connect()
        udp, tcp = datagrams(self.world, RESOLVER, 53), listen(self.world, RESOLVER, 53)
        self._sockets += [udp, tcp]
        self._run(lambda: self._resolve(udp, tcp))

    def _connect(self) -> None:
        home = netns.open_current()
        for fd in (self.host, self.world):
            netns.set_sysctls(fd, home)
            command(fd, "ip", "link", "set", "lo", "up")
        os.close(home)
        command(self.host, "ip", "link", "add", "up0", "type", "veth", "peer", "name", "w0",
                "netns", f"/proc/{os.getpid()}/fd/{self.world}")  # fmt: skip
        for fd, name, own in ((self.host, "up0", UPLINK), (self.world, "w0", INTERNET)):
            write(fd, f"/proc/sys/net/ipv6/conf/{name}/accept_dad", "0")
            command(fd, "ip", "addr", "add", f"{own[4]}/24", "dev", name)
            command(fd, "ip", "addr", "add", f"{own[6]}/64", "dev", name, "nodad")
            command(fd, "ip", "link", "set", name, "up")
        for version in (4, 6):
            via = INTERNET[version]
            command(self.host, "ip", f"-{version}", "route", "add", "default", "via", via)
            # in the main table: that of local addresses comes first, and would keep answers here
            command(self.world, "ip", f"-{version}", "route", "add", "local", "default",
                    "dev", "lo", "table", "main")  # fmt: skip

    def serve(self, port: int, version: int = 4) -> None:
        """Answer each connection to any address at `port` with that address and a line's echo."""
        server = listen(self.world, {4: "0.0.0.0", 6: "::"}[version], port, version)
        server.setblocking(False)
        self._sockets.append(server)
        self._run(lambda: self._echo(server))

    def close(self) -> None:
        os.write(self._wake, b"x")
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()
        for fd in (self._closing, self._wake, self.host, self.world):
            os.close(fd)

    def _run(self, work: object) -> None:
        thread = threading.Thread(target=work)  # type: ignore[arg-type]
        thread.start()
        self._threads.append(thread)

    def _resolve(self, udp: socket.socket, tcp: socket.socket) -> None:
        while True:
            ready, _, _ = select.select([udp, tcp, self._closing], [], [])
            if self._closing in ready:
                return
            if udp in ready:
                wire, peer = udp.recvfrom(4096)
                udp.sendto(self._answer(wire), peer)
            if tcp in ready:
                connection, _ = tcp.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(1)
                    answer = self._answer(connection.recv(4096)[2:])
                    connection.sendall(len(answer).to_bytes(2, "big") + answer)

    def _answer(self, wire: bytes) -> bytes:
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name = question.name.to_text().lower().rstrip(".")
        rdtype = dns.rdatatype.to_text(question.rdtype)
        kind = {"A": ".", "AAAA": ":"}.get(rdtype)
        self.asked.append(name if kind else f"{name} {rdtype}")
        reply = dns.message.make_response(query, recursion_available=True)
        if name not in self.names:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        found = [each for each in self.names.get(name, []) if kind and kind in each]
        if found:
            reply.answer.append(dns.rrset.from_text_list(question.name, 60, "IN", rdtype, found))
        return reply.to_wire()

    def _echo(self, server: socket.socket) -> None:
        clients: list[socket.socket] = []
        while True:
            ready, _, _ = select.select([server, self._closing, *clients], [], [])
            if self._closing in ready:
                break
            for sock in ready:
                if sock is server:
                    client, _ = server.accept()
                    clients.append(client)
                    with contextlib.suppress(OSError):
                        client.sendall(f"{client.getsockname()[0]}\n".encode())
                    continue
                with contextlib.suppress(OSError):
                    data = sock.recv(4096)  # type: ignore[union-attr]
                    if data:
                        sock.sendall(data)  # type: ignore[union-attr]
                        continue
                clients.remove(sock)  # type: ignore[arg-type]
                sock.close()  # type: ignore[union-attr]
        for client in clients:
            client.close()


@contextlib.contextmanager
def world() -> Iterator[World]:
    made = World()
    try:
        yield made
    finally:
        made.close()


def is_pinned(runtime: Path) -> bool:
    """Whether a daemon's network programs are pinned."""
    return any((runtime / "bpf").glob("*/at_connect4"))


@contextlib.asynccontextmanager
async def housed(internet: World, **sections: dict[str, object]) -> AsyncIterator[Daemon]:
    """A daemon with the Debian layer whose host has the world for its network."""
    layer = await build()
    async with daemon(base=False, netns=internet.host, **sections) as made:
        await lend(layer, made.state)
        yield made
