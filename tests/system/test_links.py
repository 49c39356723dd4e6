"""Files of several names in a saved upper: one file each in every root that stands on it."""

from __future__ import annotations

import pytest

from dsecd.backends.agent import AgentCall, AgentChannel
from libdsec.errors import Exhausted
from libdsec.wire import pack
from tests.system.reroot_lab import Box, box, image, lab

__all__ = ["box", "image", "lab"]
pytestmark = pytest.mark.root


async def test_each_name_keeps_file_attributes_and_directory_times(box: Box) -> None:
    box.sh(
        "mkdir -p /t/d/e; echo one > /t/a; chmod 4750 /t/a; chown 7:8 /t/a; ln /t/a /t/d/b; "
        "ln /t/a /t/d/e/c; ln -s x /t/s; ln /t/s /t/d/s; mkfifo /t/p; ln /t/p /t/d/p; "
        "touch -d '2001-02-03 04:05:06' /t/a; touch -d '2002-02-03 04:05:06' /t/d/e /t/d /t"
    )
    look = (
        "cd /t; stat -c '%n %a %u %g %Y' . d d/e; "
        "stat -c '%n %a %u %g %h %Y %F' a d/b d/e/c s d/s p d/p"
    )
    before = box.sh(look)
    for _ in range(3):
        await box.checkpoint(linked=True)
        assert box.sh(look) == before
        assert len(set(box.sh("stat -c %i /t/a /t/d/b /t/d/e/c").split())) == 1
    box.sh("echo two >> /t/d/e/c")
    assert box.sh("cat /t/a /t/d/b") == "one\ntwo\n" * 2


async def test_an_upper_tells_whether_it_has_such_files(box: Box) -> None:
    box.sh("mkdir /t; echo one > /t/a; rm /etc/passwd /etc/group")  # whiteouts are no files
    upper = [box.open_upper()]
    built = await box.build(upper, linked=True)
    box.kept += [built.mount_ns, built.upper]
    assert not built.linked
    box.sh("ln /t/a /t/b")
    built = await box.build(upper, linked=True)
    box.kept += [built.mount_ns, built.upper]
    assert built.linked


async def test_no_room_for_them_is_an_error_that_says_so(box: Box) -> None:
    box.sh("dd if=/dev/zero of=/big bs=1M count=4; ln /big /big2")
    with pytest.raises(Exhausted, match="hard links"):
        await box.checkpoint(linked=True, upper_bytes=1 << 20)
    assert box.sh("stat -c %h /big2") == "2\n"


class _Nobody:
    def __getattr__(self, name: str) -> object:
        return lambda *_: None


async def test_calls_are_kept_back_and_sent_in_order(box: Box) -> None:
    channel = await AgentChannel.connect(box.path)
    try:
        with channel.held() as idle:
            assert idle
            call: AgentCall = channel.open("sys.ping", pack({}), _Nobody())  # type: ignore[arg-type]
            assert call.op == "sys.ping"
        assert await channel.call("sys.ping", pack({})) is not None
        assert not channel._calls
    finally:
        channel.close()
