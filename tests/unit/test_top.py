"""``dsec top``: rates, order and what fits a screen; and the command, on a terminal, of a peer."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from dsec import top
from dsec.main import cli
from dsec.top import ORDERS, Reading, View
from libdsec.errors import WrongState
from libdsec.model import (
    CpuClass,
    DSecContainerRunArgs,
    HostStats,
    Metrics,
    SandboxInfo,
    SandboxRef,
)
from tests.unit.wire_server import ServerCall, WireServer, in_thread

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def info(name: str, image: str = "base/debian:12") -> SandboxInfo:
    return SandboxInfo(id=name, state="running", image=image)


def reading(**uses: Metrics) -> Reading:
    return Reading(HostStats(), {name: (info(name), use) for name, use in uses.items()})


def row(name: str, **fields: object) -> top.Row:
    (made,) = top.rows(Reading(), reading(**{name: Metrics(**fields)}))  # type: ignore[arg-type]
    return made


def shown(host: HostStats, rows: list[top.Row], view: View, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as captured:
        console.print(top.picture(host, rows, view, height))
    return captured.get().splitlines()


# --- rates ----------------------------------------------------------------------------------------


def test_rates_are_over_the_time_the_daemon_counted() -> None:
    before = reading(a=Metrics(cpu_usage_s=10.0, rx_bytes=1000, tx_bytes=50, uptime_s=100.0))
    after = reading(a=Metrics(cpu_usage_s=13.0, rx_bytes=3000, tx_bytes=50, uptime_s=102.0))
    (found,) = top.rows(before, after)
    assert found.cpu_percent == pytest.approx(150)
    assert (found.rx_bytes_per_s, found.tx_bytes_per_s, found.network) == (1000, 0, 1000)


def test_what_cannot_be_compared_has_no_rate() -> None:
    after = reading(new=Metrics(cpu_usage_s=3.0, uptime_s=2.0))
    assert top.rows(Reading(), after)[0].cpu_percent is None
    assert top.rows(after, after)[0].cpu_percent is None, "no time has passed"
    again = reading(new=Metrics(cpu_usage_s=3.0, uptime_s=0.5))
    assert top.rows(after, again)[0].cpu_percent is None, "re-adopted: its clock began again"


def test_a_counter_that_began_again_is_no_negative_rate() -> None:
    before = reading(a=Metrics(rx_bytes=5000, uptime_s=1.0))
    after = reading(a=Metrics(rx_bytes=10, uptime_s=2.0))
    assert top.rows(before, after)[0].rx_bytes_per_s == 0


def test_sandboxes_that_ended_are_not_shown() -> None:
    before = reading(a=Metrics(uptime_s=1.0), b=Metrics(uptime_s=1.0))
    assert [each.id for each in top.rows(before, reading(b=Metrics(uptime_s=2.0)))] == ["b"]


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sort", "field", "low", "high"),
    [
        ("memory", "memory_bytes", 1, 2),
        ("shared", "memory_shared_bytes", 1, 2),
        ("swapped", "memory_swapped_bytes", 1, 2),
        ("disk", "disk_bytes", 1, 2),
        ("pressure", "stalled", {"cpu": 3.0, "io": 1.0}, {"cpu": 0.0, "io": 4.0}),
        ("uptime", "uptime_s", 1.0, 2.0),
    ],
)
def test_the_highest_comes_first(sort: str, field: str, low: object, high: object) -> None:
    rows = [row("a", **{field: low}), row("b", **{field: high}), row("c", **{field: low})]
    assert [each.id for each in top.ordered(rows, View(sort))] == ["b", "a", "c"]
    assert [each.id for each in top.ordered(rows, View(sort, reverse=True))] == ["a", "c", "b"]


def test_rates_and_ids_sort_too() -> None:
    before = reading(a=Metrics(uptime_s=1.0), b=Metrics(uptime_s=1.0))
    after = reading(a=Metrics(uptime_s=2.0, tx_bytes=9), b=Metrics(uptime_s=2.0, cpu_usage_s=0.5))
    rows = top.rows(before, after)
    order = {name: [each.id for each in top.ordered(rows, View(name))] for name in ORDERS}
    assert order["cpu"] == ["b", "a"]
    assert order["network"] == order["id"] == ["a", "b"]


def test_keys_choose_the_order() -> None:
    assert len({order.key for order in ORDERS.values()} | {"r", "q"}) == len(ORDERS) + 2
    view = View()
    view.press("m")
    assert (view.sort, view.descending) == ("memory", True)
    view.press("r")
    assert (view.sort, view.descending) == ("memory", False)
    view.press("i")
    assert (view.sort, view.descending) == ("id", False), "a new order begins the usual way round"
    view.press("\x1b[D")  # an arrow, whose D is no key
    view.press("Z?")
    assert (view.sort, view.ended) == ("id", False)
    view.press("cq")
    assert (view.sort, view.ended) == ("cpu", True)


# --- what is shown --------------------------------------------------------------------------------


def test_the_host_says_what_it_has_promised() -> None:
    host = HostStats(
        node="n1", version="1.2", sandboxes=3, memory_total_bytes=24 << 30,
        memory_available_bytes=6 << 30, memory_requested_bytes=48 << 30, memory_overcommit=2.0,
        cpus=2, cpu_requested=7.0, cpu_overcommit=3.5, swap_total_bytes=12 << 30,
        swap_free_bytes=11 << 30, reclaim_need_bytes=512 * MIB,
    )  # fmt: skip
    lines = "\n".join(shown(host, [], View(), 120, 20))
    assert "n1: 3/∞ sandboxes, dsecd 1.2" in lines
    assert "18.0G of 24.0G in use, swap: 1.0G of 12.0G, 512M to reclaim" in lines
    assert "48.0G memory (2.00 of the host's), 7 CPUs (3.50 of 2)" in lines


def test_a_row_has_all_of_a_sandbox() -> None:
    use = Metrics(
        memory_bytes=300 * MIB, memory_shared_bytes=20 * MIB, memory_swapped_bytes=7 * MIB,
        disk_bytes=5 * MIB, cpu_usage_s=0.42, rx_bytes=2048, tx_bytes=512, uptime_s=3725.0,
        stalled={"cpu": 1.0, "memory": 12.4, "io": 0.0},
    )  # fmt: skip
    rows = top.rows(reading(n1=Metrics(uptime_s=3724.0)), reading(n1=use))
    *_, line, keys = shown(HostStats(), rows, View(), 120, 20)
    assert line.split() == [
        "n1", "running", "std", "42%", "300M", "20.0M", "7.0M", "5.0M", "2.0K", "512", "mem", "12%",
        "1h", "base/debian:12",
    ]  # fmt: skip
    assert "q=quit" in keys


@pytest.mark.parametrize(("cpu_class", "cell"), list(top._CLASSES.items()))
def test_a_row_has_state_and_class(cpu_class: CpuClass, cell: str) -> None:
    paused = SandboxInfo(id="n1", state="paused", image="i", cpu_class=cpu_class)
    rows = top.rows(Reading(), Reading(HostStats(), {"n1": (paused, Metrics())}))
    assert shown(HostStats(), rows, View(), 120, 20)[-2].split()[:3] == ["n1", "paused", cell]
    assert rows[0].cpu_class == cpu_class


def test_the_order_is_marked() -> None:
    head = shown(HostStats(), [], View("memory"), 120, 20)[3]
    assert "↓MEM" in head
    assert "↓CPU" not in head
    head = shown(HostStats(), [], View("network", reverse=True), 120, 20)[3]
    assert "↑RX/S" in head
    assert "↑TX/S" in head


@pytest.mark.parametrize(("width", "height"), [(40, 8), (80, 24), (132, 50), (80, 5)])
def test_it_fits_the_screen(width: int, height: int) -> None:
    image = "registry.example.com/a/rather/long/name/of/an/image:with-a-tag"
    use = Metrics(memory_bytes=100 * MIB, uptime_s=1.0, stalled={"memory": 99.0})
    all_ = {f"host12-{n}": (info(f"host12-{n}", image), use) for n in range(3000)}
    rows = top.rows(Reading(), Reading(HostStats(), all_))
    lines = shown(HostStats(), rows, View(), width, height)
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert lines[-1].startswith(f"{3000 - (height - 5)} more; ")


def test_names_are_not_markup() -> None:
    rows = top.rows(Reading(), Reading(HostStats(), {"a": (info("a", "[red]x"), Metrics())}))
    assert "[red]x" in shown(HostStats(), rows, View(), 120, 20)[-2]


def test_sizes_are_short() -> None:
    sizes = [0, 999, 1000, 1023, 1536, 100 * 1024, 1023 << 10, 24 << 30, 5 << 40]
    made = [top._size(size) for size in sizes]
    assert made == ["0", "999", "1.0K", "1.0K", "1.5K", "100K", "1.0M", "24.0G", "5.0T"]


# --- the command ----------------------------------------------------------------------------------


class Busy(WireServer):
    """Each of its sandboxes has used half a CPU all its life; the first has the most memory."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.began = time.monotonic()

    async def metrics(self, call: ServerCall) -> Metrics:
        name = call.args(SandboxRef).id
        self.find(name)
        if name == "n1-4":
            raise WrongState("sandbox n1-4 is stopping", state="stopping")
        up = time.monotonic() - self.began
        memory = MIB * (100 - int(name.partition("-")[2]))
        return Metrics(memory_bytes=memory, cpu_usage_s=up / 2, uptime_s=up)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Busy]:
    made = Busy(tmp_path)
    with in_thread(made):
        for number in range(4):
            labels = {"job": "a" if number < 2 else "b"}
            made.make(str(number), DSecContainerRunArgs(container_image="base/x", labels=labels))
        yield made


