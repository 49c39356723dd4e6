"""Which files of the host make up the environment: what the tools need, then a sample of the rest.

Only what everyone may read, below /usr and /etc. The sample is drawn by a hash of the path, so it
has the host's own distribution of sizes, and is the same in the next run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

PLACES = (Path("/usr"), Path("/etc"))
PROGRAMS = (
    "sh", "bash", "cat", "true", "ls", "find", "head", "xargs", "env", "id", "uname", "mkdir", "rm",
    "python3", "git", "gcc", "cc", "g++", "as", "ld", "make", "node", "java", "javac", "go",
)  # fmt: skip
SYSTEM_PATH = "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin"  # not what a user put in front
LIBRARY_MAX = 2 << 20  # of what the linker may want; programs bring theirs
SAMPLE_MAX = 64 << 20
LDD_AT_ONCE = 200
LOADER = ("/etc/ld.so.cache", "/etc/ld.so.conf")


def allowed(path: Path) -> bool:
    return any(path.is_relative_to(place) for place in PLACES)


def answer(*command: str) -> str:
    """Return what a program of the host says, "" when it is missing or fails."""
    found = shutil.which(command[0], path=SYSTEM_PATH)
    if found is None:
        return ""
    done = subprocess.run([found, *command[1:]], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


class Selection:
    """Paths of the host and their size, links as themselves with what they lead to."""

    def __init__(self) -> None:
        self.paths: dict[str, int] = {}
        self.size = 0

    @property
    def files(self) -> int:
        return len(self.paths)

    def add(self, path: Path) -> bool:
        """Take a file or link, the directories above it, and what a link leads to."""
        path = Path(os.path.realpath(path.parent)) / path.name
        name = str(path)
        if name in self.paths or not allowed(path):
            return name in self.paths
        try:
            status = path.lstat()
        except OSError:
            return False
        if stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IROTH:
            self._put(path, status.st_size)
        elif stat.S_ISLNK(status.st_mode):
            self._put(path, 0)
            target = path.parent / path.readlink()
            if not target.is_dir():
                self.add(target)
            elif target.is_relative_to("/etc"):  # configuration that a package keeps there
                self.add_tree(target)
        else:
            return False
        return True

    def _put(self, path: Path, size: int) -> None:
        for parent in reversed(path.parents[:-1]):
            self.paths.setdefault(str(parent), 0)
        self.paths[str(path)] = size
        self.size += size

    def add_tree(self, top: Path) -> None:
        """Take everything below the directory `top`."""
        for path in below(top):
            self.add(path)

    def add_program(self, name: str) -> bool:
        """Take a program and the libraries that the loader maps for it (ldd(1))."""
        found = shutil.which(name, path=SYSTEM_PATH)
        if found is None or not self.add(Path(found)):
            return False
        self.add_libraries([found])
        return True

    def add_libraries(self, programs: Sequence[str]) -> None:
        """Take what the loader maps for these programs and libraries (ldd(1))."""
        for start in range(0, len(programs), LDD_AT_ONCE):
            batch = programs[start : start + LDD_AT_ONCE]
            done = subprocess.run(["ldd", *batch], capture_output=True, text=True)
            for word in {word for word in done.stdout.split() if word.startswith("/")}:
                self.add(Path(word.rstrip(":")))

    def has(self, program: str) -> bool:
        """Whether a program that the search path leads to was taken."""
        found = shutil.which(program, path=SYSTEM_PATH)
        if found is None:
            return False
        path = Path(found)
        return str(Path(os.path.realpath(path.parent)) / path.name) in self.paths


def below(top: Path) -> Iterator[Path]:
    """Yield the files and links below `top`, in order, without other file systems."""
    device = top.stat().st_dev if top.is_dir() else 0
    for directory, names, files in os.walk(top):
        here = Path(directory)
        links = [name for name in names if (here / name).is_symlink()]
        names[:] = sorted(
            name for name in set(names) - set(links) if (here / name).stat().st_dev == device
        )
        for name in sorted([*files, *links]):
            yield here / name


def is_program(name: str) -> bool:
    """Whether a file is a program or a library (elf(5))."""
    try:
        with Path(name).open("rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def tool_trees() -> list[Path]:
    """Return the directories that the tools of this host need whole."""
    texts = [
        answer("python3", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"),
        answer("git", "--exec-path"),
        answer("go", "env", "GOROOT"),
        "/usr/include" if answer("gcc", "--version") else "",
    ]
    trees = [Path(text) for text in texts if text]
    library = answer("gcc", "-print-libgcc-file-name")
    if library:
        trees.append(Path(library).parent)
    java = shutil.which("javac", path=SYSTEM_PATH)
    if java is not None:
        trees.append(Path(java).resolve().parents[1])
    return [tree for tree in trees if tree.is_dir() and allowed(tree.resolve())]


def choose(limit: int) -> Selection:
    """Return a selection of about `limit` bytes: the tools first, whatever they come to."""
    chosen = Selection()
    for program in PROGRAMS:
        chosen.add_program(program)
    for tree in tool_trees():
        chosen.add_tree(tree)
    chosen.add_libraries([path for path in chosen.paths if chosen.paths[path] and is_program(path)])
    multiarch = answer("gcc", "-print-multiarch") or answer("gcc", "-dumpmachine")
    libraries = Path("/usr/lib") / multiarch
    if multiarch and libraries.is_dir():
        for path in sorted(libraries.iterdir()):
            if path.is_file() and path.stat().st_size <= LIBRARY_MAX:
                chosen.add(path)
    for text in LOADER:
        chosen.add(Path(text))
    fill(chosen, limit)
    return chosen


def fill(chosen: Selection, limit: int) -> None:
    """Take more of /usr until the size is reached or nothing is left."""
    for path in sorted(below(Path("/usr")), key=drawn):
        if chosen.size >= limit:
            return
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= SAMPLE_MAX:
            chosen.add(path)


def drawn(path: Path) -> bytes:
    return hashlib.blake2b(os.fsencode(path), digest_size=8).digest()
