"""Log records: structured, with the sandbox id, safe on a terminal."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from dsecd import log
from dsecd.config import Log


@pytest.fixture(autouse=True)
def restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_json_records_carry_the_sandbox() -> None:
    stream = io.StringIO()
    log.configure(Log(format="json"), stream)
    logger = logging.getLogger("dsecd.test")
    with log.about("s0-n0-1-1"):
        log.event(logger, logging.INFO, "created", ms=3)
    log.event(logger, logging.INFO, "other", sandbox="s0-n0-1-2")
    logger.debug("not at this level")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["sandbox"], first["ms"], first["level"]) == ("s0-n0-1-1", 3, "info")
    assert second["sandbox"] == "s0-n0-1-2"


def test_an_exception_stays_on_one_json_line() -> None:
    stream = io.StringIO()
    log.configure(Log(format="json"), stream)
    try:
        raise ValueError("x")
    except ValueError:
        logging.getLogger("dsecd.test").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError" in json.loads(line)["exception"]


def test_text_never_lets_control_characters_through() -> None:
    stream = io.StringIO()
    log.configure(Log(format="text"), stream)
    log.event(logging.getLogger("dsecd.test"), logging.INFO, "said", what="\x1b[2J\a")
    assert "\x1b" not in stream.getvalue()
    assert "\\x1b[2J\\x07" in stream.getvalue()
