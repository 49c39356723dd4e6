"""Builds the C parts: the extension `_fastpath._core` and the static executables in `dsecd/bin`.

Everything declarative is in pyproject.toml. The executables are ordinary programs, not extension
modules, so a command of its own (`build_native`) compiles them; `build_ext` runs it, which makes
wheels, editable installs and ``setup.py build_native --inplace`` agree on what is built.
With ``DSEC_SANITIZE=1`` in the environment they are built again with ASan and UBSan into
``dsecd/bin/asan``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import ClassVar, NamedTuple

from setuptools import Command, Extension, find_namespace_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
NATIVE = "src/_fastpath"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wmissing-prototypes", "-Wvla")
COMMON = ("-std=gnu11", "-D_GNU_SOURCE=", f"-I{NATIVE}")
STATIC = ("-static", "-fno-pie", "-no-pie")
SHARED = ("-shared", "-fPIC")
RELEASE = ("-O2", "-g1", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2")
# PID 1 of every sandbox starts from one of these: musl's start-up touches a third of the memory of
# glibc's, and asks the processor nothing (each CPUID costs a virtual machine an exit).
MUSL = ("-idirafter", "/usr/include", "-idirafter",
        f"/usr/include/{sysconfig.get_config_var('MULTIARCH')}")  # fmt: skip
SANITIZE = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined",
            "-fno-sanitize-recover=undefined")  # fmt: skip


class Executable(NamedTuple):
    """A program of `dsecd/bin`: it is skipped while `main` does not exist."""

    name: str
    main: str
    folders: tuple[str, ...]
    libraries: tuple[str, ...] = ()  # shared ones; without any it is linked statically
    preloaded: bool = False  # into a program of the host: a shared object

    def sources(self) -> list[str]:
        found = [path for folder in self.folders for path in _files(folder, "*.c")]
        mains = {f"{NATIVE}/{part}/main.c" for part in ("init", "spawner", "blobd")} - {self.main}
        return sorted((set(found) | {self.main}) - mains)


EXECUTABLES = (
    Executable("dsec-init", f"{NATIVE}/init/main.c", (f"{NATIVE}/wire", f"{NATIVE}/init")),
    Executable(
        "dsec-spawner",
        f"{NATIVE}/spawner/main.c",
        (f"{NATIVE}/wire", f"{NATIVE}/native", f"{NATIVE}/spawner"),
    ),
    Executable(
        "dsec-floor",
        "benchmarks/floor.c",
        (f"{NATIVE}/wire", f"{NATIVE}/native", f"{NATIVE}/spawner"),
    ),
    Executable(
        "dsec-blobd",
        f"{NATIVE}/blobd/main.c",
        (f"{NATIVE}/wire", f"{NATIVE}/blobd"),
        ("curl", "crypto", "pthread"),
    ),
    Executable("dsec-ram.so", f"{NATIVE}/vmm/ram.c", (), preloaded=True),
)


def _files(folder: str, pattern: str) -> list[str]:
    """Return the files of the checkout that match, relative to it, in a stable order."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).glob(pattern))


def _run(command: list[str]) -> None:
    print(" ".join(command), file=sys.stderr)
    subprocess.run(command, check=True, cwd=ROOT)


def _stale(target: Path, sources: list[str]) -> bool:
    """Headers count too: any file of the C tree that is newer than `target`."""
    if not target.exists():
        return True
    built = target.stat().st_mtime
    headers = _files(NATIVE, "**/*.h")
    return any((ROOT / path).stat().st_mtime > built for path in [*sources, *headers, "setup.py"])


