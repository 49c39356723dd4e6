"""What every command shares: the connection's options, running its coroutine, reporting errors."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import click

from dsec import output
from libdsec import DSecClient
from libdsec.errors import DSecError, Exhausted, NotFound, PermissionDenied, Timeout, Unsupported


@dataclass
class Settings:
    """The options before the command's name."""

    endpoint: str | None = None
    token: str | None = None
    ca_file: str | None = None
    json: bool = False

    def client(self) -> DSecClient:
        return DSecClient(
            self.endpoint, token=self.token, ca_file=self.ca_file, reconnect_timeout=10.0
        )


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--json``; also understood before the command's name."""

    def note(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value:
            context.ensure_object(Settings).json = True

    return click.option(
        "--json", is_flag=True, expose_value=False, callback=note, help="Print JSON for programs."
    )(command)


def connected(work: Callable[..., Coroutine[Any, Any, int | None]]) -> Callable[..., None]:
    """Make a click command of ``async work(settings, client, **options)``.

    Its return value is the exit code. A `DSecError` becomes one line that says what to do.
    """

    @click.pass_context
    @functools.wraps(work)
    def command(context: click.Context, /, **options: Any) -> None:
        settings = context.ensure_object(Settings)

        async def run() -> int | None:
            async with settings.client() as client:
                return await work(settings, client, **options)

        context.exit(run_reporting(settings, run))

    return command


def run_reporting(settings: Settings, run: Callable[[], Coroutine[Any, Any, int | None]]) -> int:
    """Run a coroutine to its exit code; errors are printed. Ctrl-C is 130."""
    try:
        return asyncio.run(run()) or 0
    except DSecError as error:
        report(settings, error)
    except BrokenPipeError:
        # the reader of our output went away (`| head`): not an error worth words
        sys.stderr.close()
        return 141
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        output.error(settings.json, "os_error", f"{error.strerror or error}{where}")
    except KeyboardInterrupt:
        return 130
    return 1


_ADVICE: dict[type[DSecError], str] = {
    Exhausted: "stop sandboxes (`dsec ps`, `dsec stop`) or try again later",
    PermissionDenied: "check the token or the user",
    Unsupported: "see `dsec check`",
    Timeout: "try again, or give a longer --timeout",
}


def report(settings: Settings, error: DSecError) -> None:
    """Print `error` in one line: what is wrong, and what to do when the message does not say."""
    message = " ".join(error.message.split())
    advice = _missing(message) if isinstance(error, NotFound) else _ADVICE.get(type(error), "")
    if advice and ";" not in message:
        message = f"{message}; {advice}"
    output.error(settings.json, error.code, message, retryable=error.retryable)


def _missing(message: str) -> str:
    """Where to look for the right name of what was not found."""
    if "sandbox" in message:
        return "see `dsec ps`"
    return "see `dsec layer ls`" if "layer" in message or "image" in message else ""
