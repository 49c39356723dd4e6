"""Configuration: every key documented, unknown ones refused, unsafe ones refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from dsecd import config as configuration
from dsecd.config import Config, load, parse
from libdsec.errors import InvalidArgument

SAMPLE = Path(__file__).parents[2] / "packaging" / "dsecd.toml"


def test_no_file_means_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(configuration, "DEFAULT_FILE", tmp_path / "absent.toml")
    assert load(None, {}) == Config()


def test_environment_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text('node = "n7"\n[limits]\nsandboxes = 9\n')
    config = load(None, {"DSEC_CONFIG": str(file)})
    assert (config.node, config.limits.sandboxes) == ("n7", 9)


def test_a_misspelt_key_is_refused_with_the_closest_name() -> None:
    with pytest.raises(InvalidArgument, match=r"limits\.sandboxs; did you mean limits\.sandboxes"):
        parse("[limits]\nsandboxs = 1\n")
    with pytest.raises(InvalidArgument, match="unknown key listne; did you mean listen"):
        parse("[listne]\ntcp = ''\n")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('node = "Bad Name"', "node"),
        ("[limits]\nsandboxes = 0", "limits.sandboxes"),
        ("[pools]\nuid_range_start = 1000", "pools.uid_range_start"),
        ("[pools]\nuid_range_count = 100000", "pools.uid_range_count"),
        ('[cgroup]\nname = "../x"', "cgroup.name"),
        ('[listen]\ntcp = "0.0.0.0:7411"', "listen.tcp"),
        ('[listen]\ntcp = "0.0.0.0:7411"\ninsecure = true', "listen.insecure"),
        ('[listen]\ntcp = "nonsense"', "listen.tcp"),
        ('[listen]\ntcp = "127.0.0.1:1"\ntls_cert = "/c"', "listen"),
        ('[paths]\nruntime = "run"', "paths.runtime"),
        ("[reclaim]\ntarget_percent = 0", "reclaim.target_percent"),
        ("[reclaim]\nperiod_s = 0", "reclaim.period_s"),
        ("[reclaim]\ntrim_after_s = -1", "reclaim.trim_after_s"),
        ('[reclaim]\nswap = "file"', "reclaim.swap_mb"),
        ('[vm]\nkernel = "guest/kernel"', "vm.kernel"),
        ('[vm]\nqemu = ""', "vm.qemu"),
        ("[vm]\nlayers_cache_mb = -1", "vm.layers_cache_mb"),
        ("[vm]\ntemplates = -1", "vm.templates"),
        ("[vm]\ndamon_min_age_s = 86401", "vm.damon_min_age_s"),
        ('[vm]\naccel = "xen"', "config"),
        ("[limits]\nsandboxes = 'many'", "config"),
        ("node = ", "config"),
    ],
)
def test_what_would_fail_or_be_unsafe_is_refused(text: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(text)
    assert caught.value.detail["field"] == field


def test_insecure_tcp_is_allowed_on_loopback_only() -> None:
    assert parse('[listen]\ntcp = "127.0.0.1:0"\ninsecure = true').listen.insecure


def test_the_guests_kernel_is_below_the_state_unless_said_otherwise() -> None:
    state = '[paths]\nstate = "/srv/dsec"\n'
    assert parse(state).guest_kernel == Path("/srv/dsec/guest/kernel")
    assert parse(state + '[vm]\nkernel = "/boot/guest"\n').guest_kernel == Path("/boot/guest")


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no-such"):
        load(tmp_path / "no-such.toml")


def test_the_sample_documents_every_key_with_its_default() -> None:
    text = SAMPLE.read_text()
    uncommented = "\n".join(
        line.removeprefix("#") if line.startswith("#") and not line.startswith("# ") else line
        for line in text.splitlines()
    )
    table = tomllib.loads(uncommented)
    assert parse(uncommented) == Config()
    for field in msgspec.structs.fields(Config):
        assert field.name in table, field.name
        if isinstance(table[field.name], dict):
            names = {inner.name for inner in msgspec.structs.fields(field.type)}
            assert names == set(table[field.name]), field.name
