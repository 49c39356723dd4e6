"""One error type per situation a user can be in.

Every error carries `code` (stable, goes over the wire), `retryable` (whether the same call may
succeed later without any change) and a message that says what to do. The wire carries
``{code, message, detail}``; `from_wire` and `to_wire` are the only translation.
"""

from __future__ import annotations

from typing import Any, ClassVar


class DSecError(Exception):
    """Base of every error that DSec raises on purpose."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.detail: dict[str, Any] = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return (from_wire, (to_wire(self),))


class InvalidArgument(DSecError):
    """The request is malformed; `detail["field"]` names the argument."""

    code = "invalid_argument"


class NotFound(DSecError):
    """The sandbox, command, session, layer or path does not exist."""

    code = "not_found"


class AlreadyExists(DSecError):
    """The name is taken."""

    code = "already_exists"


class WrongState(DSecError):
    """The sandbox's state does not allow the operation; `detail["state"]` names the state."""

    code = "wrong_state"


class PermissionDenied(DSecError):
    """The token is missing or wrong, or the user inside the sandbox lacks the right."""

    code = "permission_denied"


class Unsupported(DSecError):
    """This host or backend cannot do it; `detail["reason"]` says why."""

    code = "unsupported"


class Exhausted(DSecError):
    """A limit is reached: host capacity, disk of the upper layer, pids, output, frame size."""

    code = "exhausted"
    retryable = True


class Timeout(DSecError):
    """The deadline given by the caller passed."""

    code = "timeout"
    retryable = True


class Unavailable(DSecError):
    """The daemon or the sandbox's channel cannot be reached now."""

    code = "unavailable"
    retryable = True


class Internal(DSecError):
    """A fault of DSec itself. Please report it with the daemon's log."""

    code = "internal"


class CommandFailed(DSecError):
    """`check=True` was asked and the command failed; `result` holds its `CommandResult`."""

    code = "command_failed"
    result: Any = None


ERRORS: dict[str, type[DSecError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument, NotFound, AlreadyExists, WrongState, PermissionDenied, Unsupported,
        Exhausted, Timeout, Unavailable, Internal, CommandFailed,
    )
}  # fmt: skip


def to_wire(error: DSecError) -> dict[str, Any]:
    """Return the wire form ``{code, message, detail}`` of `error`."""
    return {"code": error.code, "message": error.message, "detail": error.detail}


def from_wire(body: dict[str, Any]) -> DSecError:
    """Return the error that `body` describes; an unknown code becomes `Internal`."""
    kind = ERRORS.get(str(body.get("code")), Internal)
    return kind(str(body.get("message", "")), **dict(body.get("detail") or {}))
