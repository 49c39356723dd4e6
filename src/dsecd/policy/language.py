"""The language in which a policy is written: Python objects, TOML and JSON, all one form. Pure.

    extends = "swe"                          # a preset; its rules hold too

    [network]
    services = { pypi = true, npm = false }  # names of the catalogue

    [[network.rules]]                        # a service, domain, *.domain, address, CIDR or *
    allow = "*.example.com"
    ports = [443, "8000-8010"]

    [files]
    hide = ["/answers"]

    [[files.rules]]
    paths = ["/workspace/tests", "/**/conftest.py"]
    deny = ["write"]

Deny wins over allow. What is not opened is closed for the network and vsock; files, ioctls, mounts
and unix sockets of the sandbox's own are open unless `default` says otherwise. The meaning of each
rule once compiled is in `dsecd.policy.rules`; `docs/policy.schema.json` is the published schema.
"""

from __future__ import annotations

import tomllib
from typing import Annotated, Any, Literal

import msgspec

from dsecd.policy.rules import Access, Protocol, Verdict
from libdsec.errors import InvalidArgument

Preset = Literal["grader", "open", "sealed", "swe"]
Ports = list[Annotated[int, msgspec.Meta(ge=0, le=65535)] | str]
Requests = list[Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)] | str]
MAX_BYTES = 1 << 20  # of a policy in text form


