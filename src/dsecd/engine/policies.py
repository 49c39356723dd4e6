"""The policies of requests: compiled with this host's catalogue, and explained on this host.

A policy may take a tenth of a second to compile, so it is kept by its content, and made in a thread
the first time: `ready` before `get`. A short one is made at once, in less time than a thread takes
to answer. What a sandbox got is journalled as `Source`, from which the next daemon makes the same,
whatever the catalogue says and the backend applies by then.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from dsecd import config
from dsecd.backends.abc import Backend
from dsecd.engine.waiter import completed
from dsecd.host import apt
from dsecd.policy import catalogue, language, mechanisms, targets, update
from dsecd.policy.catalogue import Catalogue, Service
from dsecd.policy.compile import Compiled, compile_policy
from dsecd.policy.explain import Host, Row, require_all, unenforced
from dsecd.policy.language import Policy
from dsecd.policy.presets import PRESETS
from libdsec.errors import InvalidArgument
from libdsec.model import Feature

KEPT = 256  # policies that were asked for last
SHORT_BYTES = 2048  # of a request and what it changes: some 60 rules, 2 ms at most
NetworkMode = Literal["none", "nat"]


class Given(Protocol):
    """The fields of a request that give a policy."""

    @property
    def policy(self) -> str | dict[str, Any] | None: ...
    @property
    def network_rules(self) -> dict[str, bool] | None: ...


class Asked(Given, Protocol):
    """Those of a sandbox to be made."""

    @property
    def network(self) -> NetworkMode: ...


class Source(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that an account follows from: the policy, what its services meant, what was in force."""

    policy: Policy
    services: dict[str, Service]
    network: NetworkMode
    mechanisms: tuple[str, ...]
    updated: bool = False  # not that of the create any more
    closed: bool = False  # it has rules on networks and no link, for nothing would enforce them


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """A policy on this host: compiled, and what becomes of each entry. `packed` is the source."""

    source: Source
    packed: bytes
    compiled: Compiled
    rows: tuple[Row, ...]
    notes: tuple[str, ...]  # what is not fully enforced


def read(given: Given) -> Policy | None:
    """Return the policy of a request, None when it gives none. Raises `InvalidArgument`."""
    rules, said = given.network_rules, given.policy
    if said is None:
        return None if rules is None else language.from_network_rules(rules)
    policy = preset(said) if isinstance(said, str) else language.from_object(said)
    if rules is None:
        return policy
    services = policy.network.services
    for name, on in rules.items():
        if services.get(name, on) != on:
            raise InvalidArgument(
                f"network_rules.{name}: the policy says the opposite in network.services; "
                "leave one of them out",
                field=f"network_rules.{name}",
            )
    network = msgspec.structs.replace(policy.network, services={**services, **rules})
    return msgspec.structs.replace(policy, network=network)


def preset(name: str) -> Policy:
    """Return the policy that only extends a preset. Raises `InvalidArgument`."""
    if name not in PRESETS:
        raise InvalidArgument(
            f"policy: {name!r} is none of the presets {', '.join(sorted(PRESETS))}; "
            "a policy of your own is an object, for dsec a file (./NAME or NAME.toml)",
            field="policy",
        )
    return language.from_object({"extends": name})


def services_of(policy: Policy, known: Catalogue) -> dict[str, Service]:
    """Return the services that `policy`, with its preset, names."""
    network = update.flattened(policy).network
    named = [*network.services, *(rule.allow or rule.deny or "" for rule in network.rules)]
    return {name: known[name] for name in named if name in known}


def host_catalogue(path: str) -> Catalogue:
    """Return the services that rules may name here. Raises `InvalidArgument` naming the file.

    The operator's file comes before what ships; that has the mirrors of this host's own apt, too.
    """
    shipped = catalogue.shipped()
    mirrors = [host for host in apt.hosts() if _is_domain(host)]
    shipped = catalogue.with_mirrors(shipped, "debian", mirrors)
    if not path:
        return shipped
    return {**shipped, **catalogue.parse(_text(path, "policy.catalogue"), path)}


def _is_domain(host: str) -> bool:
    """Whether a rule could name `host`; apt also takes addresses and names without a dot."""
    try:
        targets.domain(host, "apt")
    except InvalidArgument:
        return False
    return True


