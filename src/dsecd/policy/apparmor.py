"""From rules for files and mounts to an AppArmor profile. Pure.

AppArmor judges a path as seen from the root of the process's mount namespace, whatever chroot(2)
says, and takes denying rules away from allowing ones, whatever their order: the laws of
`dsecd.policy.rules`. What it leaves to be done here:

* A name must stay the name. Renaming a directory above a rule's paths would carry them out of its
  reach, so such directories are *held*: no writing of the directory itself, which also keeps its
  mode and owner. A bind, a moved mount, an overlay and pivot_root(2) give files other names, so a
  profile with rules for paths has none of them. A hard link may not have more rights than its
  target; the kernel sees to that.
* A mount covers what is beneath. None is laid on, in or above what may not be written. Where a rule
  is about mounts in certain places, none is carried to another one: no moves, no recursive binds,
  no shared trees.
* A mount made with fsopen(2) has no type when it is moved to its place. It counts as of every type.

What AppArmor does not see is in `dsecd.policy.mechanisms`. Sources: apparmor.d(5); in the kernel
security/apparmor/{lsm,file,mount,path}.c.
"""

from __future__ import annotations

import functools
import hashlib
import re
import string
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dsecd.policy import globs, masks
from dsecd.policy.rules import Access, FilePolicy, FileRule, SystemPolicy

TEMPLATE = Path(__file__).with_suffix(".in")  # in the repository: apparmor/sandbox.in
NAME_BYTES = 16

_EVERYTHING = '"/{,**}"'
# Reading takes locks, and a changed name is a link; code is mapped as it is executed.
_ALLOWED: dict[Access, str] = {"read": "rk", "write": "wkl", "execute": "mix"}
_DENIED: dict[Access, str] = {"read": "r", "write": "wl", "execute": "mx"}
_HIDDEN = "rwklmx"

# Wildcards in bytes, which is what AppArmor matches; none of them is NUL or a slash.
_BYTE = r"[\x01-\x2e\x30-\xff]"
_CHARACTER = (  # of UTF-8
    r"[\x01-\x2e\x30-\x7f]",
    r"[\xc2-\xdf][\x80-\xbf]",
    r"[\xe0-\xef][\x80-\xbf][\x80-\xbf]",
    r"[\xf0-\xf4][\x80-\xbf][\x80-\xbf][\x80-\xbf]",
)
_STRAY = r"[\x80-\xff]"  # no character, but a rule that denies is not to be evaded with one
_SPECIAL = re.compile(rb"[^A-Za-z0-9/_-]")
_WILD = re.compile(r"(?<=/)\*\*/|\*\*|\*|\?")  # as in `globs`

_MOVE, _RECURSIVE = "options=(move) ", "options=(rbind) "
_PROPAGATION = tuple(
    f"options=({way}{kind}) " for kind in ("private", "slave", "unbindable") for way in ("", "r")
)
# What brings mounts to places where they were not made.
_CARRYING = (_MOVE, _RECURSIVE, "options=(shared) ", "options=(rshared) ")


class Profile(msgspec.Struct, frozen=True):
    """A profile's name, which is that of its content, and its text."""

    name: str
    text: str


@functools.lru_cache(maxsize=256)
def compile_profile(files: FilePolicy, system: SystemPolicy, prefix: str = "dsec") -> Profile:
    """Return the profile for rules on files and mounts; equal rules have one and the same.

    `prefix` begins its name and tells the daemons of a host apart.
    """
    template = TEMPLATE.read_text()
    parts = {
        "protections": _block(_protections()),
        "files": _block(_files(files, system)),
        "mounts": _block(_mounts(files, system)),
    }
    content = "\n".join((template, *parts.values())).encode()
    name = f"{prefix}-{hashlib.blake2b(content, digest_size=NAME_BYTES).hexdigest()}"
    return Profile(name, string.Template(template).substitute(parts, name=name))


def _block(lines: Iterable[str]) -> str:
    return "\n".join(f"  {line}," for line in lines)


def _protections() -> Iterator[str]:
    for path in masks.MASKED:
        yield f"deny {path} {_HIDDEN}"
    for path in masks.READ_ONLY:
        yield f"deny {path}{{,/,/**}} wl"


# --- files --------------------------------------------------------------------------------------


def _files(files: FilePolicy, system: SystemPolicy) -> Iterator[str]:
    if files.default == "allow":
        yield f"{_EVERYTHING} rwklmix"
    for rule in files.rules:
        if rule.verdict == "deny":
            yield f"deny {_covered(rule.pattern, deny=True)} {_letters(_DENIED, rule.access)}"
        elif files.default == "deny":
            yield f"{_covered(rule.pattern)} {_letters(_ALLOWED, rule.access)}"
    for pattern in files.hidden:
        yield f"deny {_covered(pattern, deny=True)} {_HIDDEN}"
    for directory in sorted(_held(files, system)):
        yield f"deny {_quoted(directory + '/')} w"


def _letters(letters: dict[Access, str], access: Iterable[Access]) -> str:
    """Return the permissions of `access`, each once; the `x` of a rule comes last."""
    found = dict.fromkeys("".join(letters[each] for each in sorted(access, reverse=True)))
    return "".join(sorted(found, key="rwklmix".index))


