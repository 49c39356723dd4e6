"""The peers: how each makes a sandbox, runs `/bin/true` in it and destroys it.

Every peer runs on the same EROFS root in an arena of its own (see `arena`). Peers with a storage
driver (podman, docker) import the root as an image and make their writable layer themselves; their
storage lies on tmpfs, which is faster for them than a disk. For the others the load generator makes
a tmpfs and an overlay per operation, as DSec's spawner does, and removes both. All have PID, mount,
IPC, UTS and network namespaces; crun, runc, podman, docker and runsc set memory, CPU and pids
limits; unshare, bubblewrap and systemd-nspawn have none to set, bubblewrap alone adds a user
namespace, and podman, docker and systemd-nspawn alone load a seccomp filter. So no peer does all
that a DSec sandbox does: the ratios are on the safe side.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dsec_bench.peers import oci

if TYPE_CHECKING:
    from dsec_bench.peers.arena import Arena

Root = Literal["own", "overlay", "bundle"]  # who makes the writable root: see load.c


class PeerError(Exception):
    """The peer cannot be set up here; the message says why."""


def _version(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout or done.stderr).strip().split("\n")[0]


class Peer(ABC):
    """A contender: `probe` says "" or why it cannot run, `prepare` sets it up in its arena,
    `argv` is the command whose one run is create + `/bin/true` + destroy."""

    name = ""
    binaries: tuple[str, ...] = ()  # all are needed
    package = ""  # where Debian has them
    root: Root = "overlay"
    settle_s = 0.0  # how long after the last operation its own clean-up may go on

    def probe(self) -> str:
        missing = [name for name in self.binaries if shutil.which(name) is None]
        if missing:
            return f"{', '.join(missing)} not found: install the package {self.package}"
        return ""

    def version(self) -> str:
        return _version([self.binaries[0], "--version"])

    def prepare(self, arena: Arena) -> None:  # noqa: B027 - most peers need nothing
        """Set up what the runs need; the arena's end kills and unmounts it. Raises PeerError."""

    @abstractmethod
    def argv(self, arena: Arena) -> list[str]:
        """Return the command of one run."""


class Unshare(Peer):
    """util-linux: namespaces and chroot, nothing else."""

    name = "unshare"
    binaries = ("unshare",)
    package = "util-linux"

    def argv(self, arena: Arena) -> list[str]:
        return [
            "unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--fork",
            "--root=@ROOT@", "--mount-proc", *arena.command,
        ]  # fmt: skip


class Bubblewrap(Peer):
    name = "bubblewrap"
    binaries = ("bwrap",)
    package = "bubblewrap"

    def argv(self, arena: Arena) -> list[str]:
        return [
            "bwrap", "--unshare-all", "--die-with-parent", "--hostname", "sandbox",
            "--bind", "@ROOT@", "/", "--proc", "/proc", "--dev", "/dev", *arena.command,
        ]  # fmt: skip


class Nspawn(Peer):
    """systemd's; with `--keep-unit --register=no` it needs neither D-Bus nor systemd as PID 1."""

    name = "systemd-nspawn"
    binaries = ("systemd-nspawn",)
    package = "systemd-container"

    def argv(self, arena: Arena) -> list[str]:
        return [
            "systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network",
            "--console=pipe",
            "--machine=@ID@", "--directory=@ROOT@", "--resolv-conf=off", "--timezone=off",
            *arena.command,
        ]  # fmt: skip


class _Oci(Peer):
    """A runtime whose `run` creates, starts, waits for and deletes a container of a bundle."""

    root: Root = "bundle"
    cgroup_namespace = True

    def prepare(self, arena: Arena) -> None:
        text = json.dumps(oci.configuration(arena.command, self.cgroup_namespace))
        arena.config.write_text(text)


class Crun(_Oci):
    """crun refuses v1 controllers beside a v2 tree ("hybrid"); an arena shows it v1 alone."""

    name = "crun"
    binaries = ("crun",)
    package = "crun"

    def argv(self, arena: Arena) -> list[str]:
        return ["crun", f"--root={arena.state}", "run", "--bundle=@BUNDLE@", "@ID@"]