def _text(path: str, key: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InvalidArgument(f"{key}: cannot read {path}: {why}", field=key) from error


def operator_policy(name: str) -> Policy | None:
    """Return the policy for who gives none. Raises `InvalidArgument` naming the file."""
    if not name:
        return None
    if name in PRESETS:
        return preset(name)
    text = _text(name, "policy.default")
    try:
        return language.from_json(text) if name.endswith(".json") else language.from_toml(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error.message}", field="policy.default") from error


class Policies:
    """The policies of one daemon, by their content and by what enforces them.

    `own` is the host's backend, which is meant where none is given.
    """

    def __init__(self, settings: config.Policy, own: Backend) -> None:
        self._own = own
        self._services = host_catalogue(settings.catalogue)
        self._default = operator_policy(settings.default)
        if self._default is not None:
            try:
                compile_policy(self._default, self._services)
            except InvalidArgument as error:
                message = f"policy.default: {settings.default}: {error.message}"
                raise InvalidArgument(message, field="policy.default") from error
        self._known: OrderedDict[bytes, Account] = OrderedDict()
        self._coming: dict[bytes, asyncio.Future[Account]] = {}
        self._lock = threading.Lock()  # one at a time: the first has the host probed
        self._tables: dict[str, list[Feature]] = {}  # by backend, once it was asked
        self._hosts: dict[tuple[str, tuple[str, ...]], Host] = {}  # by backend and what it applies

    def get(
        self, asked: Asked, strict: bool = False, backend: Backend | None = None
    ) -> Account | None:
        """Return the policy of a request in `backend`, None when there is none.

        Made now when it is not kept. Raises `InvalidArgument`, and `Unsupported` with `strict` when
        something of it is not fully enforced.
        """
        backend = backend or self._own
        key = self._key(backend, asked)
        if not key:
            return None
        account = self._kept(key) or self._keep(key, self._make_asked(backend, asked))
        return _granted(account, strict)

    async def ready(
        self, asked: Asked, strict: bool = False, backend: Backend | None = None
    ) -> Account | None:
        """Return what `get` does; what is not kept is made beside the event loop."""
        backend = backend or self._own
        key = self._key(backend, asked)
        if not key:
            return None
        account = self._kept(key) or await self._made(
            backend, key, _given(asked), lambda: self._make_asked(backend, asked)
        )
        return _granted(account, strict)

    async def compiled(self, asked: Asked) -> tuple[Compiled, NetworkMode]:
        """Return a policy that nothing is made with, and its network. Raises `InvalidArgument`."""
        policy = read(asked)
        if policy is None:
            raise _nothing_given()
        compiled = await asyncio.to_thread(compile_policy, policy, self._services)
        return compiled, _network(compiled, asked.network)

    async def changed(
        self, backend: Backend, present: Account | None, given: Given, strict: bool
    ) -> Account:
        """Return a running sandbox's policy with the network that is given. Raises as `ready`.

        What its files and system calls are closed by was applied when it was made.
        """
        former = b"" if present is None else present.packed
        said = former, given.policy, given.network_rules
        key = _digest(backend.name, *said)
        account = self._kept(key) or await self._made(
            backend, key, said, lambda: self._make_changed(backend, present, given)
        )
        return _granted(account, strict)

    async def restored(self, backend: Backend, packed: bytes) -> Account:
        """Return what was journalled. Raises `InvalidArgument` if this version cannot read it."""
        key = _digest(backend.name, packed)
        return self._kept(key) or await self._made(
            backend, key, packed, lambda: self._make_restored(backend, packed)
        )

    # --- making and keeping

    def _make_restored(self, backend: Backend, packed: bytes) -> Account:
        try:
            source = msgspec.msgpack.decode(packed, type=Source)
        except msgspec.DecodeError as error:
            raise InvalidArgument(f"policy: made by another version: {error}") from error
        applied = tuple(name for name in source.mechanisms if name in mechanisms.NEEDS)
        return self._make(
            backend, source.policy, source.services, source.network, applied, source.updated,
            source.closed,
        )  # fmt: skip

    def _key(self, backend: Backend, asked: Asked) -> bytes:
        if asked.policy is None and asked.network_rules is None and self._default is None:
            return b""
        return _digest(backend.name, asked.policy, asked.network_rules, asked.network)

    def _kept(self, key: bytes) -> Account | None:
        account = self._known.get(key)
        if account is not None:
            self._known.move_to_end(key)
        return account

    def _keep(self, key: bytes, account: Account) -> Account:
        self._known[key] = account
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return account

    async def _made(
        self, backend: Backend, key: bytes, content: object, make: Callable[[], Account]
    ) -> Account:
        """Have an account made of `content`, now or beside the event loop; None: of any size."""
        bounded = backend.name in self._tables and content is not None
        if bounded and len(msgspec.msgpack.encode(content)) <= SHORT_BYTES:
            return self._keep(key, make())
        return await self._beside(key, make)

    async def _beside(self, key: bytes, make: Callable[[], Account]) -> Account:
        """Have an account made in a thread, once for all who ask at the same time."""
        coming = self._coming.get(key)
        if coming is None:
            coming = self._coming[key] = asyncio.ensure_future(asyncio.to_thread(make))
            coming.add_done_callback(functools.partial(self._came, key))
        await completed(coming)
        return coming.result()

    def _came(self, key: bytes, coming: asyncio.Future[Account]) -> None:
        del self._coming[key]
        if not coming.cancelled() and coming.exception() is None:
            self._keep(key, coming.result())

    def _make_asked(self, backend: Backend, asked: Asked) -> Account:
        policy = read(asked) or self._default
        assert policy is not None
        return self._make(backend, policy, self._services, asked.network)

    def _make_changed(self, backend: Backend, present: Account | None, given: Given) -> Account:
        wanted = read(given)
        if wanted is None:
            raise _nothing_given()
        before = Policy() if present is None else present.source.policy
        applied, closed = _applied(backend, "nat"), None
        if present is not None:
            applied, closed = present.source.mechanisms, present.source.closed
        policy = update.with_network(before, wanted)
        return self._make(backend, policy, self._services, "nat", applied, True, closed)

    def _make(
        self,
        backend: Backend,
        policy: Policy,
        services: Catalogue,
        network: NetworkMode,
        applied: tuple[str, ...] | None = None,
        updated: bool = False,
        closed: bool | None = None,
    ) -> Account:
        compiled = compile_policy(policy, services)
        network = _network(compiled, network)
        if applied is None:
            applied = _applied(backend, network)
        host = self._host(backend, applied)
        if closed is None:
            closed = network != "none" and host.leaves_closed
        source = Source(
            policy=policy, services=services_of(policy, services), network=network,
            mechanisms=host.there, updated=updated, closed=closed,
        )  # fmt: skip
        rows = host.explain(compiled, closed)
        return Account(
            source=source,
            packed=msgspec.msgpack.encode(source),
            compiled=compiled,
            rows=rows,
            notes=tuple(map(str, unenforced(rows))),
        )

    def _host(self, backend: Backend, applied: tuple[str, ...]) -> Host:
        """Return what enforces rules in `backend` where `applied` is: the same for good."""
        with self._lock:
            if backend.name not in self._tables:
                self._tables[backend.name] = backend.features()
            host = self._hosts.get((backend.name, applied))
            if host is None:
                table = self._tables[backend.name]
                host = self._hosts[backend.name, applied] = Host(table, applied)
            return host


def _applied(backend: Backend, network: NetworkMode) -> tuple[str, ...]:
    """Return what `backend` applies; a namespace closes nothing once a link leads out."""
    offered = backend.capabilities.mechanisms
    return tuple(name for name in offered if name != "netns" or network == "none")


def _network(compiled: Compiled, asked: NetworkMode) -> NetworkMode:
    """Return the network of a sandbox: something open needs one, and one may be asked for."""
    return asked if mechanisms.reach(compiled.net).closed else "nat"


def _nothing_given() -> InvalidArgument:
    return InvalidArgument("policy: give policy or network_rules", field="policy")


def _given(asked: Given) -> object:
    """Return what the request itself says, None for nothing."""
    said = asked.policy, asked.network_rules
    return None if said == (None, None) else said


def _granted(account: Account, strict: bool) -> Account:
    if strict and account.notes:
        require_all(account.rows)
    return account


def _digest(*content: object) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(content)).digest()
