"""Any one package installs alone from the wheels, pulls only its siblings, replaces no torch or triton.

Also from a checkout and from a git URL, as README.md says: one package or all of them.
"""

from __future__ import annotations

import csv
import email
import importlib.metadata
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from dataclasses import dataclass
from email.message import Message
from functools import cached_property
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from narrowkv.runtime.toolchain import OLDEST_TRITON, require_triton

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = {
    path.parent.name: path.parent
    for path in (*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("cli/pyproject.toml"))
}
# What a ROCm user has: an old torch with a local version, and a triton under another distribution's name.
ROCM_TORCH = "2.11.0+rocm7.14.0"
ROCM_TRITON = ("triton-rocm", "3.8.0+git2f1c")
# What an install of everything reads of a checkout.
NEEDED_FILES, NEEDED_FOLDERS = ("pyproject.toml", "README.md", "LICENSE"), ("packages", "cli")


@dataclass(frozen=True)
class Wheel:
    """A built wheel and what its metadata says."""

    path: Path

    @cached_property
    def files(self) -> list[str]:
        with zipfile.ZipFile(self.path) as archive:
            return archive.namelist()

    @cached_property
    def metadata(self) -> Message:
        with zipfile.ZipFile(self.path) as archive:
            return email.message_from_bytes(
                archive.read(next(f for f in self.files if f.endswith(".dist-info/METADATA")))
            )

    @property
    def distribution(self) -> str:
        return canonicalize_name(self.metadata["Name"])

    @property
    def code(self) -> list[str]:
        """Its files without the metadata."""
        return [file for file in self.files if not re.match(r"[^/]+\.dist-info/", file)]

    def requirements(self, extra: str = "") -> list[Requirement]:
        """What installing the wheel, with one of its extras or with none, requires."""
        everything = map(Requirement, self.metadata.get_all("Requires-Dist", []))
        return [r for r in everything if r.marker is None or r.marker.evaluate({"extra": extra})]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command that sees no pip settings and no import path of the machine it runs on."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    environment["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def write_distribution(folder: Path, name: str, version: str) -> None:
    """Writes the metadata of an installed distribution that holds no files."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text("")


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Writes a wheel of one module, as bait: an installer that takes it has replaced what was there."""
    info = f"{name}-{version}.dist-info"
    contents = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = io.StringIO()
    csv.writer(record).writerows([path, "", ""] for path in (*contents, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**contents, f"{info}/RECORD": record.getvalue()}.items():
            archive.writestr(path, text)


class CleanEnvironment:
    """A virtual environment without pip, in which requirements of wheels, if given, only seem installed."""

    def __init__(self, folder: Path, wheels: dict[str, Wheel] | None) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.python = folder / "bin" / "python"
        self.site = Path(
            run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
        )
        self.triton = self.site / "triton" / "__init__.py"
        if wheels is None:
            return
        required = {r.name for wheel in wheels.values() for r in wheel.requirements()}
        for name in required - set(wheels) - {"triton"}:
            version = ROCM_TORCH if name == "torch" else importlib.metadata.version(name)
            write_distribution(self.site, name, version)
        write_distribution(self.site, *ROCM_TRITON)
        self.triton.parent.mkdir()
        self.triton.write_text(f"__version__ = {ROCM_TRITON[1]!r}\n")

    def distributions(self) -> dict[str, str]:
        code = (
            "import importlib.metadata as m\nfor d in m.distributions(): print(d.metadata['Name'], d.version)"
        )
        lines = run(self.python, "-c", code).stdout.splitlines()
        return {canonicalize_name(name): version for name, version in map(str.split, lines)}

    def install(self, *requirements: str | Path, links: Path | None = None) -> None:
        """Installs without an index; a source is built by the hatchling of this process."""
        options = ["--find-links", links] if links else ["--no-build-isolation"]
        if not links:
            self.show_distribution("hatchling")
        pip = [sys.executable, "-m", "pip", "--python", self.python]
        run(*pip, "install", "--no-index", "--no-compile", *options, *requirements)

    def show_distribution(self, name: str) -> None:
        """Links a distribution of this process, and those that it requires, into the environment."""
        distribution = importlib.metadata.distribution(name)
        own = {
            file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")
        }
        for part in own:
            if not (self.site / part).exists():
                (self.site / part).symlink_to(Path(str(distribution.locate_file(part))))
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                self.show_distribution(requirement.name)

    def imports(self, *names: str, below: Path | None = None) -> None:
        """Imports packages of narrowkv, in one process of this environment, with our own torch and triton.

        They must lie below a folder: by default where the environment's packages are.
        """
        self.show_outer_packages()
        code = "".join(f"import narrowkv.{name} as package; print(package.__file__)\n" for name in names)
        places = run(self.python, "-c", code).stdout.split()
        assert len(places) == len(names)
        assert all(Path(place).is_relative_to(below or self.site) for place in places)

    def refuses(self, *names: str) -> None:
        """Packages of narrowkv that are not in this environment."""
        lines = (f"try: import narrowkv.{n}\nexcept ModuleNotFoundError as e: print(e.name)" for n in names)
        found = run(self.python, "-c", "\n".join(lines)).stdout.split()
        assert found == [f"narrowkv.{name}" for name in names]

    def show_outer_packages(self) -> None:
        """Puts this process's torch, triton and the rest in place of those that only seemed installed.

        Folders named in a .pth file are searched, but their own .pth files are not read: the workspace's
        editable installs stay out of sight.
        """
        self.triton.unlink()
        self.triton.parent.rmdir()
        own = [project / "src" for project in PROJECTS.values()]
        outer = [
            p for p in map(Path, sys.path) if p.name in ("site-packages", "dist-packages") and p not in own
        ]
        (self.site / "outer.pth").write_text("".join(f"{path}\n" for path in outer))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    """Every wheel of the workspace by distribution name, in a folder with bait for torch and triton."""
    folder = tmp_path_factory.mktemp("wheels")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder]
    run(sys.executable, "-m", "pip", "wheel", *options, *PROJECTS.values())
    built = {wheel.distribution: wheel for wheel in map(Wheel, folder.glob("*.whl"))}
    write_wheel(folder, "torch", "99.0")
    write_wheel(folder, "triton", "99.0")
    return built


