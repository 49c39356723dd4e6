"""The part of `libdsec.model` that is about layers; import it from there."""

from __future__ import annotations

from typing import Literal

import msgspec

ImportStage = Literal["waiting", "fetching", "reading", "storing"]


class _Args(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Base of arguments."""


class _Info(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Base of results; a newer peer may add fields."""


class ImageConfig(_Info):
    """What a layer says about sandboxes made from it. Empty: as the layers below it say.

    `env` is merged over theirs; a new `entrypoint` takes their `cmd` away.
    """

    env: dict[str, str] = {}
    user: str = ""  # name, uid, or user:group
    workdir: str = ""
    entrypoint: list[str] = []
    cmd: list[str] = []


class LayerInfo(_Info):
    """op `layer.list` → list of `LayerInfo`; op `layer.get` (args `LayerRef`) → `LayerInfo`."""

    name: str
    digest: str
    size_bytes: int
    created_at: float
    in_use: int = 0
    config: ImageConfig | None = None


class LayerImport(_Args):
    """op `layer.import` → `LayerInfo`; with `progress` a stream of `ImportProgress`.

    `source` is a path on the daemon's host, a container image or a git repository (see
    `Layers.import_`). The tree is put at `at`, an absolute path; "" chooses by name and source.
    """

    name: str
    source: str
    replace: bool = False
    at: str = ""
    progress: bool = False


class LayerCollapse(_Args):
    """op `layer.collapse` → `LayerInfo`; with `progress` a stream of `ImportProgress`.

    One layer without parents is made of layer `name` and all below it, and gets the name `to`.
    """

    name: str
    to: str
    replace: bool = False
    progress: bool = False


class ImportProgress(_Info):
    """An item of `layer.import`, `layer.collapse`, and of `sandbox.create` while it pulls.

    Bytes done in this stage; `total` 0 when nobody knows.

    Items may be left out: a slow reader sees the newest.
    """

    stage: ImportStage
    done: int = 0
    total: int = 0


class LayerRef(_Args):
    """op `layer.remove` → None; sandboxes that use the layer keep it."""

    name: str


class CollectArgs(_Args):
    """op `layer.collect` → `Collected`. Times None: as the daemon is configured."""

    grace_s: float | None = None
    wait_s: float | None = None


class Collected(_Info):
    """What a look for garbage did: a first look marks, a later one deletes."""

    marked: int
    deleted: int
    freed_bytes: int


class CheckpointRef(_Args):
    """op `sandbox.rollback` → `Checkpoint`; op `sandbox.delete_checkpoint` → None."""

    id: str
    checkpoint: str


class Checkpoint(_Info):
    """op `sandbox.checkpoint` (args `SandboxRef`) → `Checkpoint`; `sandbox.checkpoints` → a list.

    `method`: swap, when nothing lived in the sandbox and no data was copied, or copy; memory, of a
    microVM, when that and all processes are in it. `frozen_ms`: how long that one stood still.
    """

    id: str
    method: str
    created_at: float
    took_ms: float = 0.0
    frozen_ms: float = 0.0


class PackArgs(_Args):
    """op `sandbox.pack_diff` → `Packed`.

    `clean` leaves out what builders leave behind (shell histories, caches, logs, /tmp), `omit`
    further paths: patterns relative to the root, with ``*``, ``?`` and ``**``. `config` is put over
    what the sandbox's environment says. `builder` says who made the layer; it is kept beside it
    and never shown to a sandbox.
    """

    id: str
    name: str
    replace: bool = False
    clean: bool = True
    omit: list[str] = []
    config: ImageConfig | None = None
    builder: str = ""


class Packed(_Info):
    """A layer made of a sandbox's changes, and for how long the sandbox stood still for it."""

    name: str
    digest: str
    size_bytes: int
    entries: int
    frozen_ms: float
    notes: list[str] = []
