"""What has to be known of an S3 store: where it is and who we are there."""

from __future__ import annotations

import configparser
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from libdsec.errors import InvalidArgument


class S3Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the configuration. "" → from the environment, as the tools of AWS do.

    `endpoint`: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, else AWS. `region`: AWS_REGION,
    AWS_DEFAULT_REGION, else us-east-1. Credentials: of `profile` in `credentials_file` (AWS shared
    format; AWS_SHARED_CREDENTIALS_FILE, AWS_PROFILE), else AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, else, if `instance_credentials`, those that the
    machine has (which dsec-blobd, and so a daemon, cannot use). `single_writer`: only this host
    moves names; for servers without conditional put.
    """

    endpoint: str = ""
    region: str = ""
    credentials_file: str = ""
    profile: str = ""
    instance_credentials: bool = False
    ca_file: str = ""
    single_writer: bool = False
    timeout_s: float = 60.0


class Credentials(msgspec.Struct, frozen=True):
    """`kind` as in `Source.credentials`; of an instance, the keys are not known here."""

    kind: Literal["environment", "file", "instance"]
    key_id: str = ""
    secret: str = ""
    token: str = ""
    file: str = ""
    profile: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.kind!r}, {self.key_id!r})"


class Place(msgspec.Struct, frozen=True):
    """Where the store is."""

    bucket: str
    prefix: str  # "" or without slashes at its ends
    endpoint: str
    region: str

    def __str__(self) -> str:
        return f"s3://{self.bucket} at {self.endpoint}"

    def url(self, key: str) -> str:
        """Return the address of an object, in path style."""
        path = "/".join(part for part in (self.bucket, self.prefix, key) if part)
        return f"{self.endpoint}/{urllib.parse.quote(path)}"


def place(url: str, options: S3Options, environ: Mapping[str, str]) -> Place:
    """Return where ``s3://bucket/prefix`` is. Raises `InvalidArgument`."""
    parts = urllib.parse.urlsplit(url)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", parts.netloc) or parts.query:
        raise InvalidArgument(f"{url!r} is not s3://bucket/prefix", field="store.url")
    prefix = parts.path.strip("/")
    if prefix and not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._/-]*", prefix):
        raise InvalidArgument(
            f"the prefix {prefix!r} may hold letters, digits, '.', '_', '-' and '/'",
            field="store.url",
        )
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise InvalidArgument(f"the prefix {prefix!r} has an empty part or dots", field="store.url")
    region = (
        options.region
        or environ.get("AWS_REGION")
        or environ.get("AWS_DEFAULT_REGION")
        or "us-east-1"
    )
    endpoint = (
        options.endpoint
        or environ.get("AWS_ENDPOINT_URL_S3")
        or environ.get("AWS_ENDPOINT_URL")
        or f"https://s3.{region}.amazonaws.com"
    ).rstrip("/")
    if not re.fullmatch(r"https?://[^/\s?#@]+", endpoint):
        raise InvalidArgument(
            f"the endpoint {endpoint!r} is not http(s)://host:port, without a path",
            field="endpoint",
        )
    return Place(parts.netloc, prefix, endpoint, region)


def credentials(options: S3Options, environ: Mapping[str, str]) -> Credentials:
    """Return who we are. Raises `InvalidArgument` with the ways to say so."""
    file = options.credentials_file or environ.get("AWS_SHARED_CREDENTIALS_FILE", "")
    if file:
        return from_file(file, options.profile or environ.get("AWS_PROFILE") or "default")
    key_id, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
    if key_id and secret:
        return Credentials("environment", key_id, secret, environ.get("AWS_SESSION_TOKEN", ""))
    if options.instance_credentials:
        return Credentials("instance")
    raise InvalidArgument(
        "no credentials for the S3 store: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the "
        "daemon's environment, or store.options.credentials_file",
        field="credentials_file",
    )


def from_file(file: str, profile: str) -> Credentials:
    """Return the credentials of `profile` in `file`. Raises `InvalidArgument`."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(Path(file).read_text())
        section = parser[profile]
        return Credentials(
            "file",
            section["aws_access_key_id"],
            section["aws_secret_access_key"],
            section.get("aws_session_token", ""),
            file,
            profile,
        )
    except OSError as error:
        raise InvalidArgument(
            f"cannot read {file}: {error.strerror}", field="credentials_file"
        ) from error
    except (KeyError, configparser.Error, UnicodeDecodeError):
        # no cause: a parser's message quotes the line, and so a secret
        raise InvalidArgument(
            f"{file} has no profile [{profile}] with aws_access_key_id and aws_secret_access_key",
            field="credentials_file",
        ) from None
