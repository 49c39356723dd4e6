"""Log records: structured, with the sandbox id, safe on a terminal."""

from __future__ import annotations

import asyncio
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


async def test_lines_are_held_for_a_moment_but_never_a_warning() -> None:
    stream = io.StringIO()
    log.configure(Log(format="json"), stream)
    logger = logging.getLogger("dsecd.test")
    log.event(logger, logging.INFO, "first", value=object())
    logger.info("second")
    assert stream.getvalue() == ""
    log.event(logger, logging.WARNING, "third")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == [
        "first", "second", "third",
    ]  # fmt: skip
    logger.info("fourth")
    await asyncio.sleep(2 * log.DELAY_S)
    assert "fourth" in stream.getvalue()


async def test_a_reader_that_is_gone_ends_nothing() -> None:
    stream = io.StringIO()
    log.configure(Log(format="json"), stream)
    stream.close()
    logging.getLogger("dsecd.test").error("nobody hears it")


async def test_an_event_says_what_a_record_would() -> None:
    stream = io.StringIO()
    log.configure(Log(format="json"), stream)
    logger = logging.getLogger("dsecd.test")
    with log.about("s0-n0-1-1"):
        log.event(logger, logging.ERROR, "said", ms=1.5)
        logger.error("said", extra={"fields": {"ms": 1.5}})
    event, record = (json.loads(line) for line in stream.getvalue().splitlines())
    assert abs(event.pop("time") - record.pop("time")) < 1.0
    assert event == record
