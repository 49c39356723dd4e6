"""The subset of Dockerfile that layers are built from, parsed into steps. Pure.

FROM, RUN, COPY, ENV, WORKDIR, USER, ARG, and CMD and ENTRYPOINT as defaults; LABEL, EXPOSE,
MAINTAINER and STOPSIGNAL mean nothing to a sandbox and are noted. Everything else is refused with
its line, so that no build silently lacks a part. Reference: Docker's "Dockerfile reference".
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import NoReturn

import msgspec

from libdsec.errors import InvalidArgument
from libdsec.expansion import NAME, Malformed, whole, words
from libdsec.model import ImageConfig

_IGNORED = ("LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL")
_FLAG = re.compile(r"--(?P<name>[a-z-]+)(?:=(?P<value>\S*))?\s*")
_MODE = re.compile(r"[0-7]{3,4}")
# docker takes values for these without an ARG; they are the business of whoever builds
PROXIES = frozenset(
    name for plain in ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
    for name in (plain, plain.upper())
)  # fmt: skip


class Run(msgspec.Struct, frozen=True):
    """A command: words for an exec form, one text for the shell."""

    line: int
    command: str | list[str]
    env: dict[str, str]  # of ARG and ENV; only the latter stays in the layer
    user: str  # "" for the base's
    workdir: str

    def __str__(self) -> str:
        shell = isinstance(self.command, str)
        return f"RUN {self.command if shell else msgspec.json.encode(self.command).decode()}"


class Copy(msgspec.Struct, frozen=True):
    """Files of the build context into the layer. `owner` is user[:group], "" for root."""

    line: int
    sources: list[str]
    target: str  # absolute; ends with / when it must be a directory
    owner: str
    mode: int | None

    def __str__(self) -> str:
        return f"COPY {' '.join(self.sources)} {self.target}"


class Workdir(msgspec.Struct, frozen=True):
    """A directory that is made when it is missing, `owner`'s ("" for root's)."""

    line: int
    path: str
    owner: str

    def __str__(self) -> str:
        return f"WORKDIR {self.path}"


Step = Run | Copy | Workdir


class Recipe(msgspec.Struct, frozen=True):
    """What a Dockerfile asks for."""

    base: str
    steps: list[Step]
    config: ImageConfig  # what it sets; the rest is the base's
    notes: list[str]


def parse(
    text: str,
    arguments: Mapping[str, str] | None = None,
    inherited: ImageConfig | None = None,
) -> Recipe:
    """Return the recipe. `arguments` give values to ARGs, `inherited` is what the base sets.

    Raises `InvalidArgument` that names the line for what is malformed or not in the subset.
    """
    escape = _escape(text)
    parser = _Parser(dict(arguments or {}), inherited or ImageConfig(), escape)
    for line, instruction, rest in _instructions(text, escape):
        try:
            parser.take(line, instruction, rest)
        except Malformed as error:
            _refuse(line, f"{error}: {rest}")
    return parser.finish()


def _refuse(line: int, message: str) -> NoReturn:
    raise InvalidArgument(f"Dockerfile line {line}: {message}", field="dockerfile", line=line)


def _instructions(text: str, escape: str) -> list[tuple[int, str, str]]:
    """Return (line, INSTRUCTION, rest), with continued lines joined and comments removed."""
    found: list[tuple[int, str, str]] = []
    begun: list[str] = []
    start = 0
    for number, raw in enumerate(text.splitlines(), 1):
        if raw.lstrip().startswith("#") or not raw.strip():
            continue  # also between continued lines
        if not begun:
            start = number
        part = raw.rstrip()
        continued = part.endswith(escape) and not part.endswith(2 * escape)
        begun.append(part[:-1] if continued else part)
        if not continued:
            found.append(_split(start, begun))
            begun = []
    if begun:
        found.append(_split(start, begun))
    return found


def _escape(text: str) -> str:
    """Return the character that continues a line, as a parser directive may set it."""
    for line in text.splitlines():
        directive = re.fullmatch(r"\s*#\s*(\w+)\s*=\s*(.*?)\s*", line)
        if directive is None:
            break
        if directive[1].lower() == "escape" and directive[2] in ("\\", "`"):
            return directive[2]
    return "\\"


def _split(line: int, parts: list[str]) -> tuple[int, str, str]:
    word, *rest = "".join(parts).strip().split(None, 1)
    text = rest[0] if rest else ""
    if re.search(r"<<-?['\"]?[A-Za-z_]", text):
        _refuse(line, "here-documents are not supported; write a script and COPY it")
    return line, word.upper(), text


class _Parser:
    def __init__(self, given: dict[str, str], inherited: ImageConfig, escape: str) -> None:
        self._given, self._inherited, self._escape = given, inherited, escape
        self._used: set[str] = set()
        self._before: dict[str, str] = {}  # ARGs before FROM
        self._args: dict[str, str] = {}
        self._config = ImageConfig()
        self._base = ""
        self._user, self._workdir = inherited.user, inherited.workdir or "/"
        self._steps: list[Step] = []
        self._notes: list[str] = []

    def take(self, line: int, instruction: str, rest: str) -> None:
        if instruction in _IGNORED:
            self._notes.append(f"line {line}: {instruction} has no meaning for a sandbox")
            return
        handler = {
            "FROM": self._from, "ARG": self._arg, "ENV": self._set_env, "RUN": self._run,
            "COPY": self._copy, "WORKDIR": self._set_workdir, "USER": self._set_user,
            "CMD": self._set_cmd, "ENTRYPOINT": self._set_entrypoint,
        }.get(instruction)  # fmt: skip
        if handler is None:
            _refuse(line, f"{instruction} is not supported")
        if not rest:
            _refuse(line, f"{instruction} needs an argument")
        if not self._base and instruction not in ("FROM", "ARG"):
            _refuse(line, "the first instruction must be FROM")
        handler(line, rest)

    def finish(self) -> Recipe:
        if not self._base:
            _refuse(1, "there is no FROM")
        unknown = sorted(self._given.keys() - self._used - PROXIES)
        if unknown:
            raise InvalidArgument(
                f"build argument {unknown[0]} is not declared by an ARG", field="arguments"
            )
        return Recipe(self._base, self._steps, self._config, self._notes)

    # --- one instruction each -------------------------------------------------------------------

    def _from(self, line: int, rest: str) -> None:
        if self._base:
            _refuse(line, "only one build stage is supported")
        given = rest.split()
        if given[0].startswith("--"):
            _refuse(line, f"FROM {given[0].partition('=')[0]} is not supported")
        if len(given) not in (1, 3) or (len(given) == 3 and given[1].upper() != "AS"):
            _refuse(line, "FROM takes one image")
        self._base = self._expand(given[0])
        if not self._base:
            _refuse(line, f"{given[0]} expands to nothing")
        if self._base == "scratch":
            _refuse(line, "FROM scratch is not supported; import a directory with layer import")
        self._before, self._args = self._args, {}

    def _arg(self, line: int, rest: str) -> None:
        for word in words(rest, self._variables(), self._escape):
            name, has_default, default = word.partition("=")
            if not re.fullmatch(NAME, name):
                _refuse(line, f"{name!r} is not a name")
            self._used.add(name)
            if name in self._given:
                self._args[name] = self._given[name]
            elif has_default:
                self._args[name] = default
            elif name in self._before:
                self._args[name] = self._before[name]

    def _set_env(self, line: int, rest: str) -> None:
        first = rest.split(None, 1)
        env = self._config.env
        if "=" not in first[0]:  # the old form: one variable, the rest of the line is its value
            if len(first) != 2:
                _refuse(line, "ENV needs name=value")
            env[first[0]] = self._expand(first[1])
            return
        # all of one line see the values before it
        for word in words(rest, self._variables(), self._escape):
            name, equals, value = word.partition("=")
            if not equals or not name:
                _refuse(line, f"ENV {word!r}: name=value is required")
            env[name] = value

    def _run(self, line: int, rest: str) -> None:
        if flag := _FLAG.match(rest):
            _refuse(line, f"RUN --{flag['name']} is not supported")
        command = _exec_form(rest)
        self._steps.append(Run(line, command or rest, self._variables(), self._user, self._workdir))

    def _copy(self, line: int, rest: str) -> None:
        owner, mode = "", None
        while flag := _FLAG.match(rest):
            value = self._expand(flag["value"] or "")
            if flag["name"] == "chown" and value:
                owner = value
            elif flag["name"] == "chmod" and _MODE.fullmatch(value):
                mode = int(value, 8)
            else:
                _refuse(line, f"COPY {flag[0].strip()} is not supported")
            rest = rest[flag.end() :]
        exact = _exec_form(rest)
        if exact is None:
            found = words(rest, self._variables(), self._escape)
        else:
            found = [self._expand(word) for word in exact]
        if len(found) < 2:
            _refuse(line, "COPY needs a source and a target")
        *sources, target = found
        if any(".." in source.split("/") for source in sources):
            _refuse(line, "COPY cannot leave the build context")
        full = self._absolute(target)
        if target.endswith("/") or posixpath.basename(target) in (".", ".."):
            full = full.rstrip("/") + "/"
        if len(sources) > 1 and not full.endswith("/"):
            _refuse(line, "COPY of several sources needs a target that ends with /")
        self._steps.append(Copy(line, sources, full, owner, mode))

    def _set_workdir(self, line: int, rest: str) -> None:
        self._workdir = self._absolute(self._expand(rest))
        self._config.workdir = self._workdir
        self._steps.append(Workdir(line, self._workdir, self._user))

    def _set_user(self, line: int, rest: str) -> None:
        self._user = self._expand(rest)
        self._config.user = self._user

    def _set_cmd(self, line: int, rest: str) -> None:
        self._config.cmd = _exec_form(rest) or ["/bin/sh", "-c", rest]

    def _set_entrypoint(self, line: int, rest: str) -> None:
        self._config.entrypoint = _exec_form(rest) or ["/bin/sh", "-c", rest]
        self._config.cmd = []  # as Docker does: a new entry point resets the command

    # --- parts ------------------------------------------------------------------------------------

    def _variables(self) -> dict[str, str]:
        return self._args | (self._inherited.env if self._base else {}) | self._config.env

    def _expand(self, text: str) -> str:
        return whole(text, self._variables(), self._escape)

    def _absolute(self, path: str) -> str:
        return "/" + posixpath.normpath(posixpath.join(self._workdir, path)).lstrip("/")


def _exec_form(text: str) -> list[str] | None:
    """Return the words of a JSON array of strings, None for anything else."""
    if not text.startswith("["):
        return None
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError:
        return None  # Docker, too, takes it for the shell form then
