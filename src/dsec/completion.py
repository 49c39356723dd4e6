"""Tab completion: the shells' scripts, and names asked from the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import click
from click.shell_completion import CompletionItem, get_completion_class

from dsec.session import Settings
from libdsec import DSecClient, DSecError

_PATIENCE_S = 1.0  # a completion that takes longer is worse than none

Ask = Callable[[DSecClient], Awaitable[list[tuple[str, str]]]]


def _ask(context: click.Context, prefix: str, ask: Ask) -> list[CompletionItem]:
    settings = context.find_object(Settings) or Settings()

    async def run() -> list[tuple[str, str]]:
        async with asyncio.timeout(_PATIENCE_S), settings.client() as client:
            return await ask(client)

    try:
        found = asyncio.run(run())
    except (DSecError, TimeoutError):
        return []
    return [CompletionItem(name, help=text) for name, text in found if name.startswith(prefix)]


def sandboxes(
    context: click.Context, parameter: click.Parameter, prefix: str
) -> list[CompletionItem]:
    """Complete the id of a running sandbox."""

    async def ask(client: DSecClient) -> list[tuple[str, str]]:
        return [(info.id, info.image) for info in await client.list_sandboxes()]

    return _ask(context, prefix, ask)


def layers(context: click.Context, parameter: click.Parameter, prefix: str) -> list[CompletionItem]:
    """Complete the name of a layer."""

    async def ask(client: DSecClient) -> list[tuple[str, str]]:
        return [(layer.name, layer.digest[:19]) for layer in await client.layers.list()]

    return _ask(context, prefix, ask)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash:  source <(dsec completion bash)
    zsh:   source <(dsec completion zsh)
    fish:  dsec completion fish | source
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root()
    script = kind(root.command, {}, "dsec", "_DSEC_COMPLETE")
    # bash's class asks the installed bash for its version; the script itself needs no bash here
    click.echo(script.source_template % script.source_vars())
