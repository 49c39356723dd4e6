"""The closed environment one peer runs in: ``python -m dsec_bench.peers.arena PARAMETERS``.

Started by `stage` as PID 1 of a new PID namespace in a new mount namespace. It moves into its
own cgroups, makes those the roots of a new cgroup namespace, and hides the host's `/run`,
`/dev/shm` and `/sys/fs/cgroup` behind its own. Whatever a peer starts, mounts or writes there
ends with this process, and this process ends when its standard input does: an interrupted
benchmark leaves nothing running.

Protocol: one JSON object per line. First it prints ``{"ready": version}`` or ``{"error":
why}``; then each line ``{"concurrency", "count", "seconds"}`` on stdin is a round, answered by
``{"operations": [[worker, start_us, end_us, status], ...], "stderr": tail}``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from dsec_bench.peers.drivers import PEERS, PeerError

CLONE_NEWCGROUP = 0x02000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND = 1, 2, 4, 4096
MNT_DETACH = 2
RUN = Path("/run")
CGROUP = Path("/sys/fs/cgroup")
STDERR_TAIL = 400  # bytes of a failing peer's complaint that are reported

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise PeerError(f"{what}: {os.strerror(code)}")


def mount(source: str, target: Path, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2), not mount(8): that one puts a loop device under an EROFS image."""
    _check(
        _libc.mount(source.encode(), bytes(target), kind.encode(), flags, data.encode()),
        f"mount of {kind} at {target}",
    )


def _join_cgroups(paths: Sequence[str]) -> None:
    for path in paths:
        (Path(path) / "cgroup.procs").write_text("0")
    _check(_libc.unshare(CLONE_NEWCGROUP), "unshare of the cgroup namespace")


def _mount_cgroups() -> None:
    """Show the peer its own part of the cgroup tree: v1 controllers alone where there are any."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().split()]
    controllers = [names for _, names, _ in lines if names]
    _check(_libc.umount2(bytes(CGROUP), MNT_DETACH), "umount of the host's cgroups")
    if not controllers:
        mount("cgroup2", CGROUP, "cgroup2")
        _delegate()
        return
    mount("tmpfs", CGROUP, "tmpfs", data="mode=0755")
    for names in controllers:
        directory = CGROUP / names.removeprefix("name=")
        directory.mkdir()
        # a named hierarchy has no controller; systemd's is the usual one
        options = f"none,{names}" if names.startswith("name=") else names
        mount("cgroup", directory, "cgroup", data=options)


def _delegate() -> None:
    """v2 wants processes in leaves only: leave the root before its controllers are enabled."""
    own = CGROUP / "arena"
    own.mkdir()
    (own / "cgroup.procs").write_text("0")
    names = (CGROUP / "cgroup.controllers").read_text().split()
    (CGROUP / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in names))


class Arena:
    """What a driver may use: paths that vanish with the arena, and processes it may start."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.load = str(parameters["load"])
        self.command: list[str] = parameters["command"]
        self.work = RUN / "bench"
        self.base = self.work / "base"  # the read-only root all peers share
        self.roots = self.work / "roots"  # load.c's working directory
        self.state = self.work / "state"  # the peer's own
        self.config = self.work / "config.json"
        self._processes: list[subprocess.Popen[bytes]] = []
        mount("tmpfs", RUN, "tmpfs", MS_NOSUID, "mode=0755")
        mount("tmpfs", Path("/dev/shm"), "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
        for path in (self.work, self.base, self.roots, self.state, RUN / "lock"):
            path.mkdir()
        self._mount_base(parameters["base"])

    def _mount_base(self, base: str) -> None:
        if Path(base).is_dir():
            mount(base, self.base, "none", MS_BIND)
        else:
            mount(base, self.base, "erofs", MS_RDONLY)

    def start(self, argv: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a daemon of the peer, its output to `output`."""
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        self._processes.append(process)
        return process

    def import_root(self, argv: Sequence[str]) -> None:
        """Feed a tar of the base to `argv`, which makes an image of it."""
        pack = ["tar", "--create", "--numeric-owner", f"--directory={self.base}", "."]
        with subprocess.Popen(pack, stdout=subprocess.PIPE) as tar:
            done = subprocess.run(argv, stdin=tar.stdout, capture_output=True, text=True)
        if done.returncode or tar.returncode:
            raise PeerError(f"{argv[0]} cannot import the root: {done.stderr.strip()[-300:]}")

    def reap(self) -> None:
        """Collect orphans: PID 1 inherits the shims that peers leave behind on purpose."""
        known = {process.pid for process in self._processes}
        while True:
            try:
                state = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if state is None or state.si_pid in known:
                return
            os.waitpid(state.si_pid, 0)


def _one_round(arena: Arena, peer: Any, order: dict[str, Any]) -> dict[str, Any]:
    errors = arena.work / "stderr"
    errors.write_bytes(b"")
    argv = [arena.load, "-c", str(order["concurrency"]), "-n", str(order["count"])]
    argv += ["-s", str(order["seconds"]), "-e", str(errors)]
    if peer.root != "own":
        argv += ["-r", str(arena.base), "-w", str(arena.roots)]
    if peer.root == "bundle":
        argv += ["-b", str(arena.config)]
    done = subprocess.run([*argv, "--", *peer.argv(arena)], capture_output=True, text=True)
    arena.reap()
    time.sleep(peer.settle_s)
    tail = done.stderr or errors.read_text(errors="replace")
    operations = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    return {"operations": operations, "stderr": tail.strip()[-STDERR_TAIL:]}


def _orders() -> queue.Queue[dict[str, Any]]:
    """Return a queue of the rounds asked for; the process ends as soon as stdin does."""
    orders: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        os._exit(0)  # the kernel kills the whole PID namespace after us

    threading.Thread(target=read, daemon=True).start()
    return orders


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value, separators=(",", ":")), flush=True)


def main() -> None:
    parameters = json.loads(sys.argv[1])
    orders = _orders()
    peer = PEERS[parameters["peer"]]()
    try:
        _join_cgroups(parameters["cgroups"])
        _mount_cgroups()
        arena = Arena(parameters)
        peer.prepare(arena)
    except (PeerError, OSError) as error:
        _say({"error": str(error)})
        return
    _say({"ready": peer.version()})
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            _say(_one_round(arena, peer, orders.get()))


if __name__ == "__main__":
    main()
