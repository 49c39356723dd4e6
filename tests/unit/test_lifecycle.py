"""The transition table is total, and illegal ways are named."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from dsecd.engine.lifecycle import FINAL, ILLEGAL, TRANSITIONS, Action, after
from libdsec.errors import WrongState
from libdsec.model import State

STATES = get_args(State)
ACTIONS = get_args(Action)


@pytest.mark.parametrize(("state", "action"), list(itertools.product(STATES, ACTIONS)))
def test_every_pair_is_decided_once(state: State, action: Action) -> None:
    assert ((state, action) in TRANSITIONS) != ((state, action) in ILLEGAL)


@pytest.mark.parametrize(("state", "action"), list(ILLEGAL))
def test_illegal_transitions_raise_with_state_and_reason(state: State, action: Action) -> None:
    with pytest.raises(WrongState) as caught:
        after(state, action)
    assert caught.value.detail["state"] == state
    assert caught.value.message == ILLEGAL[state, action]


def test_final_states_are_never_left() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] in FINAL]


def test_every_state_leads_to_a_final_one() -> None:
    for start in STATES:
        reached = {start}
        while True:
            more = {new for (old, _), new in TRANSITIONS.items() if old in reached} - reached
            if not more:
                break
            reached |= more
        assert reached & FINAL
