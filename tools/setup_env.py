"""Makes the workspace's virtual environment, or brings it up to date. Standard library only.

Called by the Makefile. What it promises: a torch or triton that the calling Python already has is used and
never replaced (a constraints file pins both, so pip must fail rather than change them), and a torch for ROCm
that is too old, or whose Triton is too old or missing, ends the set-up before pip is asked; what is missing
is installed; where Triton is too old otherwise, the environment gets one of its own; every package of the
workspace is installed editable.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 11)
OLDEST_TRITON = (3, 8)
# Of AMD's wheels, which require the fork of Triton that belongs to them.
ROCM_INDEX = "https://repo.amd.com/rocm/whl-multi-arch/"
# The distributions that may carry the module: ROCm builds go by other names.
DISTRIBUTIONS = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton"),
}
PROBE = "import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
VERSION = (
    "import importlib.metadata as m\n"
    "for name in {names!r}:\n"
    "    try: print(name + '==' + m.version(name)); break\n"
    "    except m.PackageNotFoundError: pass"
)

# Version, and ROCm's version or nothing, of the torch that a Python finds, without importing it.
BUILD = (
    "import importlib.util as u, pathlib, runpy\n"
    "found = u.find_spec('torch')\n"
    "file = found and found.origin and pathlib.Path(found.origin).with_name('version.py')\n"
    "said = runpy.run_path(str(file)) if file and file.exists() else {}\n"
    "print(said.get('__version__', ''), said.get('hip') or '')"
)
# What torch requires of Triton, or nothing.
REQUIRED = (
    "import importlib.metadata as m\n"
    "print(*(r for r in m.requires('torch') or () if r.startswith(('triton', 'pytorch-triton'))))"
)


def say(text: str) -> None:
    """Prints one line of progress to stderr."""
    print(f"[set-up] {text}", file=sys.stderr, flush=True)


def call(*command: str | Path) -> None:
    """Runs a command from the workspace root and ends the set-up with its status if it fails."""
    done = subprocess.run([str(part) for part in command], cwd=ROOT)
    if done.returncode:
        sys.exit(f"[set-up] failed ({done.returncode}): {shlex.join(str(part) for part in command)}")


def has_module(python: Path, module: str) -> bool:
    """Whether `python` can find the top-level `module`, without importing it."""
    return subprocess.run([python, "-c", PROBE.format(module=module)], cwd=ROOT).returncode == 0


def output_of(python: Path, code: str) -> str:
    """What `python` prints for `code`; empty if that fails."""
    return subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def installed_pin(python: Path, module: str) -> str | None:
    """`name==version` of the distribution that provides `module`, or None where it has no metadata."""
    return output_of(python, VERSION.format(names=DISTRIBUTIONS[module])) or None


def is_older(version: str, oldest: tuple[int, int]) -> bool:
    """Whether a version such as "3.8.0+git2f1c" is older than major and minor version."""
    return tuple(map(int, version.split("+")[0].split(".")[:2])) < oldest


def triton_too_old(python: Path) -> str | None:
    """The version of the Triton that `python` has, if it is too old for the packages."""
    version = output_of(python, "import triton; print(triton.__version__)")
    return version if version and is_older(version, OLDEST_TRITON) else None


def refuse_old_rocm(python: Path) -> None:
    """Ends the set-up where a torch for ROCm is too old, or its Triton is too old or missing.

    The packages' requirement would have pip replace torch with the index's build, which is for CUDA.
    """
    words = output_of(python, BUILD).split()
    if len(words) < 2:  # no torch, or one that is not for ROCm
        return
    version, rocm = words
    oldest = ".".join(map(str, OLDEST_TORCH))
    if is_older(version, OLDEST_TORCH):
        fault = f"older than {oldest}; pip would replace it with a build for CUDA"
    elif not has_module(python, "triton"):
        fault = "has no Triton; PyPI's is not the one that it requires"
    elif triton := triton_too_old(python):
        fault = f"beside Triton {triton}, which is older than {'.'.join(map(str, OLDEST_TRITON))}"
    else:
        return
    sys.exit(
        f"[set-up] torch {version} of {python} is for ROCm {rocm} and {fault}. Install AMD's first:\n"
        f"  {python} -m pip install --upgrade 'torch[device-all]>={oldest}' --index-url {ROCM_INDEX}\n"
        "or start from a Python that has it: make setup PYTHON=/path/to/python"
    )


def create(folder: Path) -> None:
    """Makes the virtual environment; lets the caller's packages show through only if they hold a torch."""
    share = importlib.util.find_spec("torch") is not None
    sharing = "sharing" if share else "without"
    say(f"virtual environment {folder} (Python {sys.version.split()[0]}, {sharing} its packages)")
    try:
        venv.create(folder, system_site_packages=share, with_pip=True, clear=True, symlinks=True)
    except subprocess.CalledProcessError:
        sys.exit("[set-up] this Python cannot make virtual environments; on Debian: apt install python3-venv")
    if share and sys.prefix != sys.base_prefix:
        # A venv made from a venv sees the base Python's packages, not those of the venv it was made from.
        inner = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (inner / "outer_environment.pth").write_text("\n".join(sorted(outer)) + "\n")


def main() -> None:
    """Creates or updates the environment named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, required=True, help="folder of the virtual environment")
    parser.add_argument(
        "--torch", required=True, help="pip requirement (and options) used where there is no torch"
    )
    parser.add_argument("--triton", required=True, help="pip requirement used where there is no triton")
    options = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        found = sys.version.split()[0]
        sys.exit(f"[set-up] Python >= 3.10 is needed, this is {found}; try: make PYTHON=python3.12")

    refuse_old_rocm(Path(sys.executable))
    folder = options.venv if options.venv.is_absolute() else ROOT / options.venv
    python = folder / "bin" / "python"
    if (
        not python.exists()
        or subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode
    ):
        create(folder)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    call(*pip, "install", "--quiet", "--upgrade", "pip>=25.1")  # the first that reads dependency groups

    for module, requirement in (("torch", options.torch), ("triton", options.triton)):
        if has_module(python, module):
            say(f"{module}: using {installed_pin(python, module) or 'the one that is there'}")
        else:
            say(f"{module}: installing {requirement} (once; it is large)")
            call(*pip, "install", *shlex.split(requirement))

    pins = [pin for module in DISTRIBUTIONS if (pin := installed_pin(python, module))]
    required = output_of(python, REQUIRED)
    # A Triton that was installed here beside a torch that requires another: pip would find no solution.
    pins = [pin for pin in pins if not (required and pin.startswith("triton==") and pin not in required)]
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{pin}\n" for pin in pins))

    projects = sorted(
        path.parent for path in (*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("cli/pyproject.toml"))
    )
    say(f"tools and {len(projects)} packages of this workspace")
    call(*pip, "install", "--quiet", "--constraint", constraints, "--group", "dev")
    editables = [part for project in projects for part in ("--editable", project)]
    if editables:
        call(*pip, "install", "--quiet", "--constraint", constraints, "--no-build-isolation", *editables)
    if too_old := triton_too_old(python):  # pip puts back what torch requires, so this comes last
        say(f"triton: installing {options.triton} in place of {too_old}, in {folder} only")
        call(*pip, "install", "--no-deps", *shlex.split(options.triton))
    say("done")


if __name__ == "__main__":
    main()
