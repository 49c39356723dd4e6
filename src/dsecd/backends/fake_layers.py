"""Layers of the fake backend."""

from __future__ import annotations

import time

from dsecd.images.tool import Report, unreported
from libdsec.errors import AlreadyExists, NotFound
from libdsec.model import Collected, LayerCollapse, LayerImport, LayerInfo


class FakeLayers:
    """Names only."""

    def __init__(self) -> None:
        self.known: dict[str, LayerInfo] = {}

    async def list(self) -> list[LayerInfo]:
        return list(self.known.values())

    async def get(self, name: str) -> LayerInfo:
        if name not in self.known:
            raise NotFound(f"no layer {name!r}")
        return self.known[name]

    async def import_(self, args: LayerImport, report: Report = unreported) -> LayerInfo:
        if args.name in self.known and not args.replace:
            raise AlreadyExists(f"layer {args.name!r} exists")
        for done in range(100):
            report("reading", done, 100)
        digest = f"fake:{args.source}"
        info = LayerInfo(name=args.name, digest=digest, size_bytes=0, created_at=time.time())
        self.known[args.name] = info
        return info

    async def collapse(self, args: LayerCollapse, report: Report = unreported) -> LayerInfo:
        made = LayerImport(name=args.to, source=args.name, replace=args.replace)
        return await self.import_(made, report)

    async def remove(self, name: str) -> None:
        if self.known.pop(name, None) is None:
            raise NotFound(f"no layer {name!r}")

    async def stats(self) -> dict[str, float]:
        return {}

    async def collect(self, grace_s: float | None, wait_s: float | None) -> Collected:
        return Collected(marked=0, deleted=0, freed_bytes=0)
