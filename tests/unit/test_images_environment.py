from __future__ import annotations

import pytest

from dsecd.images.environment import MAX_LAYERS, compose, override
from dsecd.images.manifest import Config, Kind, Manifest
from libdsec.errors import InvalidArgument


def layer(
    digest: str, kind: Kind = "base", parents: list[str] | None = None, **config: object
) -> Manifest:
    return Manifest(
        digest=digest,
        kind=kind,
        image="i" + digest,
        image_bytes=4096,
        blobs=[],
        content_bytes=0,
        entries=1,
        parents=parents or [],
        config=Config(**config),  # type: ignore[arg-type]
    )


def test_parts_lie_on_each_other_in_the_order_given() -> None:
    found = compose(layer("b"), layer("w", "workspace"), [layer("t1", "toolkit"), layer("t2")])
    assert found.layers == ("b", "w", "t1", "t2")


def test_parents_come_first_and_only_once() -> None:
    snapshot = layer("s", "snapshot", ["b", "w", "t"])
    found = compose(snapshot, layer("w", "workspace"), [layer("t", "toolkit"), layer("u")])
    assert found.layers == ("b", "w", "t", "s", "u")


def test_a_part_made_on_this_stack_fits() -> None:
    assert compose(layer("b"), layer("w", "workspace", ["b"])).layers == ("b", "w")


def test_a_part_made_on_another_stack_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="workspace w was made on top of other layers"):
        compose(layer("b"), layer("w", "workspace", ["a"]))
    with pytest.raises(InvalidArgument, match="toolkit t was made on top") as caught:
        compose(layer("b"), None, [layer("t", "toolkit", ["b", "w"])])
    assert caught.value.detail["field"] == "toolkits"


def test_later_defaults_override_earlier_ones() -> None:
    base = layer("b", env={"A": "1", "B": "1"}, user="app", workdir="/srv", cmd=["serve"])
    found = compose(base, layer("w", "workspace", env={"B": "2"}, workdir="/workspace"))
    assert found.config == Config(
        env={"A": "1", "B": "2"}, user="app", workdir="/workspace", cmd=["serve"]
    )


def test_nothing_overrides_nothing() -> None:
    assert override(Config(user="a"), Config()) == Config(user="a")


def test_a_stack_has_a_limit() -> None:
    parents = [f"p{n}" for n in range(MAX_LAYERS - 1)]
    assert len(compose(layer("s", "snapshot", parents)).layers) == MAX_LAYERS
    with pytest.raises(InvalidArgument, match=r"at most 60 .*; make one of the 60 .* collapse$"):
        compose(layer("s", "snapshot", parents), layer("w", "workspace"))
    toolkits = [layer(f"t{n}", "toolkit") for n in range(MAX_LAYERS)]
    with pytest.raises(InvalidArgument, match="at most 60 can be stacked; use fewer toolkits"):
        compose(layer("b"), None, toolkits)
