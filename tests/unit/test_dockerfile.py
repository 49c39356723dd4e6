from __future__ import annotations

import pytest

from libdsec.dockerfile import Copy, Run, Workdir, parse
from libdsec.errors import InvalidArgument
from libdsec.model import ImageConfig

WHOLE = """\
# syntax=docker/dockerfile:1
ARG TAG=12
FROM base/debian:${TAG} AS build
ARG VERSION=1.0
ENV APP=/srv/app  PATH="/opt/bin:$PATH" NOTE='two words'
WORKDIR $APP
COPY --chown=app:app --chmod=755 src/ tools/run.sh ./
# a comment between
RUN apt-get update \\
    # and one inside
    && apt-get install -y curl
USER app
WORKDIR sub
RUN ["make", "V=$VERSION"]
LABEL a=b
CMD ["serve", "--now"]
"""


def test_a_whole_file() -> None:
    recipe = parse(WHOLE)
    assert recipe.base == "base/debian:12"
    env = {"APP": "/srv/app", "PATH": "/opt/bin:", "NOTE": "two words"}
    variables = {"VERSION": "1.0"} | env
    assert recipe.steps == [
        Workdir(6, "/srv/app", ""),
        Copy(7, ["src/", "tools/run.sh"], "/srv/app/", "app:app", 0o755),
        Run(9, "apt-get update     && apt-get install -y curl", variables, "", "/srv/app"),
        Workdir(13, "/srv/app/sub", "app"),
        Run(14, ["make", "V=$VERSION"], variables, "app", "/srv/app/sub"),
    ]
    assert recipe.config == ImageConfig(
        env=env, user="app", workdir="/srv/app/sub", cmd=["serve", "--now"]
    )
    assert recipe.notes == ["line 15: LABEL has no meaning for a sandbox"]


def test_arguments_are_given_by_the_caller() -> None:
    text = "ARG TAG=12\nFROM base/debian:$TAG\nARG WHO\nRUN echo hello"
    recipe = parse(text, {"TAG": "13", "WHO": "me"})
    assert recipe.base == "base/debian:13"
    assert isinstance(recipe.steps[0], Run)
    assert recipe.steps[0].env == {"WHO": "me"}
    assert recipe.config.env == {}
    with pytest.raises(InvalidArgument, match="build argument NOBODY is not declared"):
        parse(text, {"NOBODY": "x"})


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$A", "1"),
        ("${A}b", "1b"),
        ("${NONE:-x$A}", "x1"),
        ("${A:-x}", "1"),
        ("${A:+y}", "y"),
        ("${NONE:+y}", ""),
        ("\\$A", "$A"),
        ("a\\b", "ab"),
        ("Rex\\ The\\ Dog", "Rex The Dog"),
        ("'$A'x", "$Ax"),
        ('"a b$A\\$A\\n"', "a b1$A\\n"),
        ("''", ""),
        ("${NONE:-${NEITHER:-y}}z", "yz"),
        ("$1$", "$1$"),
    ],
)
def test_variables(word: str, value: str) -> None:
    assert parse(f"FROM b\nENV A=1\nENV V={word}").config.env["V"] == value


def test_variables_of_one_env_are_those_before_it() -> None:
    assert parse("FROM b\nENV A=1\nENV A=2 B=$A").config.env == {"A": "2", "B": "1"}


def test_the_old_form_of_env() -> None:
    assert parse("FROM b\nENV GREETING hello to you").config.env == {"GREETING": "hello to you"}


def test_the_escape_directive() -> None:
    recipe = parse("# escape=`\nFROM b\nRUN echo C:\\`\n  && true")
    assert isinstance(recipe.steps[0], Run)
    assert recipe.steps[0].command == "echo C:\\  && true"


def test_the_shell_form_keeps_its_variables_for_the_shell() -> None:
    recipe = parse('FROM b\nRUN for f in *; do echo "$f" ${f%.c}; done')
    assert isinstance(recipe.steps[0], Run)
    assert recipe.steps[0].command == 'for f in *; do echo "$f" ${f%.c}; done'


