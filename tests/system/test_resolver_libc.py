"""The resolver as a sandbox meets it: sockets in a network namespace, asked by the C library."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import subprocess
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dns.message
import pytest

from dsecd.policy.rules import NameRule, NetPolicy
from dsecd.resolver import Resolver, SandboxResolver, bind
from dsecd.resolver.queries import Query
from tests.unit.resolver_upstream import FakeUpstream, address
from tests.unit.test_resolver_addresses import HTTPS, FakeSink

pytestmark = pytest.mark.root

CLONE_NEWNET = 0x40000000
POLICY = NetPolicy(
    names=(
        NameRule(
            verdict="allow", pattern="pypi.org", protocol="tcp", first_port=443, last_port=443
        ),
    )
)


class Inside:
    """A thread in a network namespace of its own; what it starts is there too.

    `asked` are the questions that came from there, those of retries again.
    """

    def __init__(self, resolv_conf: Path) -> None:
        self._resolv_conf = resolv_conf
        self.asked: list[str] = []
        self.thread = ThreadPoolExecutor(1)

    def enter(self) -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    def getent(self, *arguments: str) -> tuple[int, str, list[str]]:
        """Return exit code, output and questions of getent(1) with the sandbox's resolv.conf."""
        mount = 'mount --bind "$1" /etc/resolv.conf && shift && exec getent "$@"'
        self.asked.clear()
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", mount, "sh", str(self._resolv_conf), *arguments],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout, list(self.asked)

    async def run(self, function, *arguments):  # type: ignore[no-untyped-def]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, function, *arguments)

    def note(self, resolver: SandboxResolver) -> None:
        """Have what `resolver` is asked in `asked`."""
        answer_now = resolver.answer_now

        def noted(wire: bytes, *, stream: bool) -> bytes | Query | None:
            self.asked.append(str(dns.message.from_wire(wire).question[0]))
            return answer_now(wire, stream=stream)

        resolver.answer_now = noted  # type: ignore[method-assign]


def once(asked: list[str]) -> bool:
    """Whether the first answer was good enough: libc did not wait for another, nor ask again."""
    return len(asked) == len(set(asked))


@contextlib.asynccontextmanager
async def inside(tmp_path: Path, servers: str) -> AsyncIterator[tuple[Inside, FakeSink]]:
    conf = tmp_path / "resolv.conf"
    # it waits for so long that no busy host makes it ask again
    conf.write_text(f"{servers}options timeout:30 attempts:2\n")
    place, sink = Inside(conf), FakeSink()
    async with FakeUpstream(address("1.1.1.1")).serving() as upstream:  # in the host's namespace
        service = Resolver([upstream.place])
        await place.run(place.enter)
        sockets = [await place.run(bind, host, 53) for host in ("127.0.0.53", "::1")]
        served = service.open(POLICY, sink, sockets, on_refusal=lambda refusal: None)
        place.note(served.resolver)
        try:
            yield place, sink
        finally:
            await served.close()
            await service.close()
            place.thread.shutdown()


@pytest.mark.parametrize("server", ["127.0.0.53", "::1"])
async def test_the_c_library_is_answered(tmp_path: Path, server: str) -> None:
    before = Path("/proc/self/ns/net").readlink()
    async with inside(tmp_path, f"nameserver {server}\n") as (place, sink):
        code, output, _ = await place.run(place.getent, "ahosts", "pypi.org")
        assert (code, "1.1.1.1" in output) == (0, True)
        assert sink.open == {(HTTPS, "1.1.1.1")}
        for name in ("example.com", "a.b.example", "www.pypi.org"):
            code, output, asked = await place.run(place.getent, "ahosts", name)
            assert (code, output) == (2, "")
            assert asked
            assert once(asked)
    assert Path("/proc/self/ns/net").readlink() == before


async def test_a_refusal_is_final_though_there_is_another_server(tmp_path: Path) -> None:
    """A refusal that looks like a failure would make libc ask a next server, or the same again."""
    servers = "nameserver 127.0.0.53\nnameserver 192.0.2.1\n"  # the second cannot be reached
    async with inside(tmp_path, servers) as (place, _):
        for database in ("ahosts", "ahostsv4", "ahostsv6", "hosts"):
            code, _, asked = await place.run(place.getent, database, "example.com")
            assert code == 2
            assert once(asked)
        _, _, asked = await place.run(place.getent, "ahostsv6", "pypi.org")  # no such record
        assert once(asked)
