"""The assembly of each code object that Triton loads, proven to be that of the code object's machine code.

The emulator runs assembly text, a HIP runtime is given machine code. Triton keeps both: before it loads a
kernel it calls `knobs.runtime.kernel_load_start_hook` with the kernel's files. The text is assembled again,
by the LLVM in Triton, and must give the machine code that was loaded, byte for byte.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from .code_object import machine_code

__all__ = ["AssemblyError", "assembly_of", "remember_assembly"]

_files: dict[str, Path] = {}  # assembly of a code object, by the code object's hash


class AssemblyError(ValueError):
    """The assembly of a code object is not known, is another's, or calls functions."""


def remember_assembly(
    module: Any, function: Any, name: str, metadata_group: dict[str, str], digest: str
) -> None:
    """Triton's hook: notes which assembly belongs to the code object that is about to be loaded."""
    files = {Path(path).suffix: Path(path) for path in metadata_group.values()}
    if ".hsaco" in files and ".amdgcn" in files:
        _files[_key(files[".hsaco"].read_bytes())] = files[".amdgcn"]


def assembly_of(elf: bytes, arch: str) -> str:
    """The assembly of a code object.

    Args:
        elf: the code object.
        arch: "gfx942" or "gfx950".

    Raises:
        AssemblyError: Triton did not load it, its assembly gives other machine code, or it calls functions,
            whose addresses the linker writes.
    """
    file = _files.get(_key(elf))
    if file is None:
        raise AssemblyError(
            "the assembly of this code object is not known: the virtual GPU runs kernels that Triton "
            "compiled and loads, not code objects from elsewhere"
        )
    text = file.read_text()
    if "s_swappc_b64" in text:
        raise AssemblyError("the kernel calls functions (noinline=True), which the virtual GPU does not run")
    if machine_code(_assemble(text, arch)) != machine_code(elf):
        raise AssemblyError(f"{file} is not the assembly of the code object beside it: delete that folder")
    return text


def _key(elf: bytes) -> str:
    return hashlib.sha256(elf).hexdigest()


def _assemble(text: str, arch: str) -> bytes:
    try:
        from triton.backends.amd.compiler import assemble_amdgcn
    except ImportError:  # Triton 3.8
        from triton._C.libtriton.amd import assemble_amdgcn
    from triton._C.libtriton import llvm

    llvm.init_targets()  # a process that takes every kernel from Triton's cache has not compiled
    return bytes(assemble_amdgcn(text, arch, ""))
