"""The root of the jail that QEMU runs in: the program of this host, what it loads, and no more.

It is made once per installed QEMU and imported as a layer of `Tree.name`, which changes with any
byte of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import msgspec

from dsecd.host import binaries
from dsecd.host.qemu import RAM_LIBRARY
from libdsec.errors import Internal, Unsupported

PROGRAM = Path("/usr/bin/qemu-system-x86_64")
PACKAGE = "qemu-system-x86 (apt-get install --no-install-recommends qemu-system-x86)"
VMM_UID = 1000  # of the user `vmm` inside
LAYER = "base/dsec-qemu"

# What a q35 machine reads: a BIOS and that of its screen, the faster qboot for one that is given
# its kernel, option ROMs, and what the screen's server knows of keyboards.
_FIRMWARE = (
    "bios-256k.bin", "qboot.rom", "linuxboot_dma.bin", "kvmvapic.bin", "vgabios-stdvga.bin",
    "keymaps/en-us",
)  # fmt: skip
_FIRMWARE_PLACES = (Path("/usr/share/qemu"), Path("/usr/share/seabios"))
_FIRMWARE_TARGET = "usr/share/qemu"
_MODULES = ("accel-tcg-x86_64.so",)  # of QEMU; where it is none, it is built in
_DIRECTORIES = ("dev", "etc", "proc", "sys", "tmp", "vm", "usr/bin", "usr/lib", "usr/lib64")
_LINKS = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64"}
_FILES = {
    "etc/passwd": (
        "root:x:0:0:root:/:/usr/sbin/nologin\n"
        f"vmm:x:{VMM_UID}:{VMM_UID}:virtual machine monitor:/vm:/usr/sbin/nologin\n"
    ),
    "etc/group": f"root:x:0:\nvmm:x:{VMM_UID}:\n",
}
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}  # whose words are read
_PT_INTERP = 3
_VERSION = re.compile(r"version (\d+(?:\.\d+)+)")
_LIBRARY = re.compile(r"^\s*(\S+) => (/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)
_MISSING = re.compile(r"^\s*(\S+) => not found$", re.MULTILINE)


class Part(msgspec.Struct, frozen=True, order=True):
    """A file of the host, and its place in the tree (no leading slash)."""

    target: str
    source: Path


class Tree(msgspec.Struct, frozen=True):
    """What the jail's root is made of, and the name of the layer that holds it."""

    name: str
    parts: tuple[Part, ...]


def version(program: Path = PROGRAM) -> str:
    """Return the version of QEMU, as 7.2.22. Raises `Unsupported` when it cannot be run."""
    if not program.exists():
        raise Unsupported(
            f"{program} is missing: install {PACKAGE}", reason=f"not there: install {PACKAGE}"
        )
    match = _VERSION.search(_output(str(program), "--version"))
    if match is None:
        raise Unsupported(f"{program} is no QEMU", reason="it does not say its version")
    return match[1]


def survey(program: Path = PROGRAM) -> Tree:
    """Return what the tree is made of. Reads all of it, some 60 MB. Raises `Unsupported`."""
    number = version(program)
    loader = _loader(program)
    libraries = _libraries(loader, program)
    place = libraries.get("libc.so.6")
    if place is None:
        raise Unsupported(f"{program} has no C library", reason="not linked with glibc")
    modules = [path for name in _MODULES if (path := place.parent / "qemu" / name).exists()]
    for module in modules:
        libraries |= _libraries(loader, module)
    # all in one directory, one where the loader looks without a cache: that of the C library
    directory = _within_usr(place.parent.resolve())
    parts = [
        Part("usr/bin/" + PROGRAM.name, program.resolve()),
        Part(RAM_LIBRARY.lstrip("/"), binaries.find("", Path(RAM_LIBRARY).name)),
        Part(_within_usr(loader), loader.resolve()),
        *(Part(f"{directory}/{name}", path.resolve()) for name, path in libraries.items()),
        *(Part(f"{directory}/qemu/{path.name}", path.resolve()) for path in modules),
        *(Part(f"{_FIRMWARE_TARGET}/{name}", _firmware(name)) for name in _FIRMWARE),
    ]
    found = tuple(sorted(parts))
    return Tree(f"{LAYER}:{number}-{_digest(found)[:12]}", found)


def assemble(tree: Tree, to: Path) -> None:
    """Copy `tree` into the empty directory `to`, with fixed modes and times.

    All of it belongs to who does it, but /vm, when that is root, to the monitor: it makes its
    sockets there. Raises `OSError`.
    """
    for name in _DIRECTORIES:
        (to / name).mkdir(parents=True, exist_ok=True)
    for name, target in _LINKS.items():
        (to / name).symlink_to(target)
    for part in tree.parts:
        place = to / part.target
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(part.source, place)
        place.chmod(0o755 if os.access(part.source, os.X_OK) else 0o644)
    for name, text in _FILES.items():
        (to / name).write_text(text)
        (to / name).chmod(0o644)
    for folder, directories, files in os.walk(to, topdown=False):
        here = Path(folder)
        for name in (*directories, *files):
            os.utime(here / name, (0, 0), follow_symlinks=False)
        here.chmod(0o755)
    (to / "tmp").chmod(0o1777)
    if os.geteuid() == 0:
        os.chown(to / "vm", VMM_UID, VMM_UID)
    os.utime(to, (0, 0))


def _digest(parts: tuple[Part, ...]) -> str:
    """Return a digest of all that `assemble` makes."""
    digest = hashlib.sha256(repr((_DIRECTORIES, _LINKS, _FILES)).encode())
    for part in parts:
        with part.source.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{part.target}\0{content}\n".encode())
    return digest.hexdigest()


def _loader(program: Path) -> Path:
    """Return the dynamic loader that a 64-bit ELF file (elf(5)) names."""
    with program.open("rb") as file:
        head = file.read(64)
        if head[:5] != b"\x7fELF\x02":
            raise Unsupported(f"{program} is no 64-bit program", reason="not ELF64")
        (offset,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        for index in range(count):
            file.seek(offset + index * size)
            header = file.read(56)
            if struct.unpack_from("<I", header)[0] == _PT_INTERP:
                start, length = struct.unpack_from("<Q", header, 8)[0], header[32:40]
                file.seek(start)
                name = file.read(struct.unpack("<Q", length)[0])
                return Path(os.fsdecode(name.rstrip(b"\0")))
    raise Unsupported(f"{program} is linked statically", reason="it names no loader")


def _libraries(loader: Path, program: Path) -> dict[str, Path]:
    """Return what `program` loads, as its loader finds it: name → file. Nothing of it is run."""
    listed = _output(str(loader), "--list", str(program))
    missing = _MISSING.findall(listed)
    if missing:
        raise Unsupported(
            f"{program} lacks libraries: {', '.join(missing)}", reason="libraries are missing"
        )
    return {Path(name).name: Path(path) for name, path in _LIBRARY.findall(listed)}


def _within_usr(path: Path) -> str:
    """Return a path of the merged /usr: /lib64/x is /usr/lib64/x."""
    text = str(path).lstrip("/")
    return text if text.startswith("usr/") else f"usr/{text}"


def _firmware(name: str) -> Path:
    for place in _FIRMWARE_PLACES:
        if (place / name).exists():
            return (place / name).resolve()
    raise Unsupported(
        f"{name} is in none of {', '.join(map(str, _FIRMWARE_PLACES))}: install {PACKAGE}",
        reason=f"no firmware {name}",
    )


def _output(*command: str) -> str:
    done = subprocess.run(
        command, env=_ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise Internal(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