def distribution_of(name: str) -> str:
    return f"narrowkv-{name.replace('_', '-')}"


def siblings_below(wheels: dict[str, Wheel], distribution: str) -> set[str]:
    """The workspace's own distributions that one of them needs, itself included."""
    found = {distribution}
    for requirement in wheels[distribution].requirements():
        if requirement.name in wheels:
            found |= siblings_below(wheels, requirement.name)
    return found


def modules_with_triton(name: str) -> list[str]:
    """The dotted names of a project's modules that import triton at their top level."""
    pattern = re.compile(r"^(import|from) triton\b", re.MULTILINE)
    source = PROJECTS[name] / "src"
    found = [path.relative_to(source) for path in source.rglob("*.py") if pattern.search(path.read_text())]
    return sorted(".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in found)


# What a wheel holds besides its package: files that Python reads at its start.
TOP_LEVEL_FILES = {"virtual_gpu": {"narrowkv_virtual_gpu.pth"}}
each_project = pytest.mark.parametrize("name", sorted(PROJECTS))
# One without siblings, an operation, and the one that needs most of the others.
INSTALLED_ALWAYS = ("cdna_emulator", "attn_decode", "cli")


@each_project
def test_a_wheel_holds_its_package_and_requires_what_it_may(wheels, name):
    assert set(wheels) == {distribution_of(project) for project in PROJECTS}
    wheel = wheels[distribution_of(name)]
    assert {f"narrowkv/{name}/__init__.py", f"narrowkv/{name}/py.typed"} <= set(wheel.code)
    others = {file for file in wheel.code if not file.startswith(f"narrowkv/{name}/")}
    assert others == TOP_LEVEL_FILES.get(name, set()), "nothing of its siblings"
    assert any(re.search(r"\.dist-info/licenses/LICENSE$", file) for file in wheel.files), (
        "the license must travel along"
    )
    for requirement in wheel.requirements():
        # triton goes by several names and may only be an extra.
        assert "triton" not in requirement.name, requirement
        if requirement.name == "torch":
            # A floor and no ceiling.
            assert str(requirement.specifier) == ">=2.11"
            assert requirement.specifier.contains(ROCM_TORCH)
        if requirement.name in wheels:
            assert str(requirement.specifier) == f"=={wheels[requirement.name].metadata['Version']}"
    assert OLDEST_TRITON == (3, 8)
    floors = {str(required.specifier) for required in wheel.requirements("cpu") if required.name == "triton"}
    assert floors in (({">=3.8"},) if modules_with_triton(name) else (set(), {">=3.8"}))


@each_project
def test_the_metadata_of_a_wheel_is_complete(wheels, name):
    metadata = wheels[distribution_of(name)].metadata
    assert metadata["Summary"]
    assert metadata["Author"] == "narrowkv contributors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Programming Language :: Python :: 3.12" in metadata.get_all("Classifier")
    description = metadata.get_payload()
    assert f"# {distribution_of(name)}" in description
    prose = re.sub(r"^```.*?^```", "", description, flags=re.MULTILINE | re.DOTALL)  # code has f[grid](x)
    relative = [link for link in re.findall(r"\]\(([^)]+)\)", prose) if "://" not in link]
    assert not relative, f"a package index has no such pages: {relative}"


def slow_unless(chosen, *values):
    """Parameters, of which all but the chosen ones are slow."""
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("name", slow_unless(INSTALLED_ALWAYS, *sorted(PROJECTS)))
def test_a_package_installs_alone_and_works(wheels, tmp_path, name):
    distribution = distribution_of(name)
    clean = CleanEnvironment(tmp_path / "venv", wheels)
    before = clean.distributions()
    assert before["torch"] == ROCM_TORCH

    clean.install(distribution, links=wheels[distribution].path.parent)

    pulled = {n: v for n, v in clean.distributions().items() if before.get(n) != v}
    expected = siblings_below(wheels, distribution)
    assert pulled == {sibling: wheels[sibling].metadata["Version"] for sibling in expected}
    assert set(before) <= set(clean.distributions())
    assert ROCM_TRITON[1] in clean.triton.read_text()

    clean.imports(name)
    clean.refuses(*(project for project in PROJECTS if distribution_of(project) not in expected))


def install_torch_and_triton(clean: CleanEnvironment, wheels: list[Wheel]) -> None:
    """From pip's index, with what else the wheels require; TORCH and TRITON are as in the Makefile."""
    others = {r.name for wheel in wheels for r in wheel.requirements()} - {
        "torch",
        *(w.distribution for w in wheels),
    }
    versions = [os.environ.get("TORCH", "torch==2.13.0"), os.environ.get("TRITON", "triton==3.8.0")]
    pip = [sys.executable, "-m", "pip", "--python", str(clean.python), "install", "--quiet"]
    subprocess.run(
        [*pip, *(word for version in versions for word in version.split()), *sorted(others)], check=True
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("torch_and_triton", ["of this environment", "from the index"])
def test_the_virtual_gpu_runs_programs_and_leaves_nothing_but_its_cache(wheels, tmp_path, torch_and_triton):
    """In an environment that has torch and triton and, of narrowkv, these two wheels."""
    installed = torch_and_triton == "from the index"
    clean = CleanEnvironment(tmp_path / "venv", None if installed else wheels)
    own = [distribution_of(name) for name in ("virtual_gpu", "cdna_emulator")]
    if installed:
        install_torch_and_triton(clean, [wheels[name] for name in own])
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XDG_"))
    }
    environment |= {"HOME": str(home), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    on_gpu = {**environment, "TRITON_VIRTUAL_GPU": "gfx942"}

    def python(*arguments: str | Path, variables: dict[str, str] = on_gpu) -> str:
        command = [clean.python, *arguments]
        return subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True).stdout

    def files(folder: Path) -> set[Path]:
        return {path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}

    before = files(clean.site) - (set() if installed else {clean.triton})
    clean.install(own[0], links=wheels[own[0]].path.parent)
    if not installed:
        clean.show_outer_packages()
    loaded = "import sys; print([name for name in sys.modules if name.startswith('narrowkv')])"
    assert python("-c", loaded, variables=environment) == "[]\n"
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = python(ROOT / "tests" / "virtual_programs.py")
    cpu = sum(
        getattr(resource.getrusage(resource.RUSAGE_CHILDREN), n) - getattr(spent, n)
        for n in ("ru_utime", "ru_stime")
    )
    print(f"{said}{cpu:.1f} s of CPU time, cold caches and the build of the engine included")
    assert "(virtual) gfx942" in said
    assert cpu < 2 * 60, "a minute on two cores"
    caches = {name: home / ".cache" / name for name in ("narrowkv", "narrowkv-virtual-gpu")}
    prebuilt = any("/prebuilt/" in file for file in wheels[own[1]].code)
    assert [name for name, cache in caches.items() if files(cache)] == list(caches)[prebuilt:]
    assert {path for path in files(home) if not any(map(path.is_relative_to, caches.values()))} == set()
    python("-m", "narrowkv.virtual_gpu", "clean")
    assert files(home) == set()
    if not installed:
        (clean.site / "outer.pth").unlink()
    run(sys.executable, "-m", "pip", "--python", clean.python, "uninstall", "--yes", *own)
    assert files(clean.site) == before


def test_the_extra_cpu_installs_triton(wheels, tmp_path):
    """Also shows that the bait is good: an installer that wants a triton from the wheel folder gets one."""
    extras = {name: wheel.metadata.get_all("Provides-Extra", []) for name, wheel in wheels.items()}
    distribution = next(name for name in sorted(wheels) if "cpu" in extras[name])
    clean = CleanEnvironment(tmp_path / "venv", wheels)
    clean.install(f"{distribution}[cpu]", links=wheels[distribution].path.parent)
    assert clean.distributions()["triton"] == "99.0"
    assert clean.distributions()["torch"] == ROCM_TORCH


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository of what a clone has and the installs need, in its first commit."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    folder = tmp_path_factory.mktemp("checkout")
    for name in NEEDED_FILES:
        shutil.copy(ROOT / name, folder)
    for name in NEEDED_FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "tests")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    run("git", "-C", folder, "init", "--quiet")
    run("git", "-C", folder, "add", ".")
    run("git", "-C", folder, *identity, "commit", "--quiet", "--message", "everything")
    return folder


