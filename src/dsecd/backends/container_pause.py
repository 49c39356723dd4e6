"""Having a container stand still, its agent too, and go on.

The agent is told first: its clock stops until the next request, so that timeouts of commands do not
all come due at the end of the pause. Then the v2 group is frozen, on hybrid hosts too: what is
killed there ends although frozen, as with v1's freezer it would not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from dsecd.backends.agent import AgentChannel
from dsecd.backends.container_holding import Holding
from dsecd.backends.container_host import ContainerHost
from dsecd.host import pageout
from libdsec.errors import DSecError, Internal, Unavailable
from libdsec.wire import pack

ANSWER_S = 10.0  # an agent that has CPU time answers in a millisecond
Save = Callable[[], Awaitable[None]]


async def pause(host: ContainerHost, holding: Holding, save: Save) -> None:
    """Freeze a container and journal that. Raises `Internal`, `Unavailable`; it then runs."""
    assert holding.cgroup is not None
    path = holding.cgroup.path
    await _ask(holding, "sys.pause")
    try:
        await host.driver.freeze(path)
        holding.paused = True
        await save()
    except BaseException:
        holding.paused = False
        with contextlib.suppress(DSecError):  # it is being destroyed
            await host.driver.thaw(path)
            await _ask(holding, "sys.ping")
        raise


async def resume(host: ContainerHost, holding: Holding, save: Save) -> None:
    """Thaw a container. Raises `Internal`, `Unavailable`."""
    assert holding.cgroup is not None
    if host.swap.slow():
        # what was paged out is read beside the thaw, ahead of being touched page by page
        pids = host.driver.command_pids(holding.cgroup)
        asyncio.get_running_loop().run_in_executor(None, pageout.prefetch, pids)
    await host.driver.thaw(holding.cgroup.path)
    holding.paused = False
    await _ask(holding, "sys.ping")  # a request: its clock goes on
    await save()


async def _ask(holding: Holding, op: str) -> None:
    channel: AgentChannel | None = holding.channel
    if channel is None:
        raise Unavailable("the sandbox's agent cannot be reached")
    try:
        async with asyncio.timeout(ANSWER_S):
            await channel.call(op, pack({}))
    except TimeoutError as error:
        raise Internal(f"{holding.sandbox}: its agent does not answer {op}") from error
