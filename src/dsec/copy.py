"""``dsec cp``: files and directory trees in and out of a sandbox."""

from __future__ import annotations

import os
import posixpath
from pathlib import Path

import click

from dsec import output
from dsec.session import Settings, connected, json_option
from libdsec import DSecClient, NotFound, Sandbox


def split(place: str) -> tuple[str, str]:
    """Split ``SANDBOX:/path``; a local path has no sandbox. ``./a:b`` is local."""
    name, colon, path = place.partition(":")
    if not colon or "/" in name or not name:
        return "", place
    return name, path or "."


@click.command("cp")
@click.argument("source")
@click.argument("destination")
@click.option("-u", "--user", metavar="USER", help="Act with this user's rights inside.")
@json_option
@connected
async def copy(
    settings: Settings, client: DSecClient, source: str, destination: str, user: str | None
) -> int:
    """Copy SOURCE to DESTINATION; one of them is SANDBOX:PATH.

    As cp -r does: into DESTINATION when that is a directory, else to that name.
    """
    (from_id, from_path), (to_id, to_path) = split(source), split(destination)
    if bool(from_id) == bool(to_id):
        raise click.UsageError("one of SOURCE and DESTINATION must be SANDBOX:PATH")
    sandbox = await client.connect(from_id or to_id)
    if to_id:
        size = await _into(settings, sandbox, Path(from_path), to_path, user)
    else:
        size = await _out_of(settings, sandbox, from_path, Path(to_path), user)
    if settings.json:
        output.json({"bytes": size})
    return 0


async def _into(
    settings: Settings, sandbox: Sandbox, local: Path, remote: str, user: str | None
) -> int:
    if not local.exists():
        raise FileNotFoundError(2, "no such file or directory:", str(local))
    if remote.endswith("/") or await _is_directory(sandbox, remote, user):
        remote = posixpath.join(remote, local.resolve().name)
    with output.progress(local.name, _tree_size(local), silent=settings.json) as advance:
        return await sandbox.files.upload(local, remote, user=user, on_progress=advance)


async def _out_of(
    settings: Settings, sandbox: Sandbox, remote: str, local: Path, user: str | None
) -> int:
    info = await sandbox.files.get_info(remote, user=user)
    if local.is_dir():
        local = local / (posixpath.basename(remote.rstrip("/")) or "root")
    total = info.size if info.type == "file" else None
    with output.progress(info.name, total, silent=settings.json) as advance:
        return await sandbox.files.download(remote, local, user=user, on_progress=advance)


async def _is_directory(sandbox: Sandbox, path: str, user: str | None) -> bool:
    try:
        return (await sandbox.files.get_info(path, user=user)).type == "dir"
    except NotFound:
        return False


def _tree_size(root: Path) -> int:
    """Return the bytes of content at and below `root`; links are not followed."""
    if not root.is_dir():
        return root.stat().st_size
    total = 0
    for directory, _, names in os.walk(root):
        total += sum(os.lstat(os.path.join(directory, name)).st_size for name in names)  # noqa: PTH118
    return total
