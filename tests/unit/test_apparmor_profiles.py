"""Which profiles are loaded and removed when; the kernel and the parser are stood in for."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from dsecd.host import apparmor
from dsecd.host.apparmor import Profiles
from libdsec.errors import InvalidArgument

DIGEST = "0123456789abcdef" * 2


def name(number: int, prefix: str = "dsec") -> str:
    return f"{prefix}-{number:032x}"


class Kernel:
    """What was ordered, and which profiles there are."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.compiled: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def compile_text(self, text: str) -> bytes:
        self.gate.wait(5)
        self.compiled.append(text)
        if text == "bad":
            raise InvalidArgument("too many wildcards")
        return text.encode()

    def load(self, binary: bytes) -> None:
        if binary == b"damaged":
            raise OSError(71, "Protocol error")
        self.there.add(binary.decode())

    def remove(self, name: str) -> None:
        self.there.discard(name)

    def loaded(self) -> set[str]:
        return set(self.there)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    for each in ("compile_text", "load", "remove", "loaded"):
        monkeypatch.setattr(apparmor, each, getattr(made, each))
    return made


@pytest.fixture
def profiles(kernel: Kernel, tmp_path: Path) -> Profiles:
    made = Profiles("dsec", tmp_path / "cache")
    made.start()
    return made


async def test_a_profile_is_compiled_once_for_all_who_want_it(
    profiles: Profiles, kernel: Kernel
) -> None:
    kernel.gate.clear()
    wanted = [asyncio.create_task(profiles.acquire(f"s{i}", name(1), name(1))) for i in range(5)]
    await asyncio.sleep(0.01)
    kernel.gate.set()
    await asyncio.gather(*wanted)
    await profiles.acquire("later", name(1), name(1))
    assert kernel.compiled == [name(1)]
    assert kernel.there == {name(1)}


async def test_unused_ones_wait_in_a_bounded_line(profiles: Profiles, kernel: Kernel) -> None:
    for number in range(apparmor.IDLE + 3):
        await profiles.acquire("s", name(number), name(number))
        profiles.release("s", name(number))
    assert kernel.there == {name(number) for number in range(3, apparmor.IDLE + 3)}
    await profiles.acquire("t", name(5), name(5))
    await profiles.close()
    assert kernel.there == {name(5)}


async def test_a_profile_goes_with_its_last_user(profiles: Profiles, kernel: Kernel) -> None:
    await profiles.acquire("a", name(1), name(1))
    await profiles.acquire("b", name(1), name(1))
    profiles.release("a", name(1))
    profiles.release("a", name(1))  # twice is once
    await profiles.close()
    assert kernel.there == {name(1)}
    profiles.release("b", name(1))
    await profiles.close()
    assert kernel.there == set()


async def test_a_failure_is_everybody_s_and_not_kept(profiles: Profiles, kernel: Kernel) -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument):
            await profiles.acquire("s", name(1), "bad")
    assert kernel.compiled == ["bad", "bad"]
    await profiles.acquire("s", name(1), name(1))
    assert kernel.there == {name(1)}


async def test_one_who_gives_up_leaves_it_unused(profiles: Profiles, kernel: Kernel) -> None:
    kernel.gate.clear()
    wanted = asyncio.create_task(profiles.acquire("s", name(1), name(1)))
    await asyncio.sleep(0.01)
    wanted.cancel()
    await asyncio.gather(wanted, return_exceptions=True)
    kernel.gate.set()
    await profiles.close()
    assert kernel.there == set()


async def test_after_a_restart_only_what_is_nobody_s_goes(
    profiles: Profiles, kernel: Kernel
) -> None:
    others = {"unconfined", "/usr/bin/man", name(9, "dsec-test-1-0"), "dsec-probe-12"}
    kernel.there = {name(1), name(2), *others}
    assert profiles.adopt("s", name(1))
    assert not profiles.adopt("t", name(3))
    assert profiles.sweep() == [name(2)]
    assert kernel.there == {name(1), *others}


async def test_compiled_ones_are_kept_on_disk(kernel: Kernel, tmp_path: Path) -> None:
    for _ in range(2):
        profiles = Profiles("dsec", tmp_path)
        profiles.start()
        await profiles.acquire("s", name(1), name(1))
    assert kernel.compiled == [name(1)]
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    file.write_bytes(b"damaged")
    profiles = Profiles("dsec", tmp_path)
    profiles.start()
    await profiles.acquire("s", name(1), name(1))
    assert kernel.compiled == [name(1), name(1)]
    assert file.read_bytes() == name(1).encode()
    (tmp_path / "of-another-kernel").mkdir()
    Profiles("dsec", tmp_path).start()
    assert [path.name for path in tmp_path.iterdir()] == [file.parent.name]


@pytest.mark.skipif(
    not Path("/usr/sbin/apparmor_parser").exists(), reason="apparmor_parser is not installed"
)
@pytest.mark.parametrize(("limit", "value"), [("COMPILE_S", 0.5), ("COMPILE_BYTES", 48 << 20)])
def test_what_cannot_be_compiled_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    assert apparmor.compile_text("profile x { }\n")[:1] == b"\x04"
    with pytest.raises(apparmor.Unsupported, match=r"refused a profile: .*syntax error"):
        apparmor.compile_text("profile x { nonsense }\n")
    monkeypatch.setattr(apparmor, limit, value)
    wild = "".join(f'"/{{,**/}}{i}a*/{{,**/}}b{i}*c/{{,**/}}d*{i}" r,\n' for i in range(200))
    with pytest.raises(InvalidArgument, match="fewer or plainer patterns"):
        apparmor.compile_text(f"profile x {{\n{wild}}}\n")
