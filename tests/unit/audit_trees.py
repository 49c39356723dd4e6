"""Trees for tests of the audit: a clean one like Debian's, and each thing that it looks for."""

from __future__ import annotations

from dataclasses import dataclass

from libdsec.audit.tree import Agent, Entry, Tree

ROOT = Agent()
USER = Agent(uid=1000, gids=frozenset({1000}))
WORKDIR = "/workspace"

CLEAN = (
    Entry("/usr/bin/python3", "symlink", target="python3.11"),
    Entry("/usr/bin/python3.11", "file", 6_000_000, 0o755),
    Entry("/usr/bin/passwd", "file", 68_000, 0o4755),
    Entry("/usr/bin/su", "file", 72_000, 0o4755),
    Entry("/usr/lib/openssh/ssh-keysign", "file", 653_000, 0o4755),
    Entry("/usr/include/c++/12/expected", "file", 40_000),
    Entry("/usr/share/perl/5.36/unicore/lib/test/solution.pl", "file", 100),
    Entry("/usr/share/doc/git/contrib/hooks/pre-auto-gc-battery", "file", 900, 0o755),
    Entry("/usr/share/git-core/templates/hooks/pre-commit.sample", "file", 1600, 0o755),
    Entry("/usr/lib/python3.11/test/test_os.py", "file", 170_000),
    Entry("/usr/lib/python3.11/test/expected_output.txt", "file", 100),
    Entry("/usr/lib/python3.11/sitecustomize.py", "symlink",
          target="/etc/python3.11/sitecustomize.py"),
    Entry("/etc/python3.11/sitecustomize.py", "file", 155),
    Entry("/usr/lib/python3/dist-packages/distutils-precedence.pth", "file", 151),
    Entry("/usr/lib/python3/dist-packages/numpy/conftest.py", "file", 4000),
    Entry("/usr/lib/python3/dist-packages/numpy/tests/test_x.py", "file", 4000),
    Entry("/usr/lib/python3/dist-packages/google/auth/service_account.json", "file", 2000),
    Entry("/usr/share/calendar/expected.patch", "file", 10),
    Entry("/etc/ssl/private/ssl-cert.key", "file", 1700, 0o640),
    Entry("/etc/shadow", "file", 500, 0o640, 0, 42),
    Entry("/var/lib/dpkg/info/libc6.md5sums", "file", 30_000),
    Entry("/var/log/dpkg.log", "file", 10_000),
    Entry("/root/.bashrc", "file", 571),
    Entry("/root/.profile", "file", 161),
    Entry("/home/agent/.bashrc", "file", 3526, 0o644, 1000, 1000),
    Entry("/workspace/src/solve.py", "file", 300, 0o644, 1000, 1000),
    Entry("/workspace/src/goldfish.py", "file", 300, 0o644, 1000, 1000),
    Entry("/workspace/src/resolution.py", "file", 300, 0o644, 1000, 1000),
    Entry("/workspace/README.md", "file", 300, 0o644, 1000, 1000),
    Entry("/workspace/node_modules/left-pad/test/index.test.js", "file", 300, 0o644, 1000, 1000),
    Entry("/workspace/empty/solution.py", "file", 0, 0o644, 1000, 1000),
)  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """A file of the agent's, unless `uid` is 0, and the finding that it must give."""

    path: str
    kind: str
    risk: str
    content: bytes = b"x"
    mode: int = 0o644
    uid: int = 1000
    type: str = "file"
    env: tuple[tuple[str, str], ...] = ()

    @property
    def entry(self) -> Entry:
        size = len(self.content)
        return Entry(self.path, self.type, size, self.mode, self.uid, self.uid)  # type: ignore[arg-type]


_KEY = b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n"
_AWS = b"[default]\naws_access_key_id = AKIA2E4TQW7KXPLMNOQR\n"

