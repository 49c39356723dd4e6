"""Readings of pressure and memory, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

from dsecd.host import pressure, tree

TEXT = (
    "some avg10=1.24 avg60=0.43 avg300=0.19 total=2474684\n"
    "full avg10=1.00 avg60=0.40 avg300=0.10 total=2354552\n"
)


def test_pressure_of_host_and_sandbox(tmp_path: Path) -> None:
    host = tmp_path / "proc/pressure"
    host.mkdir(parents=True)
    (host / "memory").write_text(TEXT)
    seen = pressure.read("memory", root=f"{tmp_path}/")
    assert seen is not None
    assert seen.some == pressure.Stall(1.24, 0.43, 0.19, 2.474684)
    assert seen.full.avg10 == 1.0
    assert pressure.read("io", root=f"{tmp_path}/") is None
    assert pressure.read("memory", cgroup=f"{tmp_path}/gone") is None
    assert pressure.parse("some avg10=2.00 avg60=0.00 avg300=0.00 total=5\n").full.avg10 == 0.0


def test_memory(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\nSwapTotal: 0 kB\nHugePages: 0\n"
    )
    seen = pressure.memory(str(tmp_path))
    assert (seen.total_bytes, seen.available_bytes) == (1000 * 1024, 600 * 1024)


def test_cpuinfo_is_cut_and_numbered() -> None:
    host = "".join(
        f"processor\t: {n}\nmodel name\t: X\nsiblings\t: 8\n"
        f"core id\t\t: {n // 2}\ncpu cores\t: 4\n\n"
        for n in range(8)
    )
    text = tree.cpuinfo(host, 2)
    assert text.count("processor\t: ") == 2
    assert "siblings\t: 2" in text
    assert "core id\t\t: 1" in text
    assert "processor\t: 2" not in text
    arm = "processor\t: 0\nBogoMIPS\t: 50\n\nHardware\t: Y\n"
    assert tree.cpuinfo(arm, 1) == "processor\t: 0\nBogoMIPS\t: 50\n\n"