def _held(files: FilePolicy, system: SystemPolicy) -> set[str]:
    """Return the directories that keep their names, because a rule's paths begin with them."""
    patterns = [*files.hidden, *(rule.pattern for rule in _denials(files))]
    patterns += [
        rule.pattern
        for rule in system.mounts
        if rule.verdict == "deny" or system.mount_default == "deny"
    ]
    return {directory for pattern in patterns for directory in _upwards(globs.head(pattern))}


def _denials(files: FilePolicy) -> list[FileRule]:
    return [rule for rule in files.rules if rule.verdict == "deny"]


def _upwards(path: str) -> Iterator[str]:
    """Yield a path and each directory above it, but not the root: that has no name to change."""
    while path != "/":
        yield path
        path = path.rpartition("/")[0] or "/"


# --- mounts -------------------------------------------------------------------------------------


def _mounts(files: FilePolicy, system: SystemPolicy) -> Iterator[str]:
    names_matter = files.default == "deny" or bool(files.hidden or _denials(files))
    places_matter = any(not globs.matches(rule.pattern, "/") for rule in system.mounts)
    yield from ("remount", *(f"mount {kind}-> {_EVERYTHING}" for kind in _PROPAGATION))
    yield from _allowed_mounts(files, system)
    for rule in system.mounts:
        if rule.verdict == "deny":
            untyped = () if rule.fstype == "*" else (_MOVE,)
            yield from _denied_at(_covered(rule.pattern, deny=True), _kinds(rule.fstype) + untyped)
    if names_matter:
        yield from _denied_at(_EVERYTHING, (*_kinds("bind"), *_kinds("overlay")))
        for place in _kept(files):
            yield from _denied_at(place, ("fstype=(*) ",))
    if names_matter or places_matter:
        yield from _denied_at(_EVERYTHING, _CARRYING)
    else:
        yield "pivot_root"


def _allowed_mounts(files: FilePolicy, system: SystemPolicy) -> Iterator[str]:
    """Yield what allows mounts. Where no rule is about them, they are writes of their places."""
    if system.mount_default == "deny":
        allowed = [(rule.pattern, rule.fstype) for rule in system.mounts if rule.verdict == "allow"]
    elif files.default == "deny":
        allowed = [
            (rule.pattern, "*")
            for rule in files.rules
            if rule.verdict == "allow" and "write" in rule.access
        ]
    else:
        allowed = [("/", "*")]
    for pattern, fstype in allowed:
        yield from (f"mount {kind}-> {_covered(pattern)}" for kind in _kinds(fstype))


def _denied_at(place: str, kinds: Iterable[str]) -> Iterator[str]:
    return (f"deny mount {kind}-> {place}" for kind in kinds)


def _kept(files: FilePolicy) -> Iterator[str]:
    """Yield, quoted, what lies in, on and above paths that are hidden or may not be written."""
    patterns = [rule.pattern for rule in _denials(files) if "write" in rule.access]
    above = {"/"} if files.hidden or patterns else set()
    for pattern in (*files.hidden, *patterns):
        yield _covered(pattern, deny=True)
        above.update(directory + "/" for directory in _upwards(globs.head(pattern)))
    yield from map(_quoted, sorted(above))


def _kinds(fstype: str) -> tuple[str, ...]:
    """Return the conditions that match a type of `MountRule`, each with a space at its end."""
    if fstype == "*":
        return ("",)
    if fstype == "bind":
        return ("options=(bind) ", _RECURSIVE)
    return (f"fstype=({fstype}) ",)


# --- patterns -----------------------------------------------------------------------------------


def _covered(pattern: str, deny: bool = False) -> str:
    """Return, quoted, the expression for what `pattern` covers; directories end with a slash."""
    if globs.matches(pattern, "/"):  # "/", "/**" and the like
        return _EVERYTHING
    found, place = "", 0
    for wild in _WILD.finditer(pattern):
        found += _escaped(pattern[place : wild.start()])
        found += _wildcard(wild, deny)
        place = wild.end()
    return f'"{found}{_escaped(pattern[place:])}{{,/,/**}}"'


def _wildcard(wild: re.Match[str], deny: bool) -> str:
    if wild.group() == "?":
        return "{" + ",".join((*_CHARACTER, _STRAY) if deny else _CHARACTER) + "}"
    if wild.group() == "**/":
        return "{,**/}"
    before, after = wild.string[wild.start() - 1], wild.string[wild.end() : wild.end() + 1]
    # a whole component is not empty: the directory that it is in is another path
    whole = before == "/" and after in ("", "/")
    return f"{_BYTE}{wild.group()}" if whole else wild.group()


def _quoted(path: str) -> str:
    return f'"{_escaped(path)}"'


def _escaped(text: str) -> str:
    """Return `text` for a quoted string of a profile: its bytes, with no special meaning."""
    return _SPECIAL.sub(_escape, text.encode("utf-8", "surrogatepass")).decode("ascii")


def _escape(found: re.Match[bytes]) -> bytes:
    # a backslash is taken for an escape twice: by the string, and by the expression in it
    return rb"\\\\" if found.group() == b"\\" else b"\\x%02x" % found.group()[0]