def sources_of(name: str, wheels: dict[str, Wheel], form: str) -> list[str]:
    """The arguments of `pip install` for one package: it and its siblings, each written in `form`."""
    names = {distribution_of(project): project for project in PROJECTS}
    folders = [names[sibling] for sibling in sorted(siblings_below(wheels, distribution_of(name)))]
    return [form.format("cli" if folder == "cli" else f"packages/{folder}") for folder in folders]


FOLDER = "{checkout}/{part}"
GIT = "git+file://{checkout}#subdirectory={part}"
EDITABLE = "--editable {checkout}/{part}"


@pytest.mark.parametrize("form", slow_unless((EDITABLE,), FOLDER, GIT, EDITABLE))
def test_all_packages_install_from_a_checkout_and_from_a_git_url(wheels, checkout, tmp_path, form):
    clean = CleanEnvironment(tmp_path / "venv", wheels)
    clean.install(*form.format(checkout=checkout, part="").removesuffix("#subdirectory=").split())
    found = clean.distributions()
    assert found["torch"] == ROCM_TORCH
    assert {name for name in found if name.startswith("narrowkv")} == {"narrowkv"}
    clean.imports(*PROJECTS, below=checkout if form == EDITABLE else clean.site)
    assert "Usage" in run(clean.python.parent / "narrowkv", "--help").stdout


