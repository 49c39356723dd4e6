"""Records of grading: what `Sandbox.verify` returns, and how anyone checks one later, offline.

A record is canonical JSON (keys sorted, no spaces, defaults left out) signed with the Ed25519 key
of the host that graded (RFC 8032). Its file is ``{"record": …, "signature": …, "key": …}``, the
latter two in base64; how the file is laid out does not matter.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import msgspec

from libdsec import model
from libdsec.errors import InvalidArgument
from libdsec.model_verify import RECORD_VERSION
from libdsec.result import CommandResult

PREFIX = "ed25519:"
KEY_BYTES, SIGNATURE_BYTES = 32, 64


def encode(record: Any) -> bytes:
    """Return the canonical form of a record, which is what is signed."""
    return msgspec.json.encode(msgspec.to_builtins(record), order="sorted")


def key_text(key: bytes) -> str:
    """Return a public key in the form that `parse_key` reads."""
    return PREFIX + base64.b64encode(key).decode()


def parse_key(text: str) -> bytes:
    """Return the public key of ``ed25519:BASE64``. Raises `InvalidArgument`."""
    try:
        return _decoded(text.strip().removeprefix(PREFIX), KEY_BYTES)
    except ValueError as error:
        raise InvalidArgument(
            f"{text.strip()[:80]!r} is not a public key: ed25519:BASE64, as `dsec verify-key` "
            "prints it",
            field="key",
        ) from error


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A record with its signature and the public key that the signer says is its own."""

    record: bytes
    signature: bytes
    key: bytes

    def to_json(self) -> bytes:
        """Return what is kept in a file; `check_record` reads it."""
        return msgspec.json.encode(
            {
                "record": msgspec.Raw(self.record),
                "signature": base64.b64encode(self.signature).decode(),
                "key": key_text(self.key),
            }
        )


@dataclass(frozen=True, slots=True)
class Verified:
    """A grader's end: its result, what was graded, and what to look at before believing it."""

    result: CommandResult
    record: model.Record
    signed: SignedRecord

    @property
    def warnings(self) -> list[model.KeptWarning]:
        """What among the kept paths could have changed the grader's mind, or was left out."""
        return self.record.warnings


def check_record(text: bytes | str, key: str | bytes) -> model.Record:
    """Return the record in a file's `text` if `key` signed it.

    `key` is the public key of the host, from a source that the record did not come from. Raises
    `InvalidArgument` that says whether the file, the key or the signature is wrong.
    """
    wanted = parse_key(key) if isinstance(key, str) else key
    signed = _read(text)
    if signed.key != wanted:
        raise InvalidArgument(
            f"the record says it was signed with {key_text(signed.key)}, not with the key given: "
            "another host graded, or somebody made it up",
            field="key",
        )
    _check_signature(signed)
    try:
        record = msgspec.json.decode(signed.record, type=model.Record)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"the record is not understood: {error}") from error
    if record.version != RECORD_VERSION:
        raise InvalidArgument(
            f"the record has version {record.version}, this program reads {RECORD_VERSION}"
        )
    return record


def _read(text: bytes | str) -> SignedRecord:
    try:
        outer = msgspec.json.decode(text, type=dict[str, Any])
        return SignedRecord(
            record=msgspec.json.encode(outer["record"], order="sorted"),
            signature=_decoded(outer["signature"], SIGNATURE_BYTES),
            key=_decoded(outer["key"].removeprefix(PREFIX), KEY_BYTES),
        )
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"not a signed record, as `dsec verify --record FILE` writes it: {error}"
        ) from error


def _decoded(text: str, size: int) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError) as error:
        raise ValueError(f"not base64: {error}") from error
    if len(data) != size:
        raise ValueError(f"{size} bytes are expected, not {len(data)}")
    return data


def _check_signature(signed: SignedRecord) -> None:
    # imported here: only who checks a record pays for it
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(signed.key).verify(signed.signature, signed.record)
    except InvalidSignature:
        raise InvalidArgument(
            "the signature does not fit the record: it was changed after it was signed",
            field="signature",
        ) from None