PLANTED = (
    Planted("/workspace/solution.py", "answer", "critical"),
    Planted("/workspace/Solution_final.ipynb", "answer", "critical"),
    Planted("/answers", "answer", "critical", type="dir", mode=0o755),
    Planted("/workspace/task/gold_patch.diff", "answer", "critical"),
    Planted("/workspace/test_patch", "answer", "critical"),
    Planted("/opt/task/hidden_tests", "answer", "critical", type="dir", mode=0o755),
    Planted("/workspace/ground-truth.json", "answer", "critical"),
    Planted("/tmp/solution\n.py", "answer", "critical"),
    Planted("/workspace/tests/fixtures/answer.txt", "answer", "high"),
    Planted("/workspace/expected_output.txt", "answer", "medium"),
    Planted("/workspace/0001-change.patch", "answer", "medium"),
    Planted("/workspace/tests", "tests", "medium", type="dir", mode=0o755),
    Planted("/workspace/test_one.py", "tests", "medium"),
    Planted("/srv/ro/test_two.py", "tests", "low", uid=0),
    Planted("/workspace/grader.py", "grader", "high"),
    Planted("/opt/task/run_tests.sh", "grader", "medium", uid=0),
    Planted("/workspace/conftest.py", "hook", "medium"),
    Planted("/workspace/sitecustomize.py", "hook", "high"),
    Planted("/home/agent/.local/lib/python3.11/site-packages/usercustomize.py", "hook", "high"),
    Planted("/home/agent/.local/lib/python3.11/site-packages/zz.pth", "hook", "high",
            b"import os; os.system('x')\n"),
    Planted("/etc/ld.so.preload", "hook", "high", b"/tmp/evil.so\n"),
    Planted("/home/agent/.gitconfig", "hook", "high", b"[core]\n\thooksPath = /tmp/hooks\n"),
    Planted("/workspace/node_modules/.hooks", "hook", "medium", type="dir", mode=0o755),
    Planted("/home/agent/.bashrc", "hook", "low"),
    Planted("/workspace/Makefile", "hook", "low"),
    Planted("/usr/local/bin", "path", "high", type="dir", mode=0o777, uid=0),
    Planted("/usr/bin/find", "setuid", "high", mode=0o4755, uid=0),
    Planted("/usr/lib/python3.11/os.py", "rights", "high", mode=0o666, uid=0),
    Planted("/workspace/app.py.rej", "leftover", "high"),
    Planted("/workspace/.app.py.swp", "leftover", "medium"),
    Planted("/workspace/pytest.log", "leftover", "low"),
    Planted("/workspace/.pytest_cache", "leftover", "low", type="dir", mode=0o755),
    Planted("/workspace/__pycache__/secret_tests.cpython-311.pyc", "leftover", "high"),
    Planted("/home/agent/.bash_history", "credential", "medium"),
    Planted("/home/agent/.ssh/id_ed25519", "credential", "high", _KEY),
    Planted("/home/agent/.aws/credentials", "credential", "high", _AWS),
    Planted("/home/agent/.netrc", "credential", "high",
            b"machine api.test login me password hunter22\n"),
    Planted("/home/agent/.npmrc", "credential", "high",
            b"//registry.test/:_authToken=0123456789abcdef0123\n"),
    Planted("/home/agent/.pypirc", "credential", "high", b"[pypi]\npassword = abcdefgh\n"),
    Planted("/home/agent/.docker/config.json", "credential", "high",
            b'{"auths": {"r.test": {"auth": "bWU6aHVudGVyMjI="}}}'),
    Planted("/home/agent/.kube/config", "credential", "high", b"- user:\n    token: abcdefghij\n"),
    Planted("/workspace/.env", "credential", "high", b"DEBUG=1\nAPI_TOKEN='s3cr3t-s3cr3t'\n"),
    Planted("/workspace/.git/config", "credential", "high",
            b'[remote "origin"]\n\turl = https://me:s3cr3tpw@git.test/x.git\n'),
    Planted("/workspace/notes.md", "credential", "high", b"use ghp_" + b"aB3" * 12 + b"\n"),
    Planted("/workspace/tests/data.json", "credential", "low", b"AKIA2E4TQW7KXPLMNOQR"),
)  # fmt: skip


def tree(*entries: Entry, agent: Agent = USER) -> Tree:
    """Return a tree with all directories that the paths need, root's, those of the agent's home
    and workdir the agent's.
    """
    found: dict[str, Entry] = {}
    for entry in entries:
        above = entry.parent
        while above != "/" and above not in found:
            own = above.startswith((WORKDIR, "/home/agent"))
            found[above] = Entry(above, "dir", 0, 0o755, 1000 if own else 0, 1000 if own else 0)
            above = above.rpartition("/")[0] or "/"
    found |= {entry.path: entry for entry in entries}
    if "/tmp" in found:
        found["/tmp"] = Entry("/tmp", "dir", 0, 0o1777)
    return Tree(found.values(), agent)
