"""A base, a workspace and toolkits become one stack of layers. Pure.

A layer that was made on top of others (a saved sandbox, a build step) names them as its parents; it
can only be used where exactly those lie below it, because its whiteouts and its opaque directories
mean nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dsecd.images.manifest import Config, Manifest
from libdsec.errors import InvalidArgument

MAX_LAYERS = 60  # look-ups slow down with depth, and a plan has room for so many


class Environment(msgspec.Struct, frozen=True):
    """Digests, bottom first, and the defaults of what runs on them."""

    layers: tuple[str, ...]
    config: Config


def compose(
    base: Manifest, workspace: Manifest | None = None, toolkits: Sequence[Manifest] = ()
) -> Environment:
    """Return the stack. Raises `InvalidArgument` for parts that do not fit on each other.

    A part that is in the stack already (a toolkit that a snapshot was made with) is not stacked
    twice. Of the defaults, later parts override earlier ones.
    """
    layers = [*base.parents, base.digest]
    config = base.config
    for role, part in (("workspace", workspace), *(("toolkit", toolkit) for toolkit in toolkits)):
        if part is None or part.digest in layers:
            continue
        if part.parents and part.parents != layers:
            raise InvalidArgument(
                f"{role} {part.digest[:12]} was made on top of other layers; use it as "
                "container_image, or with the base it was made on",
                field="workspace" if role == "workspace" else "toolkits",
            )
        layers.append(part.digest)
        config = override(config, part.config)
    if len(layers) > MAX_LAYERS:
        remedy = "use fewer toolkits"
        if base.parents:
            remedy = f"make one of the {len(base.parents) + 1} of the image: dsec layer collapse"
        raise InvalidArgument(
            f"the environment has {len(layers)} layers, at most {MAX_LAYERS} can be stacked; "
            + remedy,
            field="container_image",
        )
    return Environment(tuple(layers), config)


def override(below: Config, above: Config) -> Config:
    """Return `below` with what `above` sets; a new entry point takes the old command away."""
    return Config(
        env=below.env | above.env,
        user=above.user or below.user,
        workdir=above.workdir or below.workdir,
        entrypoint=above.entrypoint or below.entrypoint,
        cmd=above.cmd or ([] if above.entrypoint else below.cmd),
    )
