"""What one microVM holds: as data for the journal, and as it is now."""

from __future__ import annotations

import msgspec

from dsecd.backends.abc import Handle, Save
from dsecd.backends.microvm_machine import GuestMachine
from dsecd.backends.vm_jailed import HeldJail
from dsecd.host.vm_plan import Ram, VmPlan
from dsecd.images.manifest import Config as Defaults

BACKEND = "microvm"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A moment to come back to: `place` is a directory of `microvm_saved.SavedMachines`."""

    id: str
    place: str
    created_at: float


class Held(HeldJail, kw_only=True):
    """The journalled part of a microVM."""

    layers: tuple[str, ...]  # digests, bottom first
    plan: VmPlan
    upper_bytes: int  # size of its disk
    defaults: Defaults = Defaults()  # of its image
    checkpoints: tuple[Checkpoint, ...] = ()
    made: int = 0  # checkpoints ever, deleted ones too
    # names of saved machines, "" for none:
    base: str = ""  # on whose memory it stands
    saved: str = ""  # itself, paused
    returning: str = ""  # a rollback to that is under way


class Holding:
    """All that one microVM holds."""

    def __init__(self, held: Held, defaults: Defaults) -> None:
        self.held, self.defaults = held, defaults
        self.counted = held.layers  # layers that have us as a user
        self.machine: GuestMachine | None = None
        self.pid = 0  # of the jail

    def handle(self) -> Handle:
        return Handle(
            sandbox=self.held.jail.sandbox,
            backend=BACKEND,
            resources=msgspec.msgpack.encode(self.held),
        )

    def places(self) -> tuple[str, ...]:
        """Return the saved machines that have us as a user, each as often as it is counted."""
        held = self.held
        return (held.base, held.saved, *(one.place for one in held.checkpoints))

    def keep(self, **changes: object) -> None:
        """See `vm_jailed.Jailed`."""
        self.held = msgspec.structs.replace(self.held, **changes)

    async def change(self, save: Save, **fields: object) -> None:
        """Journal it with other `fields`; a failure leaves it as it was."""
        before = self.held
        self.keep(**fields)
        try:
            await save(self.handle())
        except BaseException:
            self.held = before
            raise


def decode(handle: Handle) -> Held:
    return msgspec.msgpack.decode(handle.resources, type=Held)


def alone(plan: VmPlan) -> VmPlan:
    """Return `plan` with memory of its own: as it is for all but branches."""
    return msgspec.structs.replace(plan, ram=Ram())
