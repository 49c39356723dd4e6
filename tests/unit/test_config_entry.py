"""The service's entry: exit codes, messages, and what systemd is told."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dsecd import __main__ as entry
from dsecd.config import Config, Paths, Vm
from libdsec.errors import InvalidArgument, Unsupported


def test_bad_configuration_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "d.toml"
    file.write_text("[limits]\nsandboxs = 1\n")
    assert entry.main(["--config", str(file)]) == 2
    assert "did you mean limits.sandboxes" in capsys.readouterr().err


def test_without_root_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "d.toml"
    file.write_text("")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("dsecd.log.configure", lambda config: None)
    assert entry.main(["--config", str(file)]) == 1
    assert "must run as root" in capsys.readouterr().err


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="quantum"):
        entry.make_backend(Config(backend="quantum"))


def test_without_qemu_or_kernel_there_are_no_microvms_and_it_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    paths = Paths(state=str(tmp_path))

    def why(**vm: Any) -> str:
        backends = entry.make_backends(Config(backend="fake", paths=paths, vm=Vm(**vm)))
        assert backends.names == ["fake"]
        with pytest.raises(Unsupported) as caught:
            backends.get("microvm")
        with pytest.raises(Unsupported):
            backends.get("fullvm")
        return caught.value.message

    assert "qemu-system-x86_64 is not installed (vm.qemu)" in why()
    with pytest.raises(Unsupported, match=r'vm\.enabled is "yes", but qemu-system'):
        why(enabled="yes")
    (tmp_path / "qemu").write_text("#!/bin/sh\n")
    (tmp_path / "qemu").chmod(0o755)
    assert f"the guest's kernel is not at {tmp_path}/guest/kernel (vm.kernel)" in why(qemu="qemu")
    (tmp_path / "guest").mkdir()
    (tmp_path / "guest/kernel").touch()
    assert "jailed in containers, and this is the fake backend" in why(qemu="qemu")
    assert "turned virtual machines off (vm.enabled" in why(enabled="no")


async def test_systemd_is_told_ready_and_that_the_loop_turns() -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
    ):
        listener.bind(f"{directory}/notify")
        listener.setblocking(False)
        environ = {"NOTIFY_SOCKET": f"{directory}/notify", "WATCHDOG_USEC": "40000"}
        notifier = entry.Notifier(environ)
        notifier.send("READY=1")
        received: list[bytes] = []
        async with notifier.watchdog():
            while received.count(b"WATCHDOG=1") < 3:
                received.append(await asyncio.get_running_loop().sock_recv(listener, 100))
        assert received[0] == b"READY=1"
        entry.Notifier({}).send("READY=1")  # without systemd: nothing, and no error


def test_a_whole_daemon_ends_on_sigterm(tmp_path: Path) -> None:
    import subprocess
    import sys

    with tempfile.TemporaryDirectory(prefix="dsec-") as directory:
        file = tmp_path / "d.toml"
        file.write_text(
            f'backend = "fake"\n[paths]\nruntime = "{directory}/run"\nstate = "{directory}/lib"\n'
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "dsecd", "--config", str(file)], stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        line = process.stderr.readline()
        assert b'"ready"' in line
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        process.stderr.close()
        assert not (Path(directory) / "run/dsecd.sock").exists()
