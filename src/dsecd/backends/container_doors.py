"""The daemon's sockets in the network namespace of a container: see `dsecd.doors`."""

from __future__ import annotations

from dsecd.doors.gate import Doors, bind_free
from dsecd.host.netns import Netns, NetnsPool


async def bind_inside(pool: NetnsPool, netns: Netns, network: int, count: int) -> list[Doors]:
    """Return the sockets of `count` addresses of 127.`network` inside. Raises `Unavailable`."""
    doors: list[Doors] = []

    def bind() -> None:
        for number in range(count):
            doors.append(bind_free(network, number + 1))

    try:
        await pool.run_inside(netns, bind)
    except BaseException:  # a cancelled call has come to its end inside, too
        for each in doors:
            each.close()
        raise
    return doors
