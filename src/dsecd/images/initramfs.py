"""What a guest of a microVM starts from: its agent as PID 1, and a shell."""

from __future__ import annotations

from dsecd.images import cpio


def initramfs(init: bytes, shell: bytes) -> bytes:
    """Return the archive of a static `dsec-init` and a static shell; equal input, equal bytes."""
    return cpio.archive(
        (
            cpio.directory("dev"),
            # standard streams of PID 1 before it has mounted devtmpfs
            cpio.character_device("dev/console", 5, 1),
            cpio.character_device("dev/null", 1, 3, 0o666),
            cpio.directory("proc"),
            cpio.directory("sys"),
            cpio.file("init", init, 0o755),
            cpio.file("shell", shell, 0o755),
        )
    )
