"""Compiles the parts in C and C++ once for each version of torch and Triton, into a cache folder.

The folder is `~/.cache/narrowkv-virtual-gpu`, or a folder of that name in XDG_CACHE_HOME. A product lies in a
subfolder named after everything that it depends on: source, command, compiler and versions. It is written
under another name and renamed when it is whole, while a lock on the subfolder is held: of two processes that
need it one compiles and the other waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from narrowkv.cdna_emulator.compiled import building

from .errors import VirtualGpuError

__all__ = ["cache_folder", "clean", "hip_runtime", "torch_device"]

_NATIVE = Path(__file__).parent / "native"


def cache_folder() -> Path:
    """Where the products are."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "narrowkv-virtual-gpu"


def clean() -> dict[Path, int]:
    """Removes the cache folder, and the emulator's, where its compiled engine lies.

    Returns:
        The number of bytes that were removed with each.
    """
    sizes = {}
    for folder in (cache_folder(), building.cache_folder()):
        sizes[folder] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        shutil.rmtree(folder, ignore_errors=True)
    return sizes


def hip_runtime() -> Path:
    """The HIP runtime library, compiled against the HIP headers that Triton brings."""
    include = _package_folder("triton") / "backends" / "amd" / "include"
    if not include.is_dir():
        raise VirtualGpuError(f"this Triton has no AMD backend: {include} does not exist")
    flags = ["-O2", "-D__HIP_PLATFORM_AMD__", f"-I{include}", "-ldl", "-lpthread"]
    # Triton insists on this file name.
    return _product("libamdhip64.so", "hip_runtime.c", "C", flags, ["triton"])


def torch_device() -> Path:
    """The library that adds the device "cuda" to a CPU build of torch."""
    folder = _package_folder("torch")
    flags = [
        "-O1", "-std=c++20", f"-I{folder / 'include'}", f"-L{folder / 'lib'}", "-ltorch_cpu", "-lc10",
        f"-Wl,-rpath,{folder / 'lib'}",
    ]  # fmt: skip
    return _product("torch_device.so", "torch_device.cpp", "C++", flags, ["torch"])


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise VirtualGpuError(f"the virtual GPU needs {name}, which is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _compiler(language: str) -> str:
    """The compiler's path: CC or CXX, or the usual names."""
    named = os.environ.get("CXX") if language == "C++" else os.environ.get("CC")
    usual = ("g++", "clang++", "c++") if language == "C++" else ("gcc", "clang", "cc")
    for name in [named] if named else usual:
        if found := shutil.which(name):
            return found
    variable = "CXX" if language == "C++" else "CC"
    what = f"{variable}={named} is not there" if named else f"none of {', '.join(usual)} was found"
    raise VirtualGpuError(
        f"the virtual GPU needs a {language} compiler the first time and {what}: install one (on Debian and "
        f"Ubuntu `apt-get install g++`) or name one in {variable}"
    )


def _product(name: str, source: str, language: str, flags: list[str], packages: list[str]) -> Path:
    """The library `name`, compiled now if it is not in the cache folder.

    Args:
        name: file name of the library.
        source: its source in the folder `native`.
        language: "C" or "C++".
        flags: of the compiler, after the source's path.
        packages: distributions whose versions it depends on.

    Raises:
        VirtualGpuError: there is no compiler, it fails, or the folder cannot be written.
    """
    text = (_NATIVE / source).read_text()
    versions = [f"{package} {importlib.metadata.version(package)}" for package in packages]
    parts = [text, *flags, *versions, platform.machine(), os.environ.get("CXX", ""), os.environ.get("CC", "")]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    folder = cache_folder() / "-".join([source.split(".")[0], *versions, key]).replace(" ", "-")
    library = folder / name
    if library.is_file():
        return library
    compiler = _compiler(language)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not library.is_file():
                if language == "C++":
                    print(
                        f"virtual GPU: compiling its part for {versions[0]}, once (half a minute)",
                        file=sys.stderr,
                    )
                _compile([compiler, str(_NATIVE / source), "-shared", "-fPIC", "-w", *flags], folder, name)
    except OSError as error:
        raise VirtualGpuError(
            f"{folder} cannot be written ({error.strerror}): XDG_CACHE_HOME names another cache folder"
        ) from error
    return library


def _compile(command: list[str], folder: Path, name: str) -> None:
    unfinished = folder / f"{name}.{os.getpid()}"
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode:
        unfinished.unlink(missing_ok=True)
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise VirtualGpuError(f"{' '.join(command)} failed: {lines[0] if lines else done.returncode}")
    unfinished.rename(folder / name)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file; it is released when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
