"""``client.layers``: the images that sandboxes are made of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from libdsec import build, model
from libdsec.build import Create, StepCallback
from libdsec.errors import AlreadyExists, NotFound
from libdsec.execution import TextCallback
from libdsec.link import Link
from libdsec.progress import ImportCallback, progress_items

LayerInfos: TypeAlias = list[model.LayerInfo]


class Layers:
    """The layers of the daemon's host."""

    def __init__(self, link: Link, create: Create) -> None:
        self._link = link
        self._create = create

    async def list(self) -> LayerInfos:
        """Return every layer with its digest, size and number of sandboxes that use it."""
        return await self._link.call("layer.list", {}, list[model.LayerInfo], retry=True)

    async def get(self, name: str) -> model.LayerInfo:
        """Return the layer with this name or digest. Raises `NotFound`, `InvalidArgument`."""
        ref = model.LayerRef(name=name)
        return await self._link.call("layer.get", ref, model.LayerInfo, retry=True)

    async def import_(
        self,
        name: str,
        source: str,
        *,
        replace: bool = False,
        at: str = "",
        on_progress: ImportCallback | None = None,
    ) -> model.LayerInfo:
        """Make layer `name` of `source`, which the daemon reads.

        A path on the daemon's host (directory, tar, EROFS image), a container image
        (``docker://registry/name:tag``, ``oci:directory``, ``oci-archive:file``,
        ``docker-archive:file``), or a git repository: ``git:URL``, ``git:/path``, with ``#branch``,
        ``#tag`` or ``#commit`` behind it. The first part of the name tells the kind: ``base/``,
        ``workspace/``, ``toolkit/`` or ``snapshot/``. The tree is put at `at`, by default at the
        root, a workspace from git at ``/workspace``.

        Takes as long as it takes. Raises `AlreadyExists` when the name is taken, unless `replace`;
        `InvalidArgument`, `NotFound` (no such ref) or `Unavailable` for a source that cannot be
        read.
        """
        args = model.LayerImport(
            name=name, source=source, replace=replace, at=at, progress=on_progress is not None
        )
        return await self._link.call(
            "layer.import", args, model.LayerInfo, timeout_s=0, on_item=progress_items(on_progress)
        )

    async def collapse(
        self,
        name: str,
        to: str,
        *,
        replace: bool = False,
        on_progress: ImportCallback | None = None,
    ) -> model.LayerInfo:
        """Make one layer of layer `name` (or a digest) and all that it was made on, named `to`.

        A sandbox of it has the same files and defaults; the new layer has no layers below it. Adds
        no content to the store. `to` may be `name` itself, with `replace`. Raises `NotFound`,
        `AlreadyExists` when `to` is taken, unless `replace`.
        """
        args = model.LayerCollapse(
            name=name, to=to, replace=replace, progress=on_progress is not None
        )
        return await self._link.call(
            "layer.collapse", args, model.LayerInfo, timeout_s=0,
            on_item=progress_items(on_progress),
        )  # fmt: skip

    async def build(
        self,
        name: str,
        context: str | os.PathLike[str],
        *,
        dockerfile: str = "Dockerfile",
        arguments: Mapping[str, str] | None = None,
        replace: bool = False,
        clean: bool = True,
        on_output: TextCallback | None = None,
        on_step: StepCallback | None = None,
        network: model.NetworkMode = "nat",
        memory_limit_mb: int = 2048,
        cpu_cores_limit: float = 2.0,
        pids_limit: int = 4096,
        disk_limit_mb: int = 16384,
    ) -> model.Packed:
        """Make layer `name` by the Dockerfile of the local directory `context`.

        The steps run in a sandbox of the base, which is then saved. FROM (one stage, a layer or
        an image of a registry), ARG, ENV, WORKDIR, USER, COPY, RUN, ENTRYPOINT and CMD are
        understood, anything else is refused; ``.dockerignore`` is honoured. `arguments` are values
        for ARGs. ``http_proxy`` and its like in our environment are set for RUN and not saved.
        `dockerfile` is relative to the context. `on_step` is told each step as it begins,
        `on_output` what commands write; `clean` as in `Sandbox.pack_diff`.

        A build that fails or is cancelled leaves nothing. Raises `InvalidArgument` with the line at
        fault, `CommandFailed` with line, command and the end of its output, `AlreadyExists`.
        """
        place = Path(context)
        plan = build.read_plan(place, dockerfile, arguments or {}, on_output, on_step)
        if not replace:
            await self._expect_free(name)
        limits = model.DSecContainerRunArgs(
            container_image="",
            network=network,
            memory_limit_mb=memory_limit_mb,
            cpu_cores_limit=cpu_cores_limit,
            pids_limit=pids_limit,
            disk_limit_mb=disk_limit_mb,
            labels={"dsec.build": name},
        )
        saving = model.PackArgs(id="", name=name, replace=replace, clean=clean)
        return await build.build(self._link, self._create, self.get, plan, saving, limits)

    async def _expect_free(self, name: str) -> None:
        """Fail before the work, not after it."""
        try:
            found = await self.get(name)
        except NotFound:
            return
        if found.name in (name, f"{name}:latest"):  # and not a digest that begins so
            raise AlreadyExists(
                f"layer {found.name} exists; use replace to move the name to new content",
                name=found.name,
            )

    async def remove(self, name: str) -> None:
        """Remove the name of a layer, or by digest all its names. Raises `NotFound`.

        Sandboxes that use it keep it; its bytes go when nothing refers to them (`collect`).
        """
        await self._link.call("layer.remove", model.LayerRef(name=name), type(None))

    async def collect(
        self, *, grace_s: float | None = None, wait_s: float | None = None
    ) -> model.Collected:
        """Look for what no name leads to. The daemon does so every hour by itself.

        A first look marks what was not used for `grace_s`, one at least `wait_s` later deletes it.
        """
        args = model.CollectArgs(grace_s=grace_s, wait_s=wait_s)
        return await self._link.call("layer.collect", args, model.Collected, timeout_s=0)
