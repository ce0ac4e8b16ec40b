"""Builds shared libraries from C and C++ sources at first use, once for each machine.

A library lies in ``$XDG_CACHE_HOME/narrowkv`` (by default ``~/.cache/narrowkv``), in a folder named after its
sources, the headers beside them, the compiler, the flags and the processor. Two processes that need it at the
same time build it once. Other packages of the repository build their libraries with `build_library` too.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

_NAMES = {"c": ("CC", ("cc", "gcc", "clang")), "c++": ("CXX", ("c++", "g++", "clang++"))}


class BuildError(RuntimeError):
    """There is no compiler, or it refused the sources."""


def cache_folder() -> Path:
    """The folder of all libraries; removing it is safe."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "narrowkv"
    except RuntimeError:  # no home
        return Path(tempfile.gettempdir()) / f"narrowkv-{os.getuid()}"


@lru_cache(maxsize=8)
def _compiler(kind: str, named: str | None) -> tuple[tuple[str, ...], str]:
    """Command of the compiler, and its version.

    Raises:
        BuildError: if there is none.
    """
    variable, names = _NAMES[kind]
    for name in [named] if named else names:
        command = tuple(shlex.split(name))
        found = shutil.which(command[0])
        if found is None:
            continue
        shown = subprocess.run([found, *command[1:], "--version"], capture_output=True, text=True)
        if shown.returncode == 0:
            return (found, *command[1:]), shown.stdout
    tried = f"{variable}={named} does not run" if named else f"none of {', '.join(names)} is in PATH"
    raise BuildError(f"no {kind.upper()} compiler: {tried}; install one, or name it in {variable}")


@lru_cache(maxsize=1)
def _processor() -> dict[str, str]:
    """What Linux says of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    pairs = [line.partition(":") for line in reversed(lines) if ":" in line]
    return {name.strip(): value.strip() for name, _, value in pairs}


def processor_flags() -> set[str]:
    """The names of the processor's extensions; none if Linux does not say."""
    return set(_processor().get("flags", "").split())


def text_of(sources: Sequence[Path]) -> list[str]:
    """Names and contents of sources, and of the headers (``*.h``) in their folders."""
    headers = sorted({h for source in sources for h in source.parent.glob("*.h")})
    return [f"{path.name}\n{path.read_text()}" for path in (*sources, *headers)]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise BuildError(f"{shlex.join(command)} failed with status {done.returncode}: {first}")


def build_library(name: str, sources: Sequence[Path], compiler: str = "c", flags: Sequence[str] = ()) -> Path:
    """The path of a shared library, which is built if the cache does not hold it.

    Args:
        name: of the library, without ``lib`` and ``.so``.
        sources: files to compile. Headers (``*.h``) in their folders count as sources too.
        compiler: "c" or "c++"; the environment variables CC and CXX name another than the first in PATH.
        flags: of the compiler and of the linker.

    Returns:
        The path, which names the versions of everything that went into the library.

    Raises:
        BuildError: in one line, if there is no compiler or it fails.

    Example:
        >>> from pathlib import Path
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "one.c").write_text("int one(void) { return 1; }")
        >>> import ctypes
        >>> ctypes.CDLL(str(build_library("one", [folder / "one.c"]))).one()
        1
    """
    named = os.environ.get("CC") if compiler == "c" else os.environ.get("CXX")
    command, version = _compiler(compiler, named or None)
    # Of the processor what ``-march=native`` depends on.
    wanted = ("flags", "Features", "model name", "cpu family", "model", "CPU part")
    processor = [f"{name}: {_processor()[name]}" for name in wanted if name in _processor()]
    parts = [shlex.join([*command, *flags]), version, platform.machine(), *processor, *text_of(sources)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    folder = cache_folder() / f"{name}-{key}"
    library = folder / f"lib{name}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"{folder} cannot be made: {error.strerror}; set XDG_CACHE_HOME") from None
    with _locked(folder / "lock"), tempfile.TemporaryDirectory(dir=folder) as work:
        if library.exists():
            return library
        objects = [str(Path(work) / f"{number}.o") for number in range(len(sources))]
        commands = [
            [*command, *flags, "-fPIC", "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max(os.cpu_count() or 1, 1)) as pool:
            list(pool.map(_run, commands))
        made = str(Path(work) / library.name)
        _run([*command, "-shared", *objects, "-o", made, *flags])
        Path(made).replace(library)
    return library
