"""Writes the kernels as a folder in the layout of Hugging Face's `kernels`, which loads it from any path.

The layout is that of huggingface.co/docs/kernels/kernel-requirements for kernels in pure Python: a folder
`build/torch-<backend>` for each backend, with `metadata.json`, imports relative to the folder, operators in a
namespace that no other build has, and nothing imported beside the standard library, torch and Triton. It has
append, decode, prefill and sparse attention. It computes on GPUs: narrowkv's interpreter needs numpy.

    python tools/kernels_hub.py hub/
    python -c "import kernels, pathlib; kernels.get_local_kernel(pathlib.Path('hub')).paged_decode"
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPERATIONS = ("paged_cache", "attn_decode", "attn_prefill", "sparse_fp8")
"""Packages whose public names the folder has."""
BACKENDS = {"cuda": ["9.0"], "rocm": ["gfx942", "gfx950"]}
"""Backends, each with the architectures that kernels are made for."""
INTERPRETER = "narrowkv.runtime.launch.interpreter"
NO_INTERPRETER = '''"""Calls with CPU tensors: this build computes on GPUs only."""

from ..errors import UnsupportedError


def interpret(*_, **__):
    """Refuses."""
    raise UnsupportedError(
        "this build of narrowkv computes on GPUs only; an installed narrowkv takes CPU tensors"
    )
'''


def source_of(module: str) -> Path | None:
    """The file of a module of narrowkv; None if there is none."""
    package = module.split(".")[1]
    base = ROOT / "packages" / package / "src" / Path(*module.split("."))
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


def absolute(name: str, node: ast.ImportFrom, is_package: bool) -> str:
    """The module that an import statement in module `name` names."""
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    above = parts[: len(parts) - node.level + is_package]
    return ".".join([*above, *(node.module or "").split(".")]).rstrip(".")


@dataclass
class Folder:
    """The modules of a build: what the operations' packages import, and what those modules import.

    A name that is imported from a package of the libraries is imported from the module that defines it: only
    modules come along that something needs.

    Attributes:
        files: text by the path in the folder.
    """

    files: dict[str, str] = field(default_factory=dict)

    def add(self, module: str) -> None:
        """Adds a module, the packages that it lies in, and everything that it imports."""
        path = source_of(module)
        if path is None:
            raise ModuleNotFoundError(f"narrowkv has no module {module}")
        is_package = path.name == "__init__.py"
        relative = "/".join(module.split(".")[1:]) + ("/__init__.py" if is_package else ".py")
        if relative in self.files:
            return
        self.files[relative] = ""
        above = module.rpartition(".")[0]
        if above.count("."):
            self.add(above)
        text = path.read_text()
        if module == INTERPRETER:
            text = NO_INTERPRETER
        elif is_package and module.split(".")[1] not in OPERATIONS:
            text = f'"""{ast.get_docstring(ast.parse(text))}\n"""\n'
        else:
            text = self._with_relative_imports(module, text, is_package)
        self.files[relative] = text

    def _with_relative_imports(self, module: str, text: str, is_package: bool) -> str:
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("narrowkv.")]
                found = [self._relative(module, name, None, is_package) for name in names]
            elif isinstance(node, ast.ImportFrom) and (
                node.level or (node.module or "").startswith("narrowkv.")
            ):
                origin = absolute(module, node, is_package)
                found = [self._relative(module, origin, alias, is_package) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "typing_extensions":
                # For type checkers alone: annotations are not evaluated.
                lines[node.lineno - 1] = " " * node.col_offset + "pass\n"
                continue
            else:
                continue
            made = {origin: [name for other, name in found if other == origin] for origin, _ in found}
            if made:
                assert node.end_lineno is not None
                indent = " " * node.col_offset
                lines[node.lineno - 1] = "".join(
                    f"{indent}from {origin} import {', '.join(listed)}\n" for origin, listed in made.items()
                )
                lines[node.lineno : node.end_lineno] = [""] * (node.end_lineno - node.lineno)
        return "".join(lines)

    def _relative(
        self, module: str, origin: str, alias: ast.alias | None, is_package: bool
    ) -> tuple[str, str]:
        """What `module` imports from where: the module `origin`, or the name `alias` from it."""
        name = None if alias is None else alias.name
        if name is not None and source_of(f"{origin}.{name}") is not None:
            origin, name = f"{origin}.{name}", None
        elif name is not None:
            origin = defining_module(origin, name)
        self.add(origin)
        dots = "." * (module.count(".") + is_package)
        target = origin.split(".")[1:]
        if name is None:
            *target, name = target
        renamed = f" as {alias.asname}" if alias is not None and alias.asname else ""
        return dots + ".".join(target), name + renamed


def defining_module(origin: str, name: str) -> str:
    """The module that defines a name imported from `origin`; `origin`, if that is an operation's package."""
    path = source_of(origin)
    assert path is not None, origin
    is_package = path.name == "__init__.py"
    if not is_package or origin.split(".")[1] in OPERATIONS:
        return origin
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return defining_module(absolute(origin, node, is_package), alias.name)
    return origin


def public_names(package: str) -> list[str]:
    """`__all__` of a package of narrowkv."""
    path = source_of(f"narrowkv.{package}")
    assert path is not None
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"narrowkv.{package} has no __all__")


def sources() -> dict[str, str]:
    """The files of a build by path, with operators in the namespace `narrowkv`."""
    folder = Folder()
    for package in OPERATIONS:
        folder.add(f"narrowkv.{package}")
    names = {package: public_names(package) for package in OPERATIONS}
    lines = ['"""Attention over narrow-precision KV caches, and the append that writes them."""\n']
    lines += [f"from .{package} import {', '.join(listed)}" for package, listed in names.items()]
    lines.append(f"\n__all__ = {sorted(name for listed in names.values() for name in listed)!r}")
    return {"__init__.py": "\n".join(lines) + "\n", **folder.files}


def write(out: Path, version: int = 0) -> list[Path]:
    """Writes the builds of all backends.

    Args:
        out: the folder that gets `build/`; a build that is there is replaced.
        version: the kernel's version in the metadata; 0 is for kernels that may still change.

    Returns:
        The folders of the builds.
    """
    files = sources()
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:7]
    written = []
    for backend, architectures in BACKENDS.items():
        namespace = f"_narrowkv_{backend}_{digest}"
        build = out / "build" / f"torch-{backend}"
        shutil.rmtree(build, ignore_errors=True)
        own = {
            path: re.sub(r"narrowkv::", f"{namespace}::", text).replace(
                "torch.ops.narrowkv", f"torch.ops.{namespace}"
            )
            for path, text in files.items()
        }
        # Older versions of `kernels` look for a package of the repository's name in the build.
        own["narrowkv/__init__.py"] = "from .. import *  # noqa: F403\nfrom .. import __all__  # noqa: F401\n"
        for path, text in own.items():
            file = build / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        metadata = {
            "name": "narrowkv",
            "id": namespace,
            "version": version,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend, "archs": architectures},
            "digest": {
                "algorithm": "sha256",
                "files": {path: _sha256(text) for path, text in sorted(own.items())},
            },
        }
        (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        written.append(build)
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    return written


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def main() -> None:
    """Writes the folder that the command line names."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--version", type=int, default=0, help="the kernel's version; 0 while it may still change"
    )
    options = parser.parse_args()
    for build in write(options.out, options.version):
        print(build)


if __name__ == "__main__":
    main()