class Runc(_Oci):
    name = "runc"
    binaries = ("runc",)
    package = "runc"

    def argv(self, arena: Arena) -> list[str]:
        return ["runc", f"--root={arena.state}", "run", "--bundle=@BUNDLE@", "@ID@"]


class Runsc(_Oci):
    """gVisor: a kernel in user space, here with its ptrace platform, the one that runs anywhere."""

    name = "runsc"
    binaries = ("runsc",)
    package = "runsc (the wheel named gvisor has no runsc in it)"
    cgroup_namespace = False

    def argv(self, arena: Arena) -> list[str]:
        return [
            "runsc", f"--root={arena.state}", "--network=none", "--platform=ptrace", "run",
            "--bundle=@BUNDLE@", "@ID@",
        ]  # fmt: skip


LIMITS = (
    f"--memory={oci.MEMORY_BYTES}",
    f"--cpus={oci.CPUS:g}",
    f"--pids-limit={oci.PIDS}",
    "--network=none",
)


class Podman(Peer):
    """podman with crun. It copies its own rlimits into the container, which needs
    CAP_SYS_RESOURCE where they exceed ours; hence `--ulimit`."""

    name = "podman"
    binaries = ("podman", "crun", "conmon")
    package = "podman"
    root: Root = "own"

    def _podman(self, arena: Arena) -> list[str]:
        return [
            "podman", f"--root={arena.state}/store", f"--runroot={arena.state}/run",
            f"--tmpdir={arena.state}/tmp",
            "--storage-driver=overlay", "--cgroup-manager=cgroupfs", "--runtime=crun",
            "--events-backend=none", "--log-level=error",
        ]  # fmt: skip

    def prepare(self, arena: Arena) -> None:
        arena.import_root([*self._podman(arena), "import", "-", "bench"])

    def argv(self, arena: Arena) -> list[str]:
        return [
            *self._podman(arena), "run", "--rm", "--pull=never", "--log-driver=none",
            "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024", *LIMITS, "bench",
            *arena.command,
        ]  # fmt: skip


class Docker(Peer):
    """dockerd of its own, with its own containerd, state and socket; no bridge, no iptables."""

    name = "docker"
    binaries = ("dockerd", "containerd", "runc")
    package = "docker.io"
    root: Root = "own"
    settle_s = 1.0
    start_timeout_s = 30.0

    @staticmethod
    def _client() -> str:
        # a docker elsewhere on PATH need not be the client of this dockerd
        beside = Path("/usr/bin/docker")
        return str(beside) if beside.exists() else (shutil.which("docker") or "")

    def probe(self) -> str:
        return super().probe() or ("" if self._client() else "docker not found: install docker-cli")

    def prepare(self, arena: Arena) -> None:
        log = (arena.work / "dockerd.log").open("wb")
        with log:
            daemon = arena.start(
                [
                    "dockerd", f"--host={self._host(arena)}", f"--data-root={arena.state}/data",
                    f"--exec-root={arena.state}/exec", f"--pidfile={arena.state}/pid",
                    "--iptables=false", "--ip6tables=false", "--bridge=none",
                    "--storage-driver=overlay2",
                ],
                log,
            )  # fmt: skip
        deadline = time.monotonic() + self.start_timeout_s
        while subprocess.run([*self._docker(arena), "version"], capture_output=True).returncode:
            if daemon.poll() is not None or time.monotonic() > deadline:
                tail = (arena.work / "dockerd.log").read_text(errors="replace")[-300:]
                raise PeerError(f"dockerd does not answer: {tail.strip()}")
            time.sleep(0.1)
        arena.import_root([*self._docker(arena), "import", "-", "bench"])

    @staticmethod
    def _host(arena: Arena) -> str:
        return f"unix://{arena.state}/docker.sock"

    def _docker(self, arena: Arena) -> list[str]:
        return [self._client(), f"--config={arena.state}/client", f"--host={self._host(arena)}"]

    def argv(self, arena: Arena) -> list[str]:
        return [
            *self._docker(arena), "run", "--rm", "--pull=never", "--log-driver=none", *LIMITS,
            "bench", *arena.command,
        ]  # fmt: skip


PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (Crun, Bubblewrap, Docker, Runc, Podman, Unshare, Runsc, Nspawn)
}