class BuildNative(Command):
    """Compile the executables into the package, or with ``--inplace`` into src/dsecd/bin."""

    description = "build dsec-init and dsec-spawner"
    user_options: ClassVar = [
        ("inplace", "i", "build into src/"),
        ("build-lib=", "b", "package root to build into"),
        ("only=", "o", "name of the one executable to build"),
    ]
    boolean_options: ClassVar = ["inplace"]

    def initialize_options(self) -> None:
        self.inplace = False
        self.build_lib: str | None = None
        self.only: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        os.chdir(ROOT)
        root = Path("src") if self.inplace else Path(self.build_lib or "build/lib")
        for executable in EXECUTABLES:
            if self.only not in (None, executable.name) or not Path(executable.main).exists():
                continue
            linked = SHARED if executable.preloaded else () if executable.libraries else STATIC
            self._build(executable, root / "dsecd/bin", (*RELEASE, *linked))
            if os.environ.get("DSEC_SANITIZE") == "1" and not executable.preloaded:
                self._build(executable, root / "dsecd/bin/asan", SANITIZE)

    def _build(self, executable: Executable, folder: Path, flags: tuple[str, ...]) -> None:
        target = folder / executable.name
        sources = executable.sources()
        if not _stale(target, sources):
            return
        folder.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}")
        musl = shutil.which("musl-gcc") if "-static" in flags else None
        compiler = os.environ.get("CC") or musl or "cc"
        extra = MUSL if compiler == musl else ()
        libraries = [f"-l{name}" for name in executable.libraries]
        _run([compiler, *COMMON, *WARNINGS, *flags, *extra, *sources, "-o", str(part), *libraries])
        part.replace(target)  # a running one keeps its inode


class BuildExtensions(build_ext):
    """The Cython extension, then the executables, to the same place."""

    def run(self) -> None:
        super().run()
        command = self.get_finalized_command("build_native")
        command.inplace = bool(self.inplace or getattr(self, "editable_mode", False))
        if not command.inplace:
            command.build_lib = self.build_lib
        command.run()


def _extensions() -> list[Extension]:
    source = ROOT / NATIVE / "_core.pyx"
    if not source.exists():
        return []
    from Cython.Build import cythonize

    os.chdir(ROOT)
    core = Extension(
        "_fastpath._core",
        [
            f"{NATIVE}/_core.pyx",
            *_files(f"{NATIVE}/native", "*.c"),
            *_files(f"{NATIVE}/erofs", "*.c"),
            *_files(f"{NATIVE}/bpf", "*.c"),
        ],
        include_dirs=[NATIVE],
        libraries=["crypto"],
        define_macros=[("_GNU_SOURCE", "1")],
        extra_compile_args=["-std=gnu11", "-O2", "-g1", "-Wall", "-Wextra"],
        depends=[
            *_files(NATIVE, "*.pxi"),
            *_files(f"{NATIVE}/native", "*.h"),
            *_files(f"{NATIVE}/erofs", "*.h"),
            *_files(f"{NATIVE}/bpf", "*.h"),
        ],
    )
    return cythonize([core], language_level=3, include_path=[NATIVE])


def _packages() -> list[str]:
    src = find_namespace_packages(
        "src", include=["dsecd*", "dsec*", "_fastpath"], exclude=["dsecd.bin*"]
    )
    bench = [f"dsec_bench.{name}" for name in find_namespace_packages("benchmarks")]
    client = [f"libdsec.{name}" for name in find_namespace_packages("libdsec")]
    return [*src, "libdsec", *client, "dsec_bench", *bench]


assert sysconfig.get_platform().startswith("linux"), "DSec runs on Linux only"
setup(
    packages=[name for name in _packages() if "__pycache__" not in name],
    package_dir={"": "src", "libdsec": "libdsec", "dsec_bench": "benchmarks"},
    package_data={
        "": ["py.typed", "*.pyi"],
        "dsecd": ["bin/dsec-*", "bin/asan/dsec-*"],
        "dsecd.policy": ["catalogue.toml", "apparmor.in"],
    },
    include_package_data=False,  # sources stay out of wheels
    ext_modules=_extensions(),
    cmdclass={"build_native": BuildNative, "build_ext": BuildExtensions},
)
