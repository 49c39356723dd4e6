"""Records of grading: canonical, signed, and refused when anything about them is not right."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from dsec.main import cli
from dsecd.engine.signing import Signer
from libdsec import InvalidArgument, KeptPath, KeptWarning, Record, SignedRecord, check_record
from libdsec.errors import Internal
from libdsec.record import encode, key_text, parse_key

RECORD = Record(
    sandbox="s0-n0-1-1abcd",
    grader="s0-n0-1-2efgh",
    node="n0",
    software="0.1.0",
    image="base/debian:12",
    layers=["aa" * 32],
    kept="bb" * 32,
    toolkits=["cc" * 32],
    paths=[KeptPath(path="/repo/ü", kind="file", sha256="dd" * 32, size_bytes=5)],
    warnings=[KeptWarning(kind="test hook", path="/repo/conftest.py")],
    limits={"memory_mb": 512, "cpu_millicores": 500},
    started_ms=1796001658067,
    ended_ms=1796001658082,
    stdout_sha256="ee" * 32,
    stdout_bytes=3,
    stderr_sha256="ff" * 32,
    stderr_bytes=0,
    argv=["pytest", "-q"],
    exit_code=1,
)


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path / "verify.key")


def signed(signer: Signer, record: Record = RECORD) -> SignedRecord:
    text = encode(record)
    return SignedRecord(record=text, signature=signer.sign(text), key=signer.public())


def test_a_record_comes_back(signer: Signer) -> None:
    made = signed(signer)
    assert check_record(made.to_json(), signer.public()) == RECORD
    assert check_record(made.to_json().decode(), key_text(signer.public())) == RECORD


def test_the_layout_of_the_file_does_not_matter(signer: Signer) -> None:
    pretty = json.dumps(json.loads(signed(signer).to_json()), indent=4, ensure_ascii=True)
    assert check_record(pretty, signer.public()) == RECORD


def test_the_canonical_form_is_sorted_and_the_same_each_time() -> None:
    text = encode(RECORD)
    plain = json.loads(text)
    assert text == json.dumps(
        plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode()  # fmt: skip
    assert encode(msgspec.json.decode(text, type=Record)) == text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"exit_code":1', '"exit_code":0'),
        ("/repo/ü", "/repo/u"),
        ('"kept":"bb', '"kept":"ba'),
        ('"image":"base/debian:12",', ""),
        ('"node":"n0"', '"node":"n0","oom_killed":true'),
    ],
)
def test_a_changed_record_is_refused(signer: Signer, before: str, after: str) -> None:
    text = signed(signer).to_json().decode()
    assert before in text
    with pytest.raises(InvalidArgument, match="changed after it was signed"):
        check_record(text.replace(before, after), signer.public())


def test_another_hosts_record_is_refused(signer: Signer, tmp_path: Path) -> None:
    other = Signer(tmp_path / "other.key")
    with pytest.raises(InvalidArgument, match="another host graded"):
        check_record(signed(other).to_json(), signer.public())
    # and one that only says it is the host's
    forged = msgspec.json.decode(signed(other).to_json())
    forged["key"] = key_text(signer.public())
    with pytest.raises(InvalidArgument, match="changed after it was signed"):
        check_record(msgspec.json.encode(forged), signer.public())


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "nonsense", '{"record":{},"signature":"AA==","key":"AA=="}',
             '{"record":{},"signature":1,"key":2}']
)  # fmt: skip
def test_what_is_no_record_is_refused(signer: Signer, text: str) -> None:
    with pytest.raises(InvalidArgument, match="not a signed record"):
        check_record(text, signer.public())


def test_a_record_of_another_version_is_refused(signer: Signer) -> None:
    made = signed(signer, msgspec.structs.replace(RECORD, version=2))
    with pytest.raises(InvalidArgument, match="version 2"):
        check_record(made.to_json(), signer.public())


@pytest.mark.parametrize("text", ["", "ed25519:", "ed25519:AAAA", "ed25519:" + "é" * 44])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="not a public key"):
        parse_key(text)


def test_the_key_is_made_once_and_for_root_only(tmp_path: Path) -> None:
    path = tmp_path / "verify.key"
    first = Signer(path).public()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["verify.key"]
    assert Signer(path).public() == first
    path.write_bytes(b"short")
    with pytest.raises(Internal, match=r"verify\.key is no key"):
        Signer(path).public()


def test_the_command_line_checks_without_a_daemon(signer: Signer, tmp_path: Path) -> None:
    file, key = tmp_path / "record.json", key_text(signer.public())
    (tmp_path / "key").write_text(key + "\n")
    file.write_bytes(signed(signer).to_json())
    for given in (key, str(tmp_path / "key")):
        done = CliRunner().invoke(cli, ["verify-record", str(file), "--key", given])
        assert done.exit_code == 0
        assert "good signature: sandbox s0-n0-1-1abcd on n0, exit code 1" in done.output
        assert "warning: test hook: /repo/conftest.py" in done.output
    file.write_bytes(signed(signer).to_json().replace(b'"exit_code":1', b'"exit_code":0'))
    done = CliRunner().invoke(cli, ["verify-record", str(file), "--key", key])
    assert (done.exit_code, "changed after it was signed" in done.output) == (1, True)
