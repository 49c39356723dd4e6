"""What saving a sandbox's changes as a layer has in common, whatever it runs in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from dsecd.images import names
from dsecd.images.builder import Recipe
from dsecd.images.environment import override
from dsecd.images.library import Gate, Library, Named
from dsecd.images.manifest import Config, Origin
from dsecd.images.model import Node
from dsecd.images.sources.report import Report
from dsecd.images.sources.sink import Sink
from dsecd.images.sources.upper import RESIDUE, Rule
from libdsec.model import PackArgs, Packed

# Made by dsecd for each sandbox; the next one gets its own
IDENTITY = tuple(Rule(f"etc/{name}") for name in ("hostname", "hosts", "machine-id", "resolv.conf"))


class Base(msgspec.Struct, frozen=True):
    """What a sandbox was made of."""

    sandbox: str
    layers: tuple[str, ...]  # digests, bottom first
    defaults: Config


def rules(args: PackArgs) -> tuple[Rule, ...]:
    """Return what of a sandbox's changes does not go into the layer."""
    return (*IDENTITY, *(RESIDUE if args.clean else ()), *(Rule(path) for path in args.omit))


async def make_layer(
    library: Library,
    base: Base,
    args: PackArgs,
    read: Callable[[Sink], Sequence[Node]],
    gate: Gate,
    hold: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
) -> Named:
    """Make the layer of the trees that `read` returns and name it: see `Library.make`."""
    recipe = Recipe(
        kind=names.kind(names.normalise(args.name)),
        config=_config(base, args),
        parents=base.layers,
        origin=Origin(
            source=f"sandbox {base.sandbox}", builder=args.builder, created_at=time.time()
        ),
    )
    return await library.make(args.name, read, recipe, args.replace, gate, hold)


def packed(made: Named, frozen_ms: float, reports: Sequence[Report]) -> Packed:
    """Return the answer to the caller."""
    return Packed(
        name=made.name,
        digest=made.digest,
        size_bytes=made.manifest.content_bytes,
        entries=made.manifest.entries,
        frozen_ms=frozen_ms,
        notes=[note for report in reports for note in report.notes()],
    )


def _config(base: Base, args: PackArgs) -> Config:
    if args.config is None:
        return base.defaults
    return override(base.defaults, Config(**msgspec.structs.asdict(args.config)))
