"""Configuration of dsecd: `/etc/dsec/dsecd.toml` into frozen, typed values.

Every key is a field below and is explained in `packaging/dsecd.toml`. An unknown key is an error
that names the closest known one, so that a misspelt limit never goes unnoticed. The file is chosen
by `--config`, else the environment variable DSEC_CONFIG, else `/etc/dsec/dsecd.toml` if it exists,
else the defaults hold.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from libdsec.errors import InvalidArgument

DEFAULT_FILE = Path("/etc/dsec/dsecd.toml")
RANGE_SIZE = 65536  # host ids per sandbox
DAY_S = 86400


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a table of the file."""


class Paths(_Section, frozen=True):
    """Where the daemon keeps things, and the programs it starts ("" → beside the package)."""

    runtime: str = "/run/dsec"
    state: str = "/var/lib/dsec"
    spawner: str = ""
    init: str = ""
    shell: str = ""  # a static bash; "" → /bin/bash-static


class Listen(_Section, frozen=True):
    """Where clients connect. `socket` "" → `<runtime>/dsecd.sock`; `tcp` "" → none."""

    socket: str = ""
    mode: int = 0o660
    group: str = ""
    tcp: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""
    insecure: bool = False
    calls_per_connection: int = 4096
    connections: int = 4096


class MetricsListen(_Section, frozen=True):
    """Prometheus text: "unix:/path" or "host:port"; "" → `unix:<runtime>/metrics.sock`; "off"."""

    listen: str = ""