class _Part(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A table of the language."""


class NetworkRule(_Part, frozen=True):
    """One of `allow` and `deny`: a service, domain, `*.domain`, address, CIDR, or `*`.

    `ports` are numbers and "FIRST-LAST"; `protocol` says of what: otherwise tcp for an allowed
    domain, tcp and udp for all else. Without ports an allowed domain opens 80 and 443; an allowed
    network, and everything that is denied, means every port, and every protocol, icmp among them.
    `private` keeps addresses that are not global in the answers for an allowed domain.
    """

    allow: str | None = None
    deny: str | None = None
    protocol: Protocol | None = None
    ports: Ports = []
    private: bool = False


class Network(_Part, frozen=True):
    """`services` turns services, domains and networks on or off with what they mean by default.

    With `check_names` allowed domains are reached through a relay only, at ports 443 and 80, which
    looks at the name that each connection is for: others on the same addresses stay closed.
    """

    default: Verdict | None = None
    check_names: bool | None = None
    services: dict[str, bool] = {}
    rules: list[NetworkRule] = []


class FileRule(_Part, frozen=True):
    """What may (`allow`) or may not (`deny`) be done to `paths`; see `rules.FilePolicy`."""

    paths: list[str]
    allow: list[Access] = []
    deny: list[Access] = []


class Files(_Part, frozen=True):
    """Paths as seen inside. `hide` denies every use, and even the name's content to its owner."""

    default: Verdict | None = None
    hide: list[str] = []
    rules: list[FileRule] = []


class Ioctls(_Part, frozen=True):
    """Requests by name (`FS_IOC_SETFLAGS`) or number (0x5413, "0x5413")."""

    default: Verdict | None = None
    allow: Requests = []
    deny: Requests = []


class MountRule(_Part, frozen=True):
    """A verdict on mounting a file system type (`tmpfs`, `bind`, `*`) at a path pattern."""

    allow: str | None = None
    deny: str | None = None
    at: str = "/**"


class Mounts(_Part, frozen=True):
    default: Verdict | None = None
    rules: list[MountRule] = []


class Unix(_Part, frozen=True):
    """Path patterns of sockets, and `@name` for abstract ones."""

    default: Verdict | None = None
    allow: list[str] = []
    deny: list[str] = []


class Vsock(_Part, frozen=True):
    """Peers as "CID", "CID:PORT", "CID:FIRST-LAST", with `*` for every context id."""

    default: Verdict | None = None
    allow: list[str] = []
    deny: list[str] = []


class Policy(_Part, frozen=True):
    """A whole policy; an empty one closes the network and leaves the rest as the platform has it.

    `version` is that of the language. What a policy says comes on top of the preset it `extends`.
    """

    version: Literal[1] = 1
    name: str = ""
    extends: Preset | None = None
    network: Network = Network()
    files: Files = Files()
    ioctls: Ioctls = Ioctls()
    mounts: Mounts = Mounts()
    unix: Unix = Unix()
    vsock: Vsock = Vsock()


def from_object(value: Any) -> Policy:
    """Return the policy in a `Policy`, or in dicts and lists of its form.

    Raises `InvalidArgument` that names the place (``network.rules[2].ports``).
    """
    if isinstance(value, Policy):  # made in Python, where nothing checked the types
        value = msgspec.to_builtins(value)
    try:
        policy = msgspec.convert(value, Policy)
        _bounded(msgspec.json.encode(policy))
    except (msgspec.ValidationError, UnicodeError, OverflowError) as error:
        raise _malformed(error) from error
    return policy


def from_json(text: str | bytes) -> Policy:
    """Return the policy in a JSON document. Raises `InvalidArgument`."""
    try:
        return msgspec.json.decode(_bounded(text), type=Policy)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _malformed(error) from error


def from_toml(text: str | bytes) -> Policy:
    """Return the policy in a TOML document. Raises `InvalidArgument`."""
    try:
        return from_object(tomllib.loads(_bounded(text).decode()))
    except (tomllib.TOMLDecodeError, UnicodeError, RecursionError) as error:
        raise _malformed(error) from error


def from_network_rules(rules: dict[str, bool]) -> Policy:
    """Return the policy of ``network_rules={"npm": False, "pypi": True}``: all else is closed."""
    return from_object({"network": {"services": rules}})


def to_json(policy: Policy) -> bytes:
    """Return `policy` as a JSON document."""
    return msgspec.json.format(msgspec.json.encode(policy), indent=2)


def to_toml(policy: Policy) -> str:
    """Return `policy` as a TOML document."""
    value = msgspec.to_builtins(policy)
    tables = [(name, part) for name, part in value.items() if isinstance(part, dict)]
    top = [
        f"{name} = {_toml(part)}\n" for name, part in value.items() if (name, part) not in tables
    ]
    return "".join(top) + "".join(_table(name, part) for name, part in tables)


def _table(name: str, part: dict[str, Any]) -> str:
    lines = [f"\n[{name}]\n"]
    rules = part.get("rules", [])
    lines += [f"{key} = {_toml(value)}\n" for key, value in part.items() if key != "rules"]
    for rule in rules:
        lines.append(f"\n[[{name}.rules]]\n")
        lines += [f"{key} = {_toml(value)}\n" for key, value in rule.items()]
    return "".join(lines)


def _toml(value: Any) -> str:
    """Return a value in TOML; for strings the escapes of JSON are a subset of TOML's, bar DEL."""
    if isinstance(value, dict):
        inner = ", ".join(f"{_toml(key)} = {_toml(part)}" for key, part in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(part) for part in value)}]"
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007F")


def schema() -> bytes:
    """Return the JSON schema of `Policy` (draft 2020-12), as published in docs/."""
    body = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "DSec policy"}
    return msgspec.json.format(msgspec.json.encode(body | msgspec.json.schema(Policy)), indent=2)


def _bounded(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    if len(data) > MAX_BYTES:
        raise InvalidArgument(
            f"policy: {len(data)} bytes, at most {MAX_BYTES} are read; use fewer, wider rules",
            field="policy",
        )
    return data


def _malformed(error: Exception) -> InvalidArgument:
    """Return the error for the user: msgspec ends its message with the place, as `$.files.hide`."""
    if isinstance(error, UnicodeError):
        return InvalidArgument("policy: holds text that is not UTF-8", field="policy")
    text, _, path = str(error).partition(" - at `")
    place = path.rpartition("$")[2].rstrip("`").lstrip(".") or "policy"
    return InvalidArgument(f"{place}: {text[:1].lower()}{text[1:]}", field=place)
