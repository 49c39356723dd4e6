"""A line of a policy: one entry of the language with the typed rules that it became. Pure."""

from __future__ import annotations

import msgspec

from dsecd.policy.rules import (
    FileRule,
    IoctlRule,
    MountRule,
    NameRule,
    NetRule,
    UnixRule,
    Verdict,
    VsockRule,
)

Rule = NetRule | NameRule | FileRule | IoctlRule | MountRule | UnixRule | VsockRule


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """`place` is where it stands (``network.rules[2]``), in the preset `layer` or, with "", in the
    policy itself; `text` is what it is about. `hidden` are path patterns.
    """

    place: str
    layer: str
    verdict: Verdict
    text: str
    nets: tuple[NetRule, ...] = ()
    names: tuple[NameRule, ...] = ()
    files: tuple[FileRule, ...] = ()
    hidden: tuple[str, ...] = ()
    ioctls: tuple[IoctlRule, ...] = ()
    mounts: tuple[MountRule, ...] = ()
    unix: tuple[UnixRule, ...] = ()
    vsock: tuple[VsockRule, ...] = ()

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All typed rules of the line; what it hides is not among them."""
        return (
            *self.nets, *self.names, *self.files, *self.ioctls, *self.mounts, *self.unix,
            *self.vsock,
        )  # fmt: skip

    def __str__(self) -> str:
        where = f"{self.layer}: {self.place}" if self.layer else self.place
        return f"{where} ({self.verdict} {self.text})"
