"""Keys of the store on their way to dsec-blobd."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dsecd.images.blobd import handover
from dsecd.images.blobd.client import Blobd
from dsecd.images.stores import s3_options
from dsecd.images.stores.abc import Source
from libdsec.errors import InvalidArgument, Unsupported

KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "a/secret+="}


def source(credentials: str, **more: str) -> Source:
    return Source(kind="http", url="http://h/b/k", region="r", credentials=credentials, **more)  # type: ignore[arg-type]


def test_keys_of_the_environment_go_through_a_file_of_root(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    handover.save(file, KEYS | {"AWS_SESSION_TOKEN": "token", "AWS_OTHER": "x"})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = handover.readable(source("environment"), file)
    assert (found.credentials, found.credentials_file) == ("file", str(file))
    who = s3_options.from_file(found.credentials_file, found.profile)
    assert (who.key_id, who.secret, who.token) == ("id", "a/secret+=", "token")


def test_new_keys_replace_the_old_ones_and_what_a_killed_daemon_left(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    (tmp_path / ".keys").write_text("half")
    handover.save(file, KEYS | {"AWS_SESSION_TOKEN": "token"})
    handover.save(file, KEYS | {"AWS_ACCESS_KEY_ID": "new"})
    who = s3_options.from_file(str(file), "default")
    assert (who.key_id, who.token) == ("new", "")
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_a_key_that_would_be_another_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="AWS_SECRET_ACCESS_KEY has characters"):
        handover.save(tmp_path / "keys", KEYS | {"AWS_SECRET_ACCESS_KEY": "x\n[other]"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("credentials", ["none", "file"])
def test_other_sources_stay_as_they_are(credentials: str, tmp_path: Path) -> None:
    given = source(credentials, credentials_file="/etc/keys", profile="p")
    assert handover.readable(given, tmp_path / "keys") == given


def test_keys_of_the_machine_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"cannot use the credentials of the machine; put keys"):
        handover.expect_readable(source("instance"))


async def test_the_file_ends_with_dsec_blobd(tmp_path: Path) -> None:
    blobd = Blobd(tmp_path / "run", tmp_path / "cache")
    blobd.hand_over(source("file", credentials_file="/etc/keys"), KEYS)
    assert not (tmp_path / "run").exists()
    blobd.hand_over(source("environment"), KEYS)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["blobd-credentials"]
    await blobd.close()
    assert list((tmp_path / "run").iterdir()) == []
    with pytest.raises(Unsupported):
        blobd.hand_over(source("instance"), KEYS)