def recipe_steps() -> list[str]:
    """The instructions of the container's recipe, one a line."""
    recipe = (ROOT / "tools" / "rocm.Containerfile").read_text().replace("\\\n", " ")
    return [line for line in recipe.splitlines() if line and not line.startswith("#")]


def test_the_container_copies_what_the_install_reads():
    copies = [step.split()[1:] for step in recipe_steps() if step.startswith("COPY ")]
    files = [(source, f"{target}{source}") for *sources, target in copies[:1] for source in sources]
    assert [*files, *map(tuple, copies[1:])] == [
        (name, f"/narrowkv/{name}") for name in (*NEEDED_FILES, *NEEDED_FOLDERS)
    ]


def test_the_shell_reads_every_command_of_the_container():
    for step in recipe_steps():
        if step.startswith("RUN "):
            run("sh", "-n", "-c", step.removeprefix("RUN "))
    (command,) = [step.removeprefix("CMD ") for step in recipe_steps() if step.startswith("CMD ")]
    narrowkv, *arguments = json.loads(command)
    assert narrowkv == "narrowkv"
    assert "Usage" in run(sys.executable, "-m", "narrowkv.cli", *arguments, "--help").stdout


@pytest.mark.parametrize(("torch", "installs"), [(ROCM_TORCH, True), ("2.9.0+rocm7.14.0", False)])
def test_the_container_installs_narrowkv_beside_amds_torch_or_fails(
    wheels, checkout, tmp_path, torch, installs
):
    """The recipe's command, where AMD's torch seems installed and another one is on offer."""
    clean = CleanEnvironment(tmp_path / "venv", wheels)
    for found in clean.site.glob("torch-*.dist-info"):
        shutil.rmtree(found)
    write_distribution(clean.site, "torch", torch)
    clean.show_distribution("hatchling")
    pip = tmp_path / "pip"
    pip.write_text(
        f"#!/bin/sh\ncommand=$1\nshift\n[ $command = install ] && set -- --no-index --no-build-isolation "
        f'--no-compile --find-links {next(iter(wheels.values())).path.parent} "$@"\n'
        f'exec {sys.executable} -m pip --python {clean.python} $command "$@"\n'
    )
    pip.chmod(0o755)
    (step,) = [step for step in recipe_steps() if "--constraint" in step]
    command = step.removeprefix("RUN ").split("&& python -c")[0]
    command = command.replace(" /narrowkv", f" {checkout}").replace("/torch.txt", str(tmp_path / "torch.txt"))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PIP_CONFIG_FILE": os.devnull}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment)
    assert (done.returncode == 0) == installs, done.stdout + done.stderr
    assert set((tmp_path / "torch.txt").read_text().split()) == {f"torch=={torch}", "==".join(ROCM_TRITON)}
    found = clean.distributions()
    assert found["torch"] == torch
    assert ("narrowkv" in found) == installs


