"""`dsecd`: the service entry. Reads the configuration, wires the parts, waits for a signal.

    dsecd [--config FILE] [--check] [--keep] [--version]

SIGTERM and SIGINT end the daemon: with `stop.keep = true` or `--keep` sandboxes stay for the next
daemon, otherwise they are stopped first. SIGUSR2 always keeps them (an upgrade). Exit codes: 0
ended as asked, 1 failed, 2 bad configuration or usage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from dsecd import __version__, log
from dsecd import config as configuration
from dsecd.backends.abc import Backend
from dsecd.config import Config
from dsecd.engine.backends import Backends
from dsecd.engine.manager import Step, no_step
from dsecd.engine.policies import Policies
from dsecd.host import probe
from dsecd.host.vitals import Vitals, protect_from_oom, raise_open_files
from dsecd.service import Service
from libdsec.errors import DSecError, InvalidArgument, Unsupported
from libdsec.model import FULLVM, MICROVM

logger = logging.getLogger("dsecd")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parse(argv)
    try:
        config = configuration.load(Path(options.config) if options.config else None)
    except InvalidArgument as error:
        return _complain(error.message, 2)
    log.configure(config.log)
    if os.geteuid() != 0 and config.backend != "fake":
        return _complain("must run as root: it makes namespaces, cgroups and mounts", 1)
    try:
        if options.check:
            return _check(config)
        return run(config, options.keep)
    except DSecError as error:
        return _complain(error.message, 1)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dsecd", description="The DSec daemon of one host.")
    parser.add_argument("--config", metavar="FILE", help="default: $DSEC_CONFIG, else "
                        f"{configuration.DEFAULT_FILE} if it exists")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="check configuration and host, end")
    parser.add_argument("--keep", action="store_true", help="SIGTERM leaves sandboxes running")
    parser.add_argument("--version", action="version", version=f"dsecd {__version__}")
    return parser.parse_args(argv)


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"dsecd: {message}\n")
    return code


def make_backend(config: Config) -> Backend:
    """Return the host's own backend, which the configuration names. Raises `InvalidArgument`."""
    if config.backend == "container":
        from dsecd.backends.container import ContainerBackend

        return ContainerBackend(config)
    if config.backend == "fake":
        from dsecd.backends.fake import FakeBackend

        return FakeBackend()
    raise InvalidArgument(f"backend {config.backend!r} is not known", field="backend")


def make_backends(config: Config) -> Backends:
    """Return what sandboxes run in here. Raises `InvalidArgument`, `Unsupported`."""
    from dsecd.backends.container import ContainerBackend

    own, required = make_backend(config), config.vm.enabled == "yes"
    no_jail = ""
    if not isinstance(own, ContainerBackend):
        no_jail = f"virtual machines are jailed in containers, and this is the {own.name} backend"
    no_machines = _without_machines(config)
    absent = {
        MICROVM: no_machines or _without_microvms(config) or no_jail,
        FULLVM: no_machines or no_jail,
    }
    if why := absent[MICROVM] if required else "":
        raise Unsupported(f'vm.enabled is "yes", but {why}', reason=why)
    backends = [own]
    if isinstance(own, ContainerBackend) and not absent[MICROVM]:
        from dsecd.backends.microvm import MicroVMBackend

        backends.append(MicroVMBackend(config, own, own.environments()))
    if isinstance(own, ContainerBackend) and not absent[FULLVM]:
        from dsecd.backends.fullvm import FullVMBackend

        backends.append(FullVMBackend(config, own))
    absent = {name: why for name, why in absent.items() if why}
    return Backends(backends, absent, optional=(FULLVM,) if required else (MICROVM, FULLVM))


def _without_machines(config: Config) -> str:
    """Return why there are no VMs here and what to do about it, "" when there may be some."""
    if config.vm.enabled == "no":
        return "the operator turned virtual machines off (vm.enabled in dsecd.toml)"
    if shutil.which(config.vm.qemu) is None:
        return f"{config.vm.qemu} is not installed (vm.qemu): install qemu-system-x86"
    return ""


def _without_microvms(config: Config) -> str:
    """Return what microVMs lack beside what all VMs need."""
    with contextlib.suppress(PermissionError):  # `dsec policy test` asks, too, for any user
        if config.guest_kernel.is_file():
            return ""
    return f"the guest's kernel is not at {config.guest_kernel} (vm.kernel): install one there"


def policies() -> tuple[Policies, Backends]:
    """Return what a daemon of this host would make of policies, and for which backends.

    Raises `InvalidArgument`, `Unsupported`.
    """
    config = configuration.load()
    backends = make_backends(config)
    return Policies(config.policy, backends.own), backends


def _check(config: Config) -> int:
    """Print what this host offers; 1 when something is missing without which nothing runs."""
    required = {row.name for row in probe.missing()} if config.backend == "container" else set()
    backends = make_backends(config)
    Policies(config.policy, backends.own)  # reads the operator's files
    for row in backends.features():
        state = "ok" if row.available else "MISSING" if row.name in required else "no"
        remark = f" ({row.reason})" if row.reason else ""
        sys.stdout.write(f"{state:8}{row.name:22}{row.needed_for}{remark}\n")
    return 1 if required else 0


def run(config: Config, keep: bool, step: Step = no_step) -> int:
    """Run a daemon until a signal ends it; returns the exit code. Raises `DSecError`."""
    import uvloop

    raise_open_files()
    if not protect_from_oom():
        logger.debug("the daemon is no safer from the OOM killer than others (oom_score_adj)")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, keep or config.stop.keep, step))


async def _serve(config: Config, keep: bool, step: Step) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[bool] = loop.create_future()

    def end(keeping: bool) -> None:
        if not ended.done():
            ended.set_result(keeping)

    for number, keeping in (
        (signal.SIGTERM, keep), (signal.SIGINT, keep), (signal.SIGUSR2, True),
    ):  # fmt: skip
        loop.add_signal_handler(number, end, keeping)
    config.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    service = Service(config, make_backends(config), Vitals(config.state), step)
    await service.start()
    # what lives as long as the daemon need not be looked at again; cycles are rare here, and a full
    # collection over thousands of sandboxes would be felt as latency
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    notifier = Notifier(os.environ)
    notifier.send("READY=1")
    try:
        async with notifier.watchdog():
            keeping = await ended
    finally:
        notifier.send("STOPPING=1")
    await service.close(keeping)
    return 0


class Notifier:
    """sd_notify(3) without a library: datagrams to $NOTIFY_SOCKET; nothing without systemd."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        # half of what systemd allows, as its manual asks
        self._period_s = int(environ.get("WATCHDOG_USEC", "0")) / 2e6

    def send(self, state: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), address)

    @contextlib.asynccontextmanager
    async def watchdog(self) -> AsyncIterator[None]:
        """While inside, tell systemd that the event loop turns."""
        task = asyncio.ensure_future(self._beat()) if self._period_s else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    async def _beat(self) -> None:
        while True:
            self.send("WATCHDOG=1")
            await asyncio.sleep(self._period_s)


if __name__ == "__main__":
    sys.exit(main())
