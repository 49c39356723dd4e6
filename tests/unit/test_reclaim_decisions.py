"""Which sandboxes give memory back: properties over any host, and the cases that named them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dsecd.resources.reclaim import (
    DOUBLINGS_MAX,
    FLOOR_BYTES,
    MIN_GAIN_BYTES,
    History,
    Host,
    Past,
    Policy,
    Subject,
    decide,
)

MIB, GIB = 1 << 20, 1 << 30
TIMES = st.floats(0, 10_000)
PASTS = st.builds(
    Past, ago_s=TIMES, after_bytes=st.integers(0, 2 * GIB), fruitless=st.integers(0, 20)
)
SUBJECTS = st.lists(
    st.builds(
        Subject,
        id=st.text("abc", min_size=1, max_size=4),
        memory_bytes=st.integers(0, 4 * GIB),
        idle_s=TIMES,
        cpu_class=st.sampled_from(["latency_sensitive", "standard", "best_effort"]),
        in_use=st.booleans(),
        paused=st.booleans(),
        stall_percent=st.floats(0, 100),
        past=st.none() | PASTS,
    ),
    max_size=40,
    unique_by=lambda subject: subject.id,
)
POLICIES = st.builds(
    Policy,
    when=st.sampled_from(["pressure", "always"]),
    trim_after_s=st.sampled_from([0.0, 30.0]),
    pause_after_s=st.sampled_from([0.0, 600.0]),
    step_bytes=st.integers(MIN_GAIN_BYTES, GIB),
    sandboxes=st.integers(1, 32),
)
AVAILABLE = st.integers(0, 24 * GIB)


def host(available: int, short: bool = False) -> Host:
    return Host(total_bytes=24 * GIB, available_bytes=available, short=short)


def cold(name: str, memory_mib: int, idle_s: float = 100.0) -> Subject:
    return Subject(id=name, memory_bytes=memory_mib * MIB, idle_s=idle_s)


@given(AVAILABLE, st.booleans(), SUBJECTS, POLICIES, st.booleans())
def test_whoever_is_in_use_paused_or_short_of_memory_is_left_alone(
    available: int, short: bool, subjects: list[Subject], policy: Policy, going: bool
) -> None:
    by_id = {subject.id: subject for subject in subjects}
    found = decide(host(available, short), subjects, policy, going)
    for decision in found.decisions:
        subject = by_id[decision.sandbox]
        assert not subject.in_use
        assert not subject.paused
        assert subject.stall_percent < 10
        assert MIN_GAIN_BYTES <= decision.memory_bytes <= policy.step_bytes
        assert decision.memory_bytes <= subject.memory_bytes - FLOOR_BYTES
        if subject.cpu_class != "best_effort":
            assert subject.idle_s >= (policy.trim_after_s or policy.pause_after_s)


@given(AVAILABLE, st.booleans(), SUBJECTS, POLICIES, st.booleans())
def test_a_round_is_bounded(
    available: int, short: bool, subjects: list[Subject], policy: Policy, going: bool
) -> None:
    found = decide(host(available, short), subjects, policy, going)
    names = [decision.sandbox for decision in found.decisions]
    assert len(names) == len(set(names)) <= policy.sandboxes
    assert found.reason
    if policy.when == "pressure":
        assert found.asked_bytes <= found.need_bytes + MIN_GAIN_BYTES
        assert bool(found.decisions) <= found.going


@given(AVAILABLE, AVAILABLE, SUBJECTS, POLICIES)
def test_less_memory_never_asks_for_less(
    one: int, other: int, subjects: list[Subject], policy: Policy
) -> None:
    more, less = (
        decide(host(max(one, other)), subjects, policy),
        decide(host(min(one, other)), subjects, policy),
    )
    assert less.need_bytes >= more.need_bytes
    assert less.asked_bytes >= more.asked_bytes


@given(SUBJECTS, POLICIES)
def test_the_coldest_are_asked_first(subjects: list[Subject], policy: Policy) -> None:
    found = decide(host(0), subjects, replace(policy, when="pressure"))
    by_id = {subject.id: subject for subject in subjects}
    asked = [by_id[decision.sandbox] for decision in found.decisions]
    keys = [(subject.cpu_class == "latency_sensitive", -subject.idle_s) for subject in asked]
    assert keys == sorted(keys)


@given(st.integers(0, 20 * GIB), st.lists(st.integers(0, 900), max_size=30))
def test_rounds_come_to_an_end(available: int, sizes: list[int]) -> None:
    """Each trim gives all it is asked for and nothing comes back: the rounds stop by themselves."""
    policy, history = Policy(rest_s=1.0), History()
    memory = {f"s{n}": size * MIB for n, size in enumerate(sizes)}
    going, now = False, 1000.0
    for _ in range(200):
        subjects = [
            Subject(id=name, memory_bytes=held, idle_s=now, past=history.past(name, now))
            for name, held in memory.items()
        ]
        found = decide(host(available), subjects, replace(policy, pause_after_s=0), going)
        if not found.decisions:
            return
        for decision in found.decisions:
            before = memory[decision.sandbox]
            memory[decision.sandbox] = before - decision.memory_bytes
            available += decision.memory_bytes
            history.note(
                decision.sandbox, now, before, decision.memory_bytes, decision.memory_bytes
            )
        going, now = found.going, now + 2
    raise AssertionError("still asking after 200 rounds")


def test_below_the_target_nobody_is_asked() -> None:
    found = decide(host(20 * GIB), [cold("a", 500)], Policy())
    assert found.decisions == ()
    assert "below the target" in found.reason


def test_a_begun_round_goes_on_down_to_the_margin() -> None:
    policy = Policy(target=0.8, margin=0.05)
    between = host(int(24 * GIB * 0.22))  # 78% used
    assert decide(between, [cold("a", 500)], policy).decisions == ()
    assert decide(between, [cold("a", 500)], policy, going=True).decisions


def test_long_idle_sandboxes_are_paused_others_trimmed() -> None:
    subjects = [cold("warm", 200, 40.0), cold("frozen", 200, 700.0)]
    found = decide(host(GIB), subjects, Policy())
    assert [(d.action, d.sandbox) for d in found.decisions] == [
        ("pause", "frozen"), ("trim", "warm"),
    ]  # fmt: skip


def test_fault_a_trimmed_sandbox_that_faults_back_thrashes() -> None:
    """Each time it takes back what was freed it is left alone for twice as long."""
    history, now = History(), 0.0
    rests = []
    for _ in range(5):
        history.note("a", now, before=300 * MIB, asked=200 * MIB, freed=200 * MIB)
        began = now
        while True:
            now += 10.0
            subject = replace(cold("a", 300, 50.0), past=history.past("a", now))
            if decide(host(GIB), [subject], Policy(rest_s=60.0)).decisions:
                break
        rests.append(now - began)
    assert rests == [60, 120, 240, 480, 960]


def test_a_trim_in_vain_is_not_repeated_while_idle_lasts() -> None:
    """Without swap anonymous memory stays: asking again frees nothing and costs CPU."""
    history = History()
    history.note("a", 0.0, before=300 * MIB, asked=200 * MIB, freed=0)
    for now in (500.0, 5_000.0, 50_000.0):
        subject = replace(cold("a", 300, now + 60), past=history.past("a", now))
        assert decide(host(GIB), [subject], Policy(pause_after_s=0)).decisions == ()


def test_rest_is_bounded() -> None:
    past = Past(ago_s=60.0 * 2**DOUBLINGS_MAX, after_bytes=0, fruitless=1000)
    subject = replace(cold("a", 300, 50.0), past=past)
    assert decide(host(GIB), [subject], Policy()).decisions


def test_the_history_of_the_gone_is_forgotten() -> None:
    history = History()
    history.note("a", 0.0, before=10 * MIB, asked=MIB, freed=MIB)
    history.keep(["b"])
    assert history.past("a", 1.0) is None