@pytest.mark.slow
@pytest.mark.parametrize("form", [FOLDER, GIT])
def test_one_package_installs_with_its_siblings_from_a_checkout_and_from_a_git_url(
    wheels, checkout, tmp_path, form
):
    clean = CleanEnvironment(tmp_path / "venv", wheels)
    parts = ("runtime", "quant", "paged_cache", "attn_decode")
    clean.install(*(form.format(checkout=checkout, part=f"packages/{part}") for part in parts))
    found = {name for name in clean.distributions() if name.startswith("narrowkv")}
    assert found == siblings_below(wheels, "narrowkv-attn-decode") == set(map(distribution_of, parts))
    clean.imports("attn_decode")


def test_the_distribution_of_all_packages_is_their_union(wheels, checkout, tmp_path):
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp_path]
    run(sys.executable, "-m", "pip", "wheel", *options, checkout)
    (path,) = tmp_path.glob("*.whl")
    everything = Wheel(path)

    def requirements(*several: Wheel, extra: str) -> set[str]:
        found = [r for wheel in several for r in wheel.requirements(extra) if r.name not in wheels]
        return {f"{r.name}{r.specifier}" for r in found}

    # It is for any machine, so it builds the emulator's engine where it runs.
    union = {file for wheel in wheels.values() for file in wheel.code if "/prebuilt/" not in file}
    assert set(everything.code) == union
    assert {wheel.metadata["Version"] for wheel in wheels.values()} == {everything.metadata["Version"]}
    for extra in ("", "cpu", "plot"):
        assert requirements(everything, extra=extra) == requirements(*wheels.values(), extra=extra)
    assert any(file.endswith("dist-info/entry_points.txt") for file in everything.files)


NO_TRITON = """
    class NoTriton(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname, path=None, target=None):
            if fullname.partition(".")[0] == "triton":
                raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

    sys.meta_path.insert(0, NoTriton())
"""
OLD_TRITON = """
    sys.modules["triton"] = old = types.ModuleType("triton")
    old.__version__ = "3.6.0"
"""
OLD_TRITON_FOR_ROCM = """
    import torch

    torch.version.hip = "7.2.53210"
    old.__version__ = "3.7.1+git9844da95"
"""


def test_import_without_triton_and_with_an_old_one_says_what_to_do():
    """One process after the other state: a module whose import failed is imported again."""
    code = """
        def errors():
            for name in sys.argv[1:]:
                try:
                    importlib.import_module(name)
                except ImportError as error:
                    yield f"{type(error).__name__}: {error}"
                else:
                    yield f"{name} was imported"
    """
    code = "import importlib.abc, json, sys, types\n" + textwrap.dedent(code)
    for state in (NO_TRITON, OLD_TRITON, OLD_TRITON_FOR_ROCM):
        code += f"{textwrap.dedent(state)}\nprint(json.dumps(list(errors())))\n"
    modules = [module for name in sorted(PROJECTS) for module in modules_with_triton(name)]
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    needs = "TritonVersionError: narrowkv needs triton >= 3.8"
    # On ROCm the plain distribution is the wrong one; the message must not send people there.
    rocm = (
        "this torch is for ROCm, so take the Triton of AMD's wheels (`pip install --upgrade "
        "'torch[device-all]>=2.11' --index-url https://repo.amd.com/rocm/whl-multi-arch/`), "
        "not `triton` from PyPI"
    )
    expected = (
        f"{needs} and found none: run `pip install triton==3.8.0`",
        f"{needs}, found 3.6.0: run `pip install triton==3.8.0`",
        f"{needs}, found 3.7.1+git9844da95: {rocm}",
    )
    for wanted, line in zip(expected, done.stdout.splitlines(), strict=True):
        assert dict.fromkeys(json.loads(line)) == {wanted: None}, modules


@pytest.mark.parametrize("version", ["3.8.0", "3.8.0+git2f1c", "3.10.0", "4.0.0a1"])
def test_a_fork_and_a_later_triton_are_accepted_by_the_version_of_the_module(version, monkeypatch):
    monkeypatch.setattr("triton.__version__", version)
    assert require_triton() == tuple(map(int, version.split(".")[:2]))