def once(server: Busy, *words: str, code: int = 0) -> str:
    argv = ["top", "--once", "--interval", "0.2", *words]
    done = CliRunner().invoke(cli, argv, env={"DSEC_ENDPOINT": server.socket})
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def test_once_as_json(server: Busy) -> None:
    made = json.loads(once(server, "--json", "--sort", "memory"))
    assert made["host"]["cpus"] == 2
    assert [each["id"] for each in made["sandboxes"]] == ["n1-1", "n1-2", "n1-3"]
    assert set(made["sandboxes"][0]) == set(top.Row.__struct_fields__)
    assert [each["cpu_percent"] for each in made["sandboxes"]] == pytest.approx([50] * 3)


def test_once_for_people_and_without_a_terminal(server: Busy) -> None:
    lines = once(server, "--sort", "memory", "--reverse").splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["n1-3", "n1-2", "n1-1"]
    assert "50%" in lines[-1]
    assert "quit" not in lines[-1]


def test_it_shows_what_was_asked_for(server: Busy) -> None:
    made = json.loads(once(server, "--json", "-l", "job=b"))
    assert [each["id"] for each in made["sandboxes"]] == ["n1-3"], "n1-4 cannot be measured"
    made = json.loads(once(server, "--json", "n1-2", "n1-1"))
    assert {each["id"] for each in made["sandboxes"]} == {"n1-1", "n1-2"}
    assert "no sandbox n1-9; see `dsec ps`" in once(server, "n1-2", "n1-9", code=1)
    once(server, "--interval", "0", code=2)
    once(server, "--sort", "nothing", code=2)


