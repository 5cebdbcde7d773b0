"""Compiles C files to shared libraries, once per machine and user, and loads them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from ctypes import CDLL
from hashlib import sha256
from pathlib import Path

COMPILERS = "cc", "gcc", "clang"
# No -ffast-math: loops that may be reordered have an OpenMP pragma. errno and floating-point traps are not used.
FLAGS = "-std=gnu11", "-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fPIC"


class LibraryError(Exception):
    """The message says what is needed."""


class NoCompilerError(LibraryError):
    """There is no C compiler: the usual case, which needs no warning."""


def load(source: Path, *options: str) -> CDLL:
    """Compiles and loads a C file. If the cache folder cannot be written to, every process compiles it again.

    Raises:
        LibraryError: if there is no compiler, or it fails.
    """
    compiler = find_compiler()
    for flags in ([*FLAGS, *options, "-march=native"], [*FLAGS, *options]):  # not every compiler has -march=native
        about = _run([*compiler, *flags, "-dM", "-E", str(source)])
        if about.returncode == 0:
            break
    # Predefined macros identify the compiler and the CPU's features: machines may share one home folder.
    key = sha256(b"\0".join([source.read_bytes(), about.stdout, *map(str.encode, flags)])).hexdigest()
    name = f"{source.stem}-{key[:20]}.so"
    kept = cache_folder() / name
    with suppress(OSError):
        return CDLL(str(kept))
    with tempfile.TemporaryDirectory(prefix="deadreckon-") as place:
        fresh = Path(place) / name
        done = _run([*compiler, *flags, "-shared", str(source), "-o", str(fresh), "-lm"])
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise LibraryError(f"a C compiler that works: {shlex.join(compiler)} says {said!r}")
        try:
            return CDLL(str(_keep(fresh, kept)))
        except OSError as error:
            raise LibraryError(f"a folder from which libraries can be loaded: {error}") from error


def find_compiler() -> list[str]:
    """The compiler's command: the environment variable CC, or the first that is found."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for name in chosen[:1] or COMPILERS:
        if shutil.which(name):
            return chosen or [name]
    names = " or ".join(chosen[:1] or COMPILERS)
    raise NoCompilerError(f"a C compiler: there is no {names}, and the environment variable CC may name another")


def cache_folder() -> Path:
    """Where libraries are cached: in the user's own folder, so that nobody else can put one there."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deadreckon" / "native"
    except RuntimeError:  # there is no home folder
        return Path(os.devnull)  # never found, never written


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)


def _keep(fresh: Path, kept: Path) -> Path:
    """Copies the library into the cache, atomically, and returns its path; the fresh path if that fails."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as place:
            return Path(shutil.copy(fresh, place)).replace(kept)
    except OSError:
        return fresh
