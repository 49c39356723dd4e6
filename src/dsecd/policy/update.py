"""A policy of a sandbox that runs gets another network; what it says beyond that stays. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from dsecd.policy.language import Policy
from dsecd.policy.presets import PRESETS
from libdsec.errors import InvalidArgument

FIXED = ("files", "ioctls", "mounts", "unix", "vsock")  # tables that hold as long as a sandbox


def with_network(present: Policy, given: Policy) -> Policy:
    """Return `present` with the network of `given`.

    Raises `InvalidArgument` if `given` says something else beyond the network than `present` does:
    files and system calls are closed before a sandbox's first process and stay as they are.
    """
    before, after = flattened(present), flattened(given)
    for table in FIXED:
        said = getattr(after, table)
        if said not in (getattr(Policy(), table), getattr(before, table)):
            raise InvalidArgument(
                f"{table}: only the network of a running sandbox can be changed; leave {table} "
                "out, or as the sandbox was created with",
                field=table,
            )
    if all(getattr(before, table) == getattr(after, table) for table in FIXED):
        return given
    return msgspec.structs.replace(before, name=given.name, network=after.network)


def flattened(policy: Policy) -> Policy:
    """Return `policy` with what it extends written out as its own."""
    if policy.extends is None:
        return policy
    base = PRESETS[policy.extends]
    tables = {
        table: _on(getattr(base, table), getattr(policy, table)) for table in ("network", *FIXED)
    }
    return Policy(name=policy.name, **tables)


def _on(base: Any, own: Any) -> Any:
    """Return a table of a policy on top of the same table of its preset."""
    return type(own)(
        **{name: _added(getattr(base, name), getattr(own, name)) for name in own.__struct_fields__}
    )


def _added(base: Any, own: Any) -> Any:
    if isinstance(own, dict):
        return {**base, **own}
    if isinstance(own, list):
        return [*base, *own]
    return base if own is None else own