class Log(_Section, frozen=True):
    """`format` auto: human-readable on a terminal, JSON lines otherwise."""

    format: Literal["auto", "json", "text"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"


class Cgroup(_Section, frozen=True):
    """`name` is our directory in every hierarchy below `root`; two daemons need two names."""

    root: str = "/sys/fs/cgroup"
    name: str = "dsec"


class Pools(_Section, frozen=True):
    """How much is prepared ahead of the next create. 0 spawners → two per CPU, at most 8."""

    spawners: int = 0
    netns: int = 64
    slots: int = 64
    ranges: int = 64
    uid_range_start: int = 0x10000000
    uid_range_count: int = 32768


class Network(_Section, frozen=True):
    """Addresses of `network="nat"`. `resolvers` () → those of the host's resolv.conf."""

    pool4: str = "10.213.0.0/16"
    pool6: str = "fd5d:ec::/64"
    resolvers: tuple[str, ...] = ()


class Policy(_Section, frozen=True):
    """`catalogue`: a file of services, in front of those that ship. `default`: a preset or a file
    with a policy, for sandboxes whose caller gives none; "" → none.
    """

    catalogue: str = ""
    default: str = ""


class Secrets(_Section, frozen=True):
    """`authorities`: a PEM file of those that names with secrets may be certified by, besides the
    host's; "" → none.
    """

    authorities: str = ""


class Store(_Section, frozen=True):
    """Where layers are: a directory, or ``s3://bucket/prefix``; "" → `<state>/store`.

    `options` are those of the kind of store (docs/environments.md).
    """

    url: str = ""
    options: dict[str, Any] = {}


class Cache(_Section, frozen=True):
    """Of a store that is not on a local disk; `directory` "" → `<state>/cache`, 0: no bound.

    `use` always: read even a store on a local disk through it. `on_demand` pre-access: without
    FUSE; reads give zeros when dsecd and dsec-blobd are killed at once (docs/environments.md).
    Of `size_mb` an eighth bounds images and chunk indexes, the rest chunks.
    """

    use: Literal["auto", "always"] = "auto"
    on_demand: Literal["fuse", "pre-access"] = "fuse"
    directory: str = ""
    size_mb: int = 0

    @property
    def copies_bytes(self) -> int:
        """What images and indexes may take; those of mounted layers stay beyond it."""
        return (self.size_mb << 20) // 8

    @property
    def chunks_bytes(self) -> int:
        return (self.size_mb << 20) - self.copies_bytes


class Limits(_Section, frozen=True):
    """What admission allows. Overcommit factors bound the sum of what sandboxes asked for."""

    sandboxes: int = 4000
    memory_overcommit: float = 50.0
    memory_reserve_mb: int = 256
    cpu_overcommit: float = 0.0
    pids_reserve: int = 1024
    concurrent_creates: int = 16
    queued_creates: int = 20000
    create_timeout_s: float = 120.0
    stop_timeout_s: float = 20.0
    unclaimed_grace_s: float = 30.0
    default_idle_s: float = 86400.0
    max_lifetime_s: float = 0.0
    ended_kept: int = 10000
    ended_kept_s: float = 900.0
    disk_headroom_mb: int = 1024


class Reclaim(_Section, frozen=True):
    """How idle sandboxes give memory back (docs/density.md). Times 0: never.

    `target_percent`: of the host's memory, what may be in use. `swap_mb` 0: half of the host's
    memory; `swap_algorithm` "": the kernel's choice.
    """

    when: Literal["pressure", "always", "off"] = "pressure"
    target_percent: float = 85.0
    period_s: float = 5.0
    trim_after_s: float = 30.0
    pause_after_s: float = 600.0
    rest_s: float = 60.0
    reserve_new_mb: int = 16
    swap: Literal["auto", "zram", "file", "off"] = "auto"
    swap_mb: int = 0
    swap_algorithm: str = ""
    damon: bool = False


class Vm(_Section, frozen=True):
    """Sandboxes with a kernel of their own (`backend` "microvm"). `enabled` auto: where QEMU and
    the guest's kernel are installed; `kernel` "" → `<state>/guest/kernel`.

    `accel` auto: KVM where a guest boots with it. `layers_cache_mb` bounds the copies of layers
    that are made for guests to map; 0: no bound. `templates`: how many saved machines are kept for
    others to start from; 0: every machine boots. `ping_s`: how often a guest is asked whether it
    still answers; one that halted tells nobody. `free_page_reporting`: what a guest frees goes back
    to the host, and so does, anonymous memory compressed, what it has not used for
    `damon_min_age_s`; 0: that it keeps. `images` "" → `<state>/vm/images`: disk images of full VMs.
    """

    enabled: Literal["auto", "yes", "no"] = "auto"
    kernel: str = ""
    qemu: str = "qemu-system-x86_64"
    accel: Literal["auto", "kvm", "tcg"] = "auto"
    layers_cache_mb: int = 0
    ping_s: float = 20.0
    templates: int = 16
    free_page_reporting: bool = True
    damon_min_age_s: int = 0
    images: str = ""


class FnCall(_Section, frozen=True):
    """Pools of warm workers (docs/fncall.md): how many there are at most, in all and in each pool,
    how many calls of a pool may wait, and how long an idle worker stays.
    """

    workers: int = 16
    workers_each: int = 8
    queued: int = 10000
    idle_s: float = 60.0
    start_timeout_s: float = 60.0


class Stop(_Section, frozen=True):
    """`keep`: SIGTERM leaves the sandboxes running for the next daemon (SIGUSR2 always does)."""

    keep: bool = False
    timeout_s: float = 60.0


class Config(_Section, frozen=True):
    """All of it. `node` and `shard` become part of every sandbox id."""

    node: str = "n0"
    shard: str = "s0"
    backend: str = "container"
    paths: Paths = Paths()
    listen: Listen = Listen()
    metrics: MetricsListen = MetricsListen()
    log: Log = Log()
    cgroup: Cgroup = Cgroup()
    pools: Pools = Pools()
    network: Network = Network()
    policy: Policy = Policy()
    secrets: Secrets = Secrets()
    store: Store = Store()
    cache: Cache = Cache()
    limits: Limits = Limits()
    reclaim: Reclaim = Reclaim()
    fncall: FnCall = FnCall()
    vm: Vm = Vm()
    stop: Stop = Stop()

    @property
    def runtime(self) -> Path:
        return Path(self.paths.runtime)

    @property
    def state(self) -> Path:
        return Path(self.paths.state)

    @property
    def guest_kernel(self) -> Path:
        return Path(self.vm.kernel) if self.vm.kernel else self.state / "guest/kernel"

    @property
    def vm_images(self) -> Path:
        return Path(self.vm.images) if self.vm.images else self.state / "vm/images"

    @property
    def socket(self) -> Path:
        return Path(self.listen.socket) if self.listen.socket else self.runtime / "dsecd.sock"

    @property
    def metrics_endpoint(self) -> str:
        """ "" when metrics are off."""
        if self.metrics.listen == "off":
            return ""
        return self.metrics.listen or f"unix:{self.runtime / 'metrics.sock'}"


def load(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """Return the configuration. Raises `InvalidArgument` naming file, key and remedy."""
    chosen = path or (Path(environ["DSEC_CONFIG"]) if environ.get("DSEC_CONFIG") else None)
    if chosen is None:
        if not DEFAULT_FILE.exists():
            return Config()
        chosen = DEFAULT_FILE
    try:
        text = chosen.read_text()
    except OSError as error:
        raise InvalidArgument(f"cannot read {chosen}: {error.strerror}", field="config") from error
    try:
        return parse(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{chosen}: {error.message}", **error.detail) from error


def parse(text: str) -> Config:
    """Return the configuration that the TOML `text` describes. Raises `InvalidArgument`."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"not valid TOML: {error}", field="config") from error
    _refuse_unknown(table, Config, "")
    try:
        config = msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        raise InvalidArgument(str(error), field="config") from error
    _check(config)
    return config


def _refuse_unknown(table: Mapping[str, Any], kind: type[_Section], prefix: str) -> None:
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {prefix}{close[0]}?" if close else ""
            raise InvalidArgument(f"unknown key {prefix}{key}{hint}", field=prefix + key)
        inner = known[key]
        if isinstance(inner, type) and issubclass(inner, _Section) and isinstance(value, dict):
            _refuse_unknown(value, inner, f"{prefix}{key}.")


def _check(config: Config) -> None:
    """Refuse what would fail later, or be unsafe. Raises `InvalidArgument`."""
    for key in ("node", "shard"):
        if not re.fullmatch(r"[a-z0-9]{1,12}", getattr(config, key)):
            raise InvalidArgument(f"{key} must be 1-12 characters of a-z and 0-9", field=key)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", config.cgroup.name):
        raise InvalidArgument("cgroup.name must be a plain directory name", field="cgroup.name")
    for key in ("runtime", "state"):
        if not getattr(config.paths, key).startswith("/"):
            raise InvalidArgument(f"paths.{key} must be absolute", field=f"paths.{key}")
    if len(os.fsencode(config.socket)) > 100:  # sun_path holds 108 bytes
        raise InvalidArgument("listen.socket is too long for a unix socket", field="listen.socket")
    pools = config.pools
    if pools.uid_range_start % RANGE_SIZE or pools.uid_range_start < RANGE_SIZE:
        raise InvalidArgument(
            "pools.uid_range_start must be a multiple of 65536, above the host's own ids",
            field="pools.uid_range_start",
        )
    if pools.uid_range_start + pools.uid_range_count * RANGE_SIZE > 1 << 32:
        raise InvalidArgument("uid ranges pass 2^32", field="pools.uid_range_count")
    _check_reclaim(config.reclaim)
    _check_vm(config.vm)
    for section, key in _POSITIVE:
        if getattr(getattr(config, section), key) <= 0:
            raise InvalidArgument(f"{section}.{key} must be above 0", field=f"{section}.{key}")
    _check_tcp(config.listen)


def _check_reclaim(reclaim: Reclaim) -> None:
    if not 1 <= reclaim.target_percent <= 100:
        raise InvalidArgument(
            "reclaim.target_percent must be from 1 to 100", field="reclaim.target_percent"
        )
    for key in ("trim_after_s", "pause_after_s", "reserve_new_mb", "swap_mb"):
        if getattr(reclaim, key) < 0:
            raise InvalidArgument(f"reclaim.{key} must not be below 0", field=f"reclaim.{key}")
    if reclaim.swap == "file" and not reclaim.swap_mb:
        raise InvalidArgument(
            'reclaim.swap = "file" needs reclaim.swap_mb, its size', field="reclaim.swap_mb"
        )


def _check_vm(vm: Vm) -> None:
    if vm.kernel and not vm.kernel.startswith("/"):
        raise InvalidArgument("vm.kernel must be absolute", field="vm.kernel")
    if not vm.qemu:
        raise InvalidArgument("vm.qemu: a program's name or path", field="vm.qemu")
    if vm.templates < 0:
        raise InvalidArgument("vm.templates must not be below 0", field="vm.templates")
    if vm.layers_cache_mb < 0:
        raise InvalidArgument("vm.layers_cache_mb must not be below 0", field="vm.layers_cache_mb")
    if vm.ping_s <= 0:
        raise InvalidArgument("vm.ping_s must be above 0", field="vm.ping_s")
    if not 0 <= vm.damon_min_age_s <= DAY_S:
        raise InvalidArgument(
            f"vm.damon_min_age_s must be 0 to {DAY_S}", field="vm.damon_min_age_s"
        )


_POSITIVE = (
    ("limits", "sandboxes"),
    ("limits", "memory_overcommit"),
    ("limits", "concurrent_creates"),
    ("limits", "queued_creates"),
    ("limits", "create_timeout_s"),
    ("limits", "stop_timeout_s"),
    ("listen", "calls_per_connection"),
    ("listen", "connections"),
    ("pools", "uid_range_count"),
    ("fncall", "workers"),
    ("fncall", "workers_each"),
    ("fncall", "queued"),
    ("fncall", "idle_s"),
    ("fncall", "start_timeout_s"),
    ("reclaim", "period_s"),
    ("reclaim", "rest_s"),
)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6]:port". Raises `InvalidArgument`."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not host or int(port) > 65535:
        raise InvalidArgument(f"{address!r} is not host:port", field="listen.tcp")
    return host.strip("[]"), int(port)


def _check_tcp(listen: Listen) -> None:
    """TCP needs TLS and a token; without them only loopback, and only when asked for by name."""
    if not listen.tcp:
        return
    host, _ = split_address(listen.tcp)
    if bool(listen.tls_cert) != bool(listen.tls_key):
        raise InvalidArgument("listen.tls_cert and listen.tls_key go together", field="listen")
    if listen.tls_cert and listen.token_file:
        return
    if not listen.insecure:
        raise InvalidArgument(
            "listen.tcp needs listen.tls_cert, listen.tls_key and listen.token_file; for tests on "
            "loopback set listen.insecure = true",
            field="listen.tcp",
        )
    if host not in ("127.0.0.1", "::1", "localhost"):
        raise InvalidArgument(
            "listen.insecure is only allowed on loopback addresses", field="listen.insecure"
        )
