"""A daemon as its user sees it: a libdsec client and a sandbox of it, for the tests of faults."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from tests.system.daemon import IMAGE, Daemon, daemon


async def shell(sandbox: Sandbox, text: str) -> str:
    """Run a text that must succeed; return what it printed."""
    done = await sandbox.run_shell(text)
    assert done.exit_code == 0, done.stderr
    return str(done.stdout)


async def by_node(sandbox: Sandbox, url: str, before: str = "") -> str:
    """Have node get a URL; return what it printed: the status, or why there is none."""
    module = url.partition(":")[0]
    script = (
        f"{before}require('{module}').get('{url}', r => console.log(r.statusCode))"
        ".on('error', e => console.log(e.message))"
    )
    return (await sandbox.run("node", "-e", script, timeout=60)).stdout


async def get_at_once(
    sandbox: Sandbox, urls: list[str], count: int, context: str = "create_default_context"
) -> str:
    """Have `count` threads get the URLs in turn; return how many did, and what came of them."""
    script = (
        "import ssl, threading, urllib.request\ngot = []\n"
        f"urls, c = {urls}, ssl.{context}()\ndef one(n):\n"
        "  url = urls[n % len(urls)]\n"
        "  try: got.append(urllib.request.urlopen(url, timeout=60, context=c).status)\n"
        "  except OSError as e: got.append(str(e))\n"
        f"ts = [threading.Thread(target=one, args=(n,)) for n in range({count})]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]; print(len(got), *set(got))"
    )
    return (await sandbox.run("python3", "-c", script, timeout=100)).stdout


@dataclass
class View:
    """A daemon, a client of it and one sandbox."""

    daemon: Daemon
    client: DSecClient
    sandbox: Sandbox

    async def another(self, **args: Any) -> Sandbox:
        run = DSecContainerRunArgs(container_image=IMAGE, **args)
        return await self.client.run_container(run, timeout=60)


@contextlib.asynccontextmanager
async def viewed(
    sections: dict[str, dict[str, object]] | None = None, **args: Any
) -> AsyncIterator[View]:
    """`sections` of the daemon's configuration; keywords are the sandbox's run arguments."""
    async with daemon(**(sections or {})) as d, DSecClient(f"unix:{d.socket}") as client:
        run = DSecContainerRunArgs(container_image=IMAGE, **args)
        yield View(d, client, await client.run_container(run, timeout=60))


def first_process(d: Daemon, sandbox: str) -> int:
    """Return the host's pid of the sandbox's PID 1 (not the smallest of its pids: they wrap)."""
    for pid in d.pids_of(sandbox):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            if re.search(r"^NSpid:.*\t1$", status, re.MULTILINE):
                return pid
    raise AssertionError(f"{sandbox} has no PID 1")


def commands_on_host(d: Daemon, sandbox: str) -> set[int]:
    """Return the host's pids of everything in the sandbox but its PID 1, dead ones aside."""
    alive = set()
    for pid in d.pids_of(sandbox):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            if not re.search(r"^State:\s+Z|^NSpid:.*\t1$", status, re.MULTILINE):
                alive.add(pid)
    return alive


async def lend_programs(sandbox: Sandbox, *programs: str) -> None:
    """Copy programs of the host, with the libraries they need, to the same paths inside.

    busybox writes and reads a few bytes at a time: too slow for tests of gigabytes.
    """
    for program in programs:
        linked = await asyncio.to_thread(
            subprocess.run, ["ldd", program], capture_output=True, text=True, check=True
        )
        for path in (program, *re.findall(r"(/\S+) \(0x", linked.stdout)):
            await sandbox.files.upload(Path(path).resolve(), path)
