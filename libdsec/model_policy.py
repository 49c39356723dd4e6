"""The part of `libdsec.model` that is about policies; import it from there."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

NetworkMode = Literal["none", "nat"]
Verdict = Literal["allow", "deny"]


class _Args(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Base of arguments."""


class _Info(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Base of results; a newer peer may add fields."""


class PolicyArgs(_Args):
    """A policy as in `DSecContainerRunArgs`, for a sandbox of which only the backend is known.

    op `policy.check` → `PolicySummary`; op `policy.explain` → list of `PolicyRow`.
    """

    policy: str | dict[str, Any] | None = None
    network_rules: dict[str, bool] | None = None
    network: NetworkMode = "none"
    backend: str = "container"


class PolicySummary(_Info):
    """A policy without a fault, in numbers.

    `network` is what a sandbox gets with it: "none" is loopback only. `entries` are those of the
    language, with the preset's; the others typed rules, which is what the kernel holds.
    """

    entries: int
    network: NetworkMode
    addresses: int = 0
    names: int = 0
    files: int = 0
    system: int = 0


class PolicyRow(_Info):
    """What becomes of one entry of a policy, or of a default that denies, on the daemon's host.

    State ``closed``: the rules on networks cannot be enforced here, so nothing is reachable at all.
    `by` are the mechanisms that enforce it (docs/policy.md), `reasons` say what is missing when it
    is not fully enforced, `remarks` what no host could enforce of it.
    """

    place: str
    verdict: Verdict
    text: str
    state: Literal["enforced", "partly", "closed", "not enforced"]
    layer: str = ""
    by: list[str] = []
    reasons: list[str] = []
    remarks: list[str] = []


class PolicyTest(_Args):
    """op `policy.test` → list of `PolicyAnswer`: what a policy says to ``tcp 192.0.2.1 443``."""

    questions: list[str]
    policy: str | dict[str, Any] | None = None
    network_rules: dict[str, bool] | None = None
    network: NetworkMode = "none"


class PolicyAnswer(_Info):
    """`because` are the entries that decided, [] when it was the default of `table`."""

    question: str
    verdict: Verdict
    table: str
    because: list[str] = []


class SandboxPolicy(_Info):
    """op `sandbox.policy` (args `SandboxRef`): the policy in force, and what becomes of it.

    `policy` None: nothing was asked for, and the platform's own protections hold.
    """

    network: NetworkMode
    policy: dict[str, Any] | None = None
    rows: list[PolicyRow] = []


class UpdateNetwork(_Args):
    """op `sandbox.update_network` → `SandboxInfo`: other network rules for a running sandbox."""

    id: str
    network_rules: dict[str, bool] | None = None
    policy: str | dict[str, Any] | None = None
    strict: bool = False
