"""The resolver as a sandbox meets it: sockets in a network namespace, asked by the C library."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import subprocess
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsecd.policy.rules import NameRule, NetPolicy
from dsecd.resolver import Resolver, bind
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
    """A thread in a network namespace of its own; what it starts is there too."""

    def __init__(self, resolv_conf: Path) -> None:
        self._resolv_conf = resolv_conf
        self.thread = ThreadPoolExecutor(1)

    def enter(self) -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    def getent(self, *arguments: str) -> tuple[int, str, float]:
        """Return exit code, output and seconds of getent(1) with the sandbox's resolv.conf."""
        mount = 'mount --bind "$1" /etc/resolv.conf && shift && exec getent "$@"'
        start = time.monotonic()
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", mount, "sh", str(self._resolv_conf), *arguments],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout, time.monotonic() - start

    async def run(self, function, *arguments):  # type: ignore[no-untyped-def]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, function, *arguments)


@contextlib.asynccontextmanager
async def inside(tmp_path: Path, servers: str) -> AsyncIterator[tuple[Inside, FakeSink]]:
    conf = tmp_path / "resolv.conf"
    conf.write_text(f"{servers}options timeout:2 attempts:2\n")
    place, sink = Inside(conf), FakeSink()
    async with FakeUpstream(address("1.1.1.1")).serving() as upstream:  # in the host's namespace
        service = Resolver([upstream.place])
        await place.run(place.enter)
        sockets = [await place.run(bind, host, 53) for host in ("127.0.0.53", "::1")]
        served = service.open(POLICY, sink, sockets, on_refusal=lambda refusal: None)
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
            code, output, seconds = await place.run(place.getent, "ahosts", name)
            assert (code, output) == (2, "")
            assert seconds < 1.5  # neither retried nor waited for: a retry would take 2
    assert Path("/proc/self/ns/net").readlink() == before


async def test_a_refusal_is_final_though_there_is_another_server(tmp_path: Path) -> None:
    """A refusal that looks like a failure would make libc ask a next server, or the same again."""
    servers = "nameserver 127.0.0.53\nnameserver 192.0.2.1\n"  # the second cannot be reached
    async with inside(tmp_path, servers) as (place, _):
        for database in ("ahosts", "ahostsv4", "ahostsv6", "hosts"):
            code, _, seconds = await place.run(place.getent, database, "example.com")
            assert code == 2
            assert seconds < 1.5
        _, _, seconds = await place.run(place.getent, "ahostsv6", "pypi.org")  # no such record
        assert seconds < 1.5
