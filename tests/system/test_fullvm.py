"""A full VM of a real daemon: a desktop is seen, typed into, and goes back to what it was.

One machine for all of it: it takes half a minute to boot where guests are emulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from PIL import Image

from libdsec import DSecClient, DSecFullVMRunArgs, Sandbox
from libdsec.errors import DSecError, InvalidArgument, NotFound, Unsupported
from tests.system import desktop_lab
from tests.system.daemon import Daemon
from tests.system.vm_lab import vm_daemon

pytestmark = [
    pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200),
    pytest.mark.asyncio(loop_scope="module"),
]  # fmt: skip
BOOT_S = 400.0
BLUE = (0, 0, 255)
X = {"DISPLAY": ":0"}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """One census for the module, around its daemon."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(guest_kernel: Path) -> AsyncIterator[Daemon]:
    if reason := desktop_lab.missing():
        pytest.skip(reason)
    async with vm_daemon(guest_kernel, images=str(desktop_lab.place())) as running:
        yield running


async def until(check: Callable[[], Awaitable[bool]], what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not await check():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.5)


async def said(box: Sandbox, command: str, user: str = "user") -> str:
    done = await box.run_shell(command, user=user, env=X, timeout=120)
    assert done.ok, f"{command}: {done.ending}: {done.stderr}"
    return done.stdout.strip()


async def blue(box: Sandbox) -> int:
    picture = Image.open(io.BytesIO(await box.display.screenshot())).convert("RGB")
    counts: dict[object, int] = {
        colour: count for count, colour in picture.getcolors(picture.width * picture.height) or ()
    }
    return counts.get(BLUE, 0)


async def test_a_desktop_is_driven_saved_and_restored(host: Daemon) -> None:
    async with DSecClient(f"unix:{host.socket}") as client:
        args = DSecFullVMRunArgs(
            image=desktop_lab.NAME, memory_limit_mb=768, vcpus=2, disk_limit_mb=4096,
            network="nat", hostname="desk", env={"WHO": "me"},
        )  # fmt: skip
        async with await client.run_fullvm(args, timeout=BOOT_S) as box:
            await check_system(box)
            await check_desktop(box)
            await check_checkpoint(box)
            await check_restart(host, client, box)


async def check_system(box: Sandbox) -> None:
    """Commands and files are those of any sandbox, in a system with an init of its own."""
    assert await said(box, 'hostname; id -un; echo "$WHO"', "root") == "desk\nroot\nme"
    assert await said(box, "cat /proc/1/comm", "root") == "systemd"
    await box.files.write("/home/user/note", "kept")
    assert (await box.files.read("/home/user/note")) == "kept"
    done = await box.run_shell("sleep 4321 & setsid sleep 4321 & sleep 4321", timeout=1)
    assert done.timed_out

    async def gone() -> bool:
        look = "grep -al 'sleep.432[1]' /proc/[0-9]*/cmdline"
        return (await box.run_shell(look, user="root")).stdout == ""

    await until(gone, "all of its tree ends", 30)
    addresses = await said(box, "ip -brief -4 address show scope global; ip route", "root")
    assert f"{box.info.address}/" in addresses
    assert "default via" in addresses
    disk = int(await said(box, "lsblk -bdno SIZE /dev/vda", "root"))
    assert disk == 4096 << 20
    with pytest.raises(Unsupported, match="layers"):
        await box.pack_diff("x/y:1")


async def check_desktop(box: Sandbox) -> None:
    """A window that a command opens is on the screen; what is typed is read by what is in it."""

    async def ready() -> bool:
        look = "xprop -root _NET_CLIENT_LIST | grep '(WINDOW)'"
        return (await box.run_shell(look, user="user", env=X, timeout=60)).ok

    await until(ready, "the window manager manages windows")
    assert await box.display.size() == (1024, 768)
    assert await blue(box) < 1000
    window = "xterm -geometry 80x24+100+100 -bg '#0000ff' -e sh -c 'cat > /home/user/typed'"
    await box.commands.run(window, user="user", envs=X, background=True)

    async def open_() -> bool:
        await box.display.move(50, 50)
        return await blue(box) > 50_000

    await until(open_, "the window is on the screen")
    await box.display.click(200, 200)
    await box.display.type("Hello, World_42!\n")

    async def typed() -> bool:
        return await said(box, "cat /home/user/typed") == "Hello, World_42!"

    await until(typed, "what was typed is in the file", 30)
    with pytest.raises(InvalidArgument, match="not on the screen"):
        await box.display.click(5000, 1)


async def check_checkpoint(box: Sandbox) -> None:
    """Disk, memory and processes go back together; the window goes on taking text."""
    begun = time.monotonic()
    made = await box.checkpoint()
    print(f"checkpoint: {made.took_ms:.0f} ms, {time.monotonic() - begun:.1f} s")
    await said(box, "echo later > /home/user/note; pkill xterm")

    async def closed() -> bool:
        return await blue(box) < 1000

    await until(closed, "the window is gone", 30)
    begun = time.monotonic()
    await box.rollback(made)
    print(f"rollback: {time.monotonic() - begun:.1f} s")
    assert await said(box, "cat /home/user/note") == "kept"
    assert await blue(box) > 50_000
    before, clock = time.time(), int(await said(box, "date +%s"))  # its answer may take long
    assert before - 5 < clock < time.time() + 5
    await box.display.type("again\n")

    async def typed() -> bool:
        return (await said(box, "cat /home/user/typed")).endswith("again")

    await until(typed, "the restored window takes text", 30)
    await box.delete_checkpoint(made)
    assert await box.checkpoints() == []


async def check_restart(host: Daemon, client: DSecClient, box: Sandbox) -> None:
    """A daemon that is killed finds the machine again; pausing survives, too."""
    await box.pause()
    await host.restart()
    assert await said(box, "cat /home/user/note") == "kept"  # it goes on by itself
    assert await blue(box) > 50_000
    with contextlib.suppress(DSecError):  # the answer is lost with the machine
        await box.run_shell("systemctl poweroff --force --force", user="root", timeout=60)

    async def ended() -> bool:
        return any(
            one.id == box.id and one.state == "failed" and "switched itself off" in one.reason
            for one in await client.list_sandboxes(all=True)
        )

    await until(ended, "its end is told", 60)


async def test_what_is_refused_says_why(host: Daemon) -> None:
    async with DSecClient(f"unix:{host.socket}") as client:
        with pytest.raises(NotFound, match="no disk image absent"):
            await client.run_fullvm(DSecFullVMRunArgs(image="absent"))
        with pytest.raises(InvalidArgument, match="is no name"):
            await client.run_fullvm(DSecFullVMRunArgs(image="../../etc/shadow"))
        with pytest.raises(InvalidArgument, match="disk_limit_mb"):
            await client.run_fullvm(DSecFullVMRunArgs(image=desktop_lab.NAME, disk_limit_mb=64))