def test_what_the_base_sets_is_inherited() -> None:
    base = ImageConfig(env={"PATH": "/bin", "A": "base"}, user="app", workdir="/srv")
    text = "FROM b\nARG A=arg\nENV PATH=/opt:$PATH\nRUN true\nCOPY x y\nWORKDIR sub"
    recipe = parse(text, None, base)
    assert recipe.steps == [
        Run(4, "true", {"PATH": "/opt:/bin", "A": "base"}, "app", "/srv"),
        Copy(5, ["x"], "/srv/y", "", None),
        Workdir(6, "/srv/sub", "app"),
    ]
    assert recipe.config == ImageConfig(env={"PATH": "/opt:/bin"}, workdir="/srv/sub")


def test_an_argument_before_from_is_known_after_it_when_declared_again() -> None:
    text = "ARG V=1\nFROM b\nENV BEFORE=$V\nARG V\nENV AFTER=$V"
    assert parse(text).config.env == {"BEFORE": "", "AFTER": "1"}


def test_continued_words_are_joined_without_a_blank() -> None:
    recipe = parse("FROM b\nRUN echo a\\\n\nb \\\\\nRUN true")
    assert [step.command for step in recipe.steps if isinstance(step, Run)] == [
        "echo ab \\\\", "true",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "full"),
    [
        (".", "/w/"), ("./", "/w/"), ("x", "/w/x"), ("x/", "/w/x/"), ("/", "/"), ("..", "/"),
        ("/a/./b/../c", "/a/c"), ("//a", "/a"),
    ],
)  # fmt: skip
def test_targets_of_copy(target: str, full: str) -> None:
    step = parse(f"FROM b\nWORKDIR /w\nCOPY x {target}").steps[-1]
    assert isinstance(step, Copy)
    assert step.target == full


def test_proxies_need_no_declaration() -> None:
    assert parse("FROM b", {"https_proxy": "http://p"}).steps == []


def test_an_entry_point_resets_the_command() -> None:
    recipe = parse("FROM b\nCMD old\nENTRYPOINT exec serve")
    assert (recipe.config.entrypoint, recipe.config.cmd) == (["/bin/sh", "-c", "exec serve"], [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no FROM"),
        ("RUN true", "line 1: the first instruction must be FROM"),
        ("FROM a\nFROM b", "line 2: only one build stage"),
        ("FROM --platform=linux/arm64 a", "FROM --platform is not supported"),
        ("FROM $NONE", "expands to nothing"),
        ("FROM a b", "FROM takes one image"),
        ("FROM scratch", "FROM scratch is not supported"),
        ("FROM a\nADD x y", "line 2: ADD is not supported"),
        ("FROM a\n\nHEALTHCHECK NONE", "line 3: HEALTHCHECK is not supported"),
        ("FROM a\nRUN --mount=type=cache,target=/x true", "RUN --mount is not supported"),
        ("FROM a\nRUN <<EOF\ntrue\nEOF", "here-documents are not supported"),
        ("FROM a\nCOPY --from=build /x /y", "COPY --from=build is not supported"),
        ("FROM a\nCOPY --chmod=u+x x y", "COPY --chmod=u\\+x is not supported"),
        ("FROM a\nCOPY x", "needs a source and a target"),
        ("FROM a\nCOPY a b c", "ends with /"),
        ("FROM a\nCOPY ../x /y", "cannot leave the build context"),
        ("FROM a\nENV A", "ENV needs name=value"),
        ("FROM a\nENV A=1 B", "name=value is required"),
        ("FROM a\nENV A='1", "line 2: no closing quotation"),
        ("FROM a\nENV A=${B##x}", "is not supported; use"),
        ("FROM a\nARG 1=2", "'1' is not a name"),
        ("FROM a\nUSER", "USER needs an argument"),
    ],
)
def test_what_is_refused_says_where_and_why(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse(text)
