"""Errors over the wire and through pickles; endpoints; arguments."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from libdsec import endpoint, errors, model, wire
from libdsec.errors import ERRORS, InvalidArgument, from_wire, to_wire


@pytest.mark.parametrize("kind", ERRORS.values(), ids=list(ERRORS))
def test_every_error_survives_the_wire_and_pickle(kind):
    error = kind("what to do", field="x", number=3)
    for copy in (from_wire(to_wire(error)), pickle.loads(pickle.dumps(error))):
        assert type(copy) is kind
        assert (copy.message, copy.detail, str(copy)) == (error.message, error.detail, str(error))


def test_codes_are_unique_and_unknown_ones_are_internal():
    kinds = {
        kind for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.DSecError)
    } - {errors.DSecError}  # fmt: skip
    assert set(ERRORS.values()) == kinds
    assert type(from_wire({"code": "new", "message": "m"})) is errors.Internal
    assert type(from_wire({})) is errors.Internal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/run/x.sock", "unix:/run/x.sock"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
        ("unix:///run/x.sock", "unix:/run/x.sock"),
        ("tcp://10.0.0.1:99", "tcp://10.0.0.1:99"),
        ("tcp://host", f"tcp://host:{endpoint.DEFAULT_PORT}"),
        ("tls://[::1]:99", "tls://[::1]:99"),
    ],
)
def test_endpoints(text, expected):
    assert str(endpoint.parse(text)) == expected


@pytest.mark.parametrize(
    "text", ["", "host:80", "unix:", "http://x:1", "tcp://", "tcp://x:99999", "tcp://x:1/path"]
)
def test_endpoints_that_are_none(text):
    with pytest.raises(InvalidArgument) as caught:
        endpoint.parse(text)
    assert caught.value.detail["field"] == "endpoint"


def test_endpoint_from_the_environment(monkeypatch):
    monkeypatch.delenv("DSEC_ENDPOINT", raising=False)
    assert str(endpoint.from_environment(None, None, None)) == f"unix:{endpoint.DEFAULT_SOCKET}"
    monkeypatch.setenv("DSEC_ENDPOINT", "tcp://h:1")
    assert str(endpoint.from_environment(None, None, None)) == "tcp://h:1"
    assert str(endpoint.from_environment("/x", None, None)) == "unix:/x"


def test_unreadable_ca_file_is_named():
    with pytest.raises(InvalidArgument, match="/none"):
        endpoint.parse("tls://h:1", ca_file="/none")


def test_a_misspelt_option_is_refused():
    raw = wire.pack({"container_image": "x", "memory_limit": 5})
    with pytest.raises(msgspec.ValidationError, match="memory_limit"):
        msgspec.msgpack.decode(raw, type=model.DSecContainerRunArgs)
    with pytest.raises(TypeError):
        model.DSecContainerRunArgs(container_image="x", memory_limit=5)