class Screen:
    """``dsec top`` on a terminal of its own."""

    def __init__(self, server: Busy, *words: str, rows: int = 24, cols: int = 100) -> None:
        self.leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", rows, cols, 0, 0))
        self.before = termios.tcgetattr(follower)
        env = {**os.environ, "DSEC_ENDPOINT": server.socket, "PYTHONPATH": f"{ROOT}:{ROOT}/src",
               "TERM": "xterm"}  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dsec", "top", "--interval", "0.1", *words],
            env={name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")},
            stdin=follower, stdout=follower, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.follower = follower

    def until(self, word: str) -> str:
        """Return what is shown until `word` is, from now on."""
        seen, deadline = b"", time.monotonic() + 20
        while word.encode() not in seen:
            assert time.monotonic() < deadline, (word, seen)
            if select.select([self.leader], [], [], 0.2)[0]:
                seen += os.read(self.leader, 65536)
        return seen.decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.leader, text.encode())

    def end(self) -> int:
        """Wait for the end, with its output read; return its exit code."""
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.leader], [], [], 0.1)[0]:
                os.read(self.leader, 65536)
        return self.process.wait(1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        os.close(self.leader)
        os.close(self.follower)


@contextlib.contextmanager
def screen(server: Busy, *words: str, rows: int = 24, cols: int = 100) -> Iterator[Screen]:
    made = Screen(server, *words, rows=rows, cols=cols)
    try:
        yield made
    finally:
        made.close()


def test_keys_work_on_a_terminal(server: Busy) -> None:
    with screen(server) as terminal:
        assert "\x1b[?1049h" in terminal.until("n1-3"), "on the other screen"
        terminal.until("50%")
        terminal.type("m")
        terminal.until("↓MEM")
        terminal.type("r")
        terminal.until("↑MEM")
        terminal.type("q")
        assert terminal.end() == 0
        assert termios.tcgetattr(terminal.follower) == terminal.before, "the terminal is as it was"


def test_a_terminal_that_grows_shows_more(server: Busy) -> None:
    with screen(server, "--sort", "id", rows=6) as terminal:
        terminal.until("2 more")
        size = struct.pack("4H", 20, 100, 0, 0)
        fcntl.ioctl(terminal.leader, termios.TIOCSWINSZ, size)
        # the kernel tells only the foreground group of a controlling terminal, which this is not
        terminal.process.send_signal(signal.SIGWINCH)
        terminal.until("n1-3")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130
        assert termios.tcgetattr(terminal.follower) == terminal.before


def test_new_sandboxes_appear_and_ended_ones_go(server: Busy) -> None:
    with screen(server, "--sort", "id") as terminal:
        terminal.until("n1-3")
        server.make("more", DSecContainerRunArgs(container_image="base/x"))
        terminal.until("n1-5")
        for each in server.sandboxes.values():
            each.state = "stopped" if each.id != "n1-1" else each.state
        deadline = time.monotonic() + 20
        while "n1-5" in (text := terminal.until("q=quit").rpartition("SANDBOX")[2]):
            assert time.monotonic() < deadline, text
        terminal.type("q")
        assert terminal.end() == 0


def test_the_end_of_all_that_was_chosen_ends_it_with_one_line(server: Busy) -> None:
    with screen(server, "n1-1") as terminal:
        terminal.until("n1-1")
        server.sandboxes["n1-1"].state = "stopped"
        assert terminal.end() == 1
        assert terminal.process.stderr is not None
        assert terminal.process.stderr.read() == b"dsec: no sandbox n1-1; see `dsec ps`\n"
        assert termios.tcgetattr(terminal.follower) == terminal.before
