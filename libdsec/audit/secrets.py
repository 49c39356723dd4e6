"""Credentials in the tree: by the names of files, and by the form of tokens in them. Pure.

A finding shows what kind of secret it is and how long, never the secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from libdsec.audit.places import Places
from libdsec.audit.report import Finding, Remedy, Risk
from libdsec.audit.tree import Entry, Tree

MAX_CONTENT = 256 << 10  # bytes of a file that are looked at
_WHERE = re.compile(  # files that hold credentials for a living, wherever they lie
    rb".*/(\.netrc|_netrc|\.npmrc|\.yarnrc\.yml|\.pypirc|\.pgpass|\.my\.cnf|\.git-credentials"
    rb"|\.gitconfig|\.git/config|\.env(\.[^/]+)?|\.envrc|\.terraformrc|\.vault-token|\.s3cfg|\.boto"
    rb"|id_(rsa|dsa|ecdsa|ed25519)|\.docker/config\.json|\.dockercfg|\.aws/(credentials|config)"
    rb"|\.kube/config|kubeconfig|\.config/gh/hosts\.yml|\.config/hub|\.config/pip/pip\.conf"
    rb"|\.pip/pip\.conf|pip\.conf|\.config/rclone/rclone\.conf|\.m2/settings\.xml|\.gem/credentials"
    rb"|\.cargo/credentials(\.toml)?|application_default_credentials\.json|credentials\.json"
    rb"|service[_-]?account.*\.json|\.huggingface/token|huggingface/token|\.kaggle/kaggle\.json"
    rb"|secrets?\.(ya?ml|json|toml|env))",
    re.DOTALL,
)
_HISTORY = re.compile(
    r"\.(bash|zsh|sh|ash|python|node_repl|psql|mysql|sqlite|rediscli)_?history|fish_history"
)
_TEXT = re.compile(
    r"[^.]+|.+\.(py|sh|js|ts|json|ya?ml|toml|ini|cfg|conf|env|txt|md|rb|go|rs|java|xml|properties"
    r"|tf|tfvars|pem|key|ppk|log|sql|ipynb|php|pl|gradle|kts?|dockerfile)",
    re.DOTALL | re.IGNORECASE,
)
# What it is, and its form as its maker publishes it; the group "secret" is never shown. The files
# are hostile: no form may take more than linear time.
_TOKENS = (
    ("private key", rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
                    rb"\s*(?:Proc-Type: [^\n]{1,99}\n)?(?P<secret>[A-Za-z0-9+/=]{16,80})"),
    ("AWS access key", rb"\b(?P<secret>(?:AKIA|ASIA)[A-Z2-7]{16})\b"),
    ("AWS secret key", rb"(?i)aws_secret_access_key\W{1,5}(?P<secret>[A-Za-z0-9/+=]{40})\b"),
    ("GitHub token", rb"\b(?P<secret>gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_\w{40,255})\b"),
    ("GitLab token", rb"\b(?P<secret>glpat-[\w-]{20,64})"),
    ("Slack token", rb"\b(?P<secret>xox[abeoprs]-[A-Za-z0-9-]{10,250})"),
    ("Google API key", rb"\b(?P<secret>AIza[\w-]{35})"),
    ("Google service account", rb'"private_key"\s*:\s*"(?P<secret>-----BEGIN[^"]{20,})"'),
    ("Anthropic API key", rb"\b(?P<secret>sk-ant-[\w-]{20,200})"),
    ("OpenAI API key", rb"\b(?P<secret>sk-(?=[\w-]{0,99}[A-Z])(?=[\w-]{0,99}\d)[\w-]{32,200})"),
    ("Hugging Face token", rb"\b(?P<secret>hf_[A-Za-z0-9]{30,64})\b"),
    ("npm token", rb"\b(?P<secret>npm_[A-Za-z0-9]{36})\b"
                  rb"|_authToken\s*=\s*(?P<other>[^\s$]{8,200})"),
    ("PyPI token", rb"\b(?P<secret>pypi-AgEI[\w-]{50,250})"),
    ("Stripe key", rb"\b(?P<secret>[sr]k_live_[A-Za-z0-9]{20,100})\b"),
    ("password in a URL", rb"\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@'\"<>{}$]{1,64}:"
                          rb"(?P<secret>[^\s/@'\"<>{}$]{3,128})@[\w.-]"),
)  # fmt: skip
# only in files of `_WHERE`: elsewhere these words are code
_ASSIGNED = (
    ("password", rb"(?im)^[ \t]{0,64}(?:password|passwd|machine\s+\S+\s+login\s+\S+\s+password)"
                 rb"[\s=:]+(?P<secret>[^\s#]{3,128})"),
    ("Docker login", rb'"(?:auth|identitytoken)"\s*:\s*"(?P<secret>[^"]{8,4096})"'),
    ("Kubernetes login", rb"(?m)^[ \t]{0,64}(?:token|client-key-data|password):\s*"
                         rb"(?P<secret>\S{8,8192})"),
    ("variable", rb"(?im)^[ \t]{0,64}(?:export[ \t]+)?\w{0,64}"
                 rb"(?:secret|token|password|passwd|api_?key|private_?key|credential)\w{0,64}"
                 rb"[ \t]*[=:][ \t]*['\"]?(?P<secret>[^\s'\"$#]{6,4096})"),
    ("git credential", rb"(?m)^https?://[^:\s]+:(?P<secret>[^@\s]{3,200})@"),
    ("token", rb"\A\s*(?P<secret>[\w.-]{20,4096})\s*\Z"),
)  # fmt: skip
_PLACEHOLDER = re.compile(
    rb"(?i)^(?:x{3,}|\*+|\.{3,}|\$.*|<.*|your.*|change[_-]?me.*|example.*|placeholder.*|dummy.*|test"
    rb"|none|null|true|false|password|pass|secret|user|username|token|redacted.*)$"
)
_PUBLIC = (b"AKIAIOSFODNN7EXAMPLE", b"wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")  # in AWS's manual
_FORMS = tuple((what, re.compile(form)) for what, form in _TOKENS)
_ASSIGNMENTS = tuple((what, re.compile(form)) for what, form in _ASSIGNED)


def holds_credentials(path: str) -> bool:
    """Say whether files of this name are made to hold credentials."""
    return _WHERE.fullmatch(path.encode(errors="surrogateescape")) is not None


def may_hold_tokens(entry: Entry, places: Places) -> bool:
    """Say whether to look for tokens in the file: text, of the task, not too large."""
    return (
        entry.type == "file"
        and 0 < entry.size <= MAX_CONTENT
        and places.of_task(entry.path)
        and _TEXT.fullmatch(entry.name) is not None
    )


def find(tree: Tree, places: Places, contents: Mapping[str, bytes]) -> Iterator[Finding]:
    """Yield credentials that the agent can read, and histories of shells."""
    for entry in tree:
        if entry.type == "file" and entry.size and _HISTORY.fullmatch(entry.name):
            if tree.readable(entry):
                yield _finding("medium", entry.path, "a history of commands shows what its author "
                               "did to prepare the task, and passwords typed", "")  # fmt: skip
        elif entry.type == "file" and entry.path in contents and tree.readable(entry):
            yield from _in_file(entry.path, contents[entry.path], places)


def in_environment(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield credentials among variables, by their values and names."""
    for name, value in env.items():
        found = _first(f"{name}={value}".encode(errors="surrogateescape"), named=True)
        if found:
            reason = "every process of the agent has this variable; give it to none of them"
            yield Finding(
                risk="high", kind="credential", path=f"${name}", reason=reason, evidence=found
            )


def _in_file(path: str, content: bytes, places: Places) -> Iterator[Finding]:
    found = _first(content, named=holds_credentials(path))
    if found:
        reason = "the agent can use it outside, or with services it can reach; take it out"
        # tests have keys of their own, made for them
        risk: Risk = "low" if places.fixture(path) else "high"
        # without its configuration git does not work, and a source file is there to be read
        only_that = holds_credentials(path) and not path.endswith("/.git/config")
        yield _finding(risk, path, reason, found, remedy="hide" if only_that else "")


def _first(content: bytes, *, named: bool) -> str:
    """Return what the first secret in `content` is, "" when there is none."""
    for what, form in (*_FORMS, *(_ASSIGNMENTS if named else ())):
        for match in form.finditer(content):
            secret = next((part for part in match.groupdict().values() if part), b"")
            if not _PLACEHOLDER.match(secret) and secret not in _PUBLIC:
                return f"{what} of {len(secret)} characters"
    return ""


def _finding(risk: Risk, path: str, reason: str, evidence: str, remedy: Remedy = "hide") -> Finding:
    return Finding(
        risk=risk, kind="credential", path=path, reason=reason, evidence=evidence, remedy=remedy
    )
