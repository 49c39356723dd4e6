"""Secrets of requests: who may have which, and how they stay out of what the engine keeps.

A secret goes to the backend in the spec of its sandbox's create. The engine itself keeps hidden
values: its arguments are shown to callers, and journalled.
"""

from __future__ import annotations

import msgspec

from dsecd.backends.abc import Backend
from dsecd.backends.spec import Spec
from dsecd.doors.reach import Reach
from dsecd.secrets.secret import parse, redacted
from libdsec.errors import InvalidArgument, Unsupported
from libdsec.model import DSecContainerRunArgs


def granted(spec: Spec, args: DSecContainerRunArgs, backend: Backend) -> Spec:
    """Return `spec` with the secrets of `args`.

    Raises `InvalidArgument` for what is no secret, or not of a host that the policy opens,
    `Unsupported` when `backend` cannot.
    """
    if not args.secrets:
        return spec
    secrets = parse(args.secrets)
    if spec.policy is None:
        raise InvalidArgument(
            "secrets: give a policy, or network_rules, that allows their hosts", field="secrets"
        )
    reach = Reach(spec.policy.net)
    for secret in secrets:
        if reach.ruling(secret.host) is None:
            raise InvalidArgument(
                f"secrets: the policy does not allow {secret.host} at tcp port 443; allow it, or "
                "leave its secret out",
                field="secrets",
            )
    if not backend.capabilities.secrets:
        raise Unsupported(
            f"secrets are not offered by the {backend.name} backend here",
            reason="it has no proxy that could add them",
        )
    return msgspec.structs.replace(spec, secrets=secrets)


def hidden(args: DSecContainerRunArgs) -> DSecContainerRunArgs:
    """Return `args` as they may be shown and kept."""
    if not args.secrets:
        return args
    return msgspec.structs.replace(args, secrets=redacted(args.secrets))


def spent(spec: Spec) -> Spec:
    """Return `spec` once its sandbox was made: without its secrets."""
    return msgspec.structs.replace(spec, secrets=()) if spec.secrets else spec
