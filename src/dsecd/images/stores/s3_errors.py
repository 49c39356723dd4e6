"""What an S3 server's answer means, as `Transient` or as an error that says what to check. Pure.

obstore has few exception types; status and S3 error code stand in their text.
"""

from __future__ import annotations

import re

from dsecd.images.stores.retry import Transient
from libdsec.errors import (
    DSecError,
    Exhausted,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unsupported,
)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_METADATA = ("169.254.169.254", "169.254.170.2", "fd00:ec2")
_FINAL = (501, 507)  # of the 5xx, those that trying again does not change
_REGION = {
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}


class Exists(Exception):
    """The precondition of a put did not hold."""


class Missing(Exception):
    """There is no such object."""


class BeyondEnd(Exception):
    """The range begins at or after the end of the object."""


def translate(error: Exception, what: str, where: str) -> Exception:
    """Return what to raise for `error` of obstore. `where`: bucket and endpoint, for the user."""
    text = str(error).partition("Debug source:")[0]
    found = _STATUS.search(text)
    status, code = int(found[1]) if found else 0, ""
    if match := _CODE.search(text):
        code = match[1]
    if code == "NoSuchBucket":
        return NotFound(f"cannot {what}: {where} has no such bucket; check bucket and endpoint")
    if status == 404 or isinstance(error, FileNotFoundError):
        return Missing()
    if status in (304, 412):
        return Exists()
    if status == 416:
        return BeyondEnd()
    if not status or status in (408, 409, 425, 429) or (status >= 500 and status not in _FINAL):
        return _passing(error, text, status, code, what, where)
    return _refused(text, status, code, what, where)


def _passing(
    error: Exception, text: str, status: int, code: str, what: str, where: str
) -> Exception:
    if status:
        return Transient(f"the server answered {status} {code}".rstrip())
    if any(address in text for address in _METADATA):
        return PermissionDenied(
            f"cannot {what} at {where}: the instance's metadata service gives no credentials; set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or store.options.credentials_file"
        )
    if "credential provider" in text:
        return PermissionDenied(f"cannot {what} at {where}: {_brief(text)}; check the credentials")
    if "redirect" in text:
        return InvalidArgument(
            f"cannot {what}: {where} redirects; check the region and the endpoint", field="region"
        )
    if "builder error" in text or "URL scheme" in text:
        return InvalidArgument(f"{where}: {_brief(text)}; check the endpoint", field="endpoint")
    if "HTTP error" in text or "error decoding" in text or "timed out" in text:
        return Transient(f"no answer: {_brief(text)}")
    return Internal(f"cannot {what} at {where}: {type(error).__name__}: {_brief(text)}")


def _refused(text: str, status: int, code: str, what: str, where: str) -> DSecError:
    reason = f"cannot {what}: {where} answered {status} {code}".rstrip()
    if code in _REGION or status in (301, 307):
        return InvalidArgument(f"{reason}; check the region and the endpoint", field="region")
    if code == "RequestTimeTooSkewed":
        return PermissionDenied(f"{reason}; the clock of this host is wrong")
    if status in (401, 403):
        return PermissionDenied(
            f"{reason}; check the credentials, and that they may read, write, list and delete there"
        )
    if code in ("QuotaExceeded", "EntityTooLarge") or status == 507:
        return Exhausted(f"{reason}; the store's quota is used up")
    if status == 501:
        return Unsupported(f"{reason}", reason="the server does not implement it")
    return InvalidArgument(f"{reason}: {_brief(text)}; check bucket, region and endpoint")


def _brief(text: str) -> str:
    """Return the end of the text, where the cause stands, without line ends and query strings."""
    line = re.sub(r"\?\S+", "", " ".join(text.split()))
    return line.rpartition(" - ")[2][-200:]
