"""What every sandbox finds inside, whatever it runs in. Pure."""

from __future__ import annotations

import hashlib

import msgspec

from dsecd.backends.spec import Spec
from dsecd.host.plan import NewFile
from dsecd.images.manifest import Config
from dsecd.policy.landlock import Ruleset
from dsecd.secrets import trust

DEFAULT_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
NOFILE = 65536
# Commands go before anything else when memory is short; dsec-init itself never does.
OOM_SCORE_ADJ = 500
NO_NETWORK = "# this sandbox has no network\n"


class InitConfig(msgspec.Struct, kw_only=True):
    """Configuration of dsec-init (docs/protocol.md)."""

    sandbox: str
    env: dict[str, str]
    user: str
    workdir: str
    caps: int
    seccomp: bytes
    landlock: Ruleset | msgspec.UnsetType = msgspec.UNSET
    no_new_privs: bool
    output_limit: int
    spool_limit: int
    nofile: int = NOFILE
    oom_score_adj: int = OOM_SCORE_ADJ
    apparmor: str = ""


def init_config(
    sandbox: str,
    spec: Spec,
    defaults: Config,
    *,
    caps: int,
    seccomp: bytes = b"",
    landlock: Ruleset | None = None,
    apparmor: str = "",
) -> bytes:
    """Return dsec-init's configuration, encoded: what was asked for, else the image's defaults."""
    return msgspec.msgpack.encode(
        InitConfig(
            sandbox=sandbox,
            env=DEFAULT_ENV | defaults.env | _trusting(spec) | spec.env,
            user=spec.user or defaults.user or "root",
            workdir=spec.workdir or defaults.workdir,
            caps=caps,
            seccomp=seccomp,
            landlock=landlock or msgspec.UNSET,
            no_new_privs=spec.no_new_privileges,
            output_limit=spec.output_limit,
            spool_limit=spec.spool_limit,
            apparmor=apparmor,
        )
    )


def _trusting(spec: Spec) -> dict[str, str]:
    """Return what makes programs trust the proxy that adds secrets to their requests."""
    return trust.environment() if spec.secrets else {}


def generated_files(
    sandbox: str, hostname: str, address: str, address6: str, resolv_conf: str
) -> tuple[NewFile, ...]:
    """Return the files that name the sandbox and its network; addresses are "" without one."""
    own = address or "127.0.1.1"
    hosts = f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n{own}\t{hostname}\n"
    if address6:
        hosts += f"{address6}\t{hostname}\n"
    return (
        NewFile("etc/hostname", f"{hostname}\n".encode()),
        NewFile("etc/hosts", hosts.encode()),
        NewFile("etc/machine-id", f"{machine_id(sandbox)}\n".encode(), 0o444),
        NewFile("etc/resolv.conf", resolv_conf.encode()),
    )


def machine_id(sandbox: str) -> str:
    """Return the machine-id(5) of a sandbox: the same over its life, different from any other."""
    return hashlib.blake2b(sandbox.encode(), digest_size=16, person=b"dsec machine-id").hexdigest()
