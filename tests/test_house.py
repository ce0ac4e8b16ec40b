"""The rules of the repository that no single file shows: imports, file names, sizes, versions, examples."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = {
    path.parent.name: path.parent
    for path in (*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("cli/pyproject.toml"))
}

# What each package may import of its siblings. cli, on top, may import all of them.
ARROWS = {
    "runtime": set(),
    "cdna_emulator": set(),
    "quant": {"runtime"},
    "paged_cache": {"runtime", "quant"},
    "attn_decode": {"runtime", "quant", "paged_cache"},
    "attn_prefill": {"runtime", "quant", "paged_cache", "attn_decode"},
    "sage": {"runtime", "quant"},
    "sparse_fp8": {"runtime", "quant"},
    "context_parallel": {
        "runtime",
        "quant",
        "paged_cache",
        "attn_decode",
        "attn_prefill",
        "sage",
        "sparse_fp8",
    },
    "engines": {
        "runtime",
        "quant",
        "paged_cache",
        "attn_decode",
        "attn_prefill",
        "sparse_fp8",
        "context_parallel",
    },
}
ARROWS["testing"] = set(ARROWS) - {"engines"}
ARROWS["cli"] = set(ARROWS)
# Packages with kernels, and the files that each of them has.
OPERATIONS = ("attn_decode", "attn_prefill", "sage", "sparse_fp8")
OPERATION_FILES = ("api", "plan", "config", "launch", "kernels", "reference", "cases")
MAX_ARGUMENTS = 14
# Functions with more arguments, which only their own package calls.
LONG_ARGUMENT_LISTS = {"packages/attn_prefill/src/narrowkv/attn_prefill/calls.py": "run"}
MAX_JIT_PARAMETERS = 30
MAX_LINES = 400
# Files that are longer. None may grow past its number; one that got shorter than MAX_LINES leaves the list.
LONG_FILES = {}
# Modules of a package that import each other.
CYCLES_LEFT = {
    "engines": [["trial", "trial_sglang"]],
}
# Where a step of the online softmax, or a merge of partial results, is computed.
SOFTMAX_UPDATES = {
    "packages/runtime/src/narrowkv/runtime/attention/softmax.py",
    # In launches: the last program of a tile merges all of its rows.
    "packages/runtime/src/narrowkv/runtime/attention/results.py",
    # States that callers bring, each with an lse and no running sum.
    "packages/attn_decode/src/narrowkv/attn_decode/kernels/merge.py",
    # P is rounded to 8 bits and the scale of S may differ from key to key.
    "packages/sage/src/narrowkv/sage/kernels/attention.py",
    # Gluon, whose layouts the shared functions do not take; S is transposed in the first.
    "packages/sparse_fp8/src/narrowkv/sparse_fp8/kernels/few_heads.py",
    "packages/sparse_fp8/src/narrowkv/sparse_fp8/kernels/hopper.py",
}
# Docstrings whose examples cannot run here (`# doctest: +SKIP`): lines, by module.
SKIPPED_EXAMPLES = {
    "narrowkv.attn_decode.api": 2,
    "narrowkv.attn_decode.merging": 2,
    "narrowkv.attn_decode.plan": 1,
    "narrowkv.attn_decode.planning": 2,
    "narrowkv.attn_prefill.api": 3,
    "narrowkv.attn_prefill.plan": 1,
    "narrowkv.attn_prefill.planning": 4,
    "narrowkv.attn_prefill.warmup": 1,
    "narrowkv.context_parallel.chunk": 1,
    "narrowkv.context_parallel.merging": 1,
    "narrowkv.context_parallel.prefill": 2,
    "narrowkv.context_parallel.ranks": 1,
    "narrowkv.context_parallel.ring": 1,
    "narrowkv.context_parallel.sparse": 1,
    "narrowkv.engines.accuracy": 2,
    "narrowkv.engines.aiter": 1,
    "narrowkv.engines.sglang": 2,
    "narrowkv.engines.tiny": 1,
    "narrowkv.engines.transformers": 3,
    "narrowkv.engines.transformers.cache": 2,
    "narrowkv.engines.vllm": 2,
    "narrowkv.quant.calibration": 3,
    "narrowkv.runtime.launch.bound": 2,
    "narrowkv.runtime.launch.fixed": 2,
    "narrowkv.runtime.launch.path": 3,
    "narrowkv.runtime.launch.recording": 2,
    "narrowkv.sage.planning": 3,
}
MAX_OWN_VARIABLES = 2


@dataclass(frozen=True)
class Import:
    """One imported thing: its module, its name (None for `import module`), what it is bound to."""

    module: tuple[str, ...]
    name: str | None
    bound_to: str
    line: int

    @property
    def path(self) -> tuple[str, ...]:
        return self.module if self.name is None else (*self.module, self.name)


@dataclass(frozen=True)
class Source:
    """A file of one project."""

    project: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(), filename=str(self.path))

    @property
    def parts(self) -> tuple[str, ...]:
        """The dotted name of the module, in parts, for a file under src."""
        relative = self.path.relative_to(PROJECTS[self.project] / "src").with_suffix("").parts
        return relative[:-1] if relative[-1] == "__init__" else relative

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"

    def imports(self) -> Iterator[Import]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(
                        tuple(alias.name.split(".")),
                        None,
                        alias.asname or alias.name.split(".")[0],
                        node.lineno,
                    )
            elif isinstance(node, ast.ImportFrom):
                base = self.package()[: len(self.package()) - node.level + 1] if node.level else ()
                module = (*base, *(node.module.split(".") if node.module else ()))
                for alias in node.names:
                    yield Import(module, alias.name, alias.asname or alias.name, node.lineno)

    def package(self) -> tuple[str, ...]:
        return self.parts if self.path.name == "__init__.py" else self.parts[:-1]


@cache
def sources(*folders: str) -> list[Source]:
    return [
        Source(name, path)
        for name, project in sorted(PROJECTS.items())
        for folder in folders
        for path in sorted((project / folder).rglob("*.py"))
    ]


def sibling_of(imported: Import) -> str | None:
    """The workspace package that an import reaches into, if it reaches into one."""
    return imported.path[1] if imported.path[0] == "narrowkv" and len(imported.path) > 1 else None


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def own_folder(name: str) -> Path:
    return PROJECTS[name] / "src" / "narrowkv" / name


def project_table(name: str) -> dict:
    return tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text())["project"]


def test_the_workspace_has_packages_and_every_one_has_its_place_in_the_arrows():
    assert PROJECTS
    assert set(PROJECTS) <= set(ARROWS), "a new package needs its arrows here and in docs/architecture.md"


def test_imports_follow_the_arrows():
    wrong = [
        f"{source.at(imported.line)}: {source.project} imports narrowkv.{sibling}"
        for source in sources("src")
        for imported in source.imports()
        if (sibling := sibling_of(imported))
        and sibling != source.project
        and sibling not in ARROWS[source.project]
    ]
    assert not wrong, "\n".join(wrong)


def test_a_declared_sibling_is_imported_and_an_imported_sibling_is_declared():
    for name in PROJECTS:
        imported = {
            sibling
            for source in sources("src")
            if source.project == name
            for entry in source.imports()
            if (sibling := sibling_of(entry)) and sibling != name
        }
        declared = {
            requirement.name.removeprefix("narrowkv-").replace("-", "_")
            for requirement in map(Requirement, project_table(name).get("dependencies", []))
            if requirement.name.startswith("narrowkv-")
        }
        assert imported == declared, f"{name} imports {sorted(imported)} and declares {sorted(declared)}"


def test_no_package_uses_a_siblings_underscore_names():
    wrong = []
    for source in sources("src", "tests"):
        siblings = [entry for entry in source.imports() if sibling_of(entry) not in (None, source.project)]
        wrong += [
            f"{source.at(e.line)}: {'.'.join(e.path)}" for e in siblings if any(map(is_private, e.path))
        ]
        bound = {entry.bound_to for entry in siblings} - {"narrowkv"}
        wrong += [
            f"{source.at(node.lineno)}: {ast.unparse(node)}"
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and isinstance(node.value, ast.Name)
            and node.value.id in bound
        ]
    assert not wrong, "\n".join(wrong)


def test_narrowkv_is_a_namespace_package():
    assert not [str(path) for project in PROJECTS.values() for path in project.glob("src/narrowkv/*.py")]


@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_a_package_has_what_every_package_has(name):
    project = PROJECTS[name]
    own = own_folder(name)
    assert [
        path.name
        for path in (project / "src" / "narrowkv").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    ] == [name]
    for needed in (project / "README.md", own / "__init__.py", own / "py.typed"):
        assert needed.is_file(), f"{needed.relative_to(ROOT)} is missing"
    assert list((project / "tests").glob("**/test_*.py")), f"{name} has no tests"
    assert (project / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    table = project_table(name)
    assert table["name"] == f"narrowkv-{name.replace('_', '-')}"
    assert table["license"] == "Apache-2.0"
    assert table["requires-python"] == ">=3.10"


def test_versions_move_together():
    versions = {name: project_table(name)["version"] for name in PROJECTS}
    assert len(set(versions.values())) == 1, versions
    (version,) = set(versions.values())
    for name in PROJECTS:
        siblings = [r for r in project_table(name).get("dependencies", []) if r.startswith("narrowkv-")]
        assert all(requirement.endswith(f"=={version}") for requirement in siblings), (name, siblings)
        stated = re.findall(
            r'^__version__ = "(.*)"', (own_folder(name) / "__init__.py").read_text(), re.MULTILINE
        )
        assert stated in ([], [version]), f"{name} states {stated}"
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_workspace_root_names_every_package():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    folders = {str((project / "src").relative_to(ROOT)) for project in PROJECTS.values()}
    assert set(tool["hatch"]["build"]["dev-mode-dirs"]) == folders
    assert set(tool["hatch"]["build"]["targets"]["wheel"]["packages"]) == {f"{f}/narrowkv" for f in folders}
    siblings = {project_table(name)["name"] for name in PROJECTS} - {"narrowkv-cli"}
    assert set(tool["uv"]["sources"]) == siblings


def test_kernels_import_neither_a_reference_nor_a_launcher():
    wrong = [
        f"{source.at(imported.line)}: {'.'.join(imported.path)}"
        for source in sources("src")
        if "kernels" in source.parts
        for imported in source.imports()
        if imported.path[0] == "narrowkv" and {"reference", "api"} & set(imported.path)
    ]
    assert not wrong, "\n".join(wrong)


def test_references_import_no_kernel_and_no_triton():
    wrong = [
        f"{source.at(imported.line)}: {'.'.join(imported.path)}"
        for source in sources("src")
        if "reference" in source.parts
        for imported in source.imports()
        if imported.path[0] == "triton" or "kernels" in imported.path
    ]
    assert not wrong, "\n".join(wrong)


def environment_uses(source: Source) -> Iterator[tuple[int, str | None]]:
    """Line and name of each environment variable that a file reads or sets; None for a name that is computed.

    Handing the whole environment on to a child process (`os.environ.copy()`, `dict(os.environ)`,
    `**os.environ`) reads no variable.
    """
    parents = {child: node for node in ast.walk(source.tree) for child in ast.iter_child_nodes(node)}
    local = {
        entry.bound_to: entry.name for entry in source.imports() if entry.module == ("os",) and entry.name
    }

    def meaning(node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            return node.attr
        return local.get(node.id) if isinstance(node, ast.Name) else None

    for node in ast.walk(source.tree):
        if meaning(node) not in ("environ", "environb", "getenv", "putenv", "unsetenv"):
            continue
        above = parents[node]
        if isinstance(above, ast.Call) and above.func is node:  # getenv(name)
            arguments = above.args[:1]
        elif isinstance(above, ast.Subscript):  # environ[name]
            arguments = [above.slice]
        elif isinstance(above, ast.Compare):  # name in environ
            arguments = [above.left]
        elif isinstance(above, ast.Attribute) and above.attr == "copy":
            continue
        elif isinstance(above, ast.Attribute) and isinstance(parents[above], ast.Call):  # environ.get(name)
            arguments = parents[above].args[:1]
        elif isinstance(above, ast.Dict) or (
            isinstance(above, ast.Call) and ast.unparse(above.func) == "dict"
        ):
            continue
        else:
            arguments = []
        constant = arguments[0].value if arguments and isinstance(arguments[0], ast.Constant) else None
        yield node.lineno, constant if isinstance(constant, str) else None


def test_environment_variables_are_those_of_the_one_table():
    table = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE))
    used: dict[str, str] = {}
    for source in sources("src"):
        for line, name in environment_uses(source):
            assert name, f"{source.at(line)}: the name of an environment variable must be written out"
            used[name] = source.at(line)
    assert set(used) == table, f"docs/environment.md lists {sorted(table)}, the code uses {used}"
    assert len([name for name in used if name.startswith("NARROWKV_")]) <= MAX_OWN_VARIABLES


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nos.environ.get('A', '1')", ["A"]),
        ("import os\nos.environ['A'] = '1'", ["A"]),
        ("import os\nx = 'A' in os.environ", ["A"]),
        ("from os import getenv as g\ng('A')", ["A"]),
        ("from os import environ\nenviron.setdefault('A', '')", ["A"]),
        ("import os\nfor n in NAMES: os.environ.get(n)", [None]),
        ("import os\nrun(env={**os.environ, 'A': '1'})\nos.environ.copy()", []),
    ],
)
def test_the_search_for_environment_variables_sees_every_spelling(text, found):
    tree = ast.parse(text)
    own = next(iter(PROJECTS))
    path = PROJECTS[own] / "src" / "narrowkv" / own / "made_up.py"
    source = Source(own, path)
    vars(source)["tree"] = tree
    assert [name for _, name in environment_uses(source)] == found


def test_public_functions_take_at_most_fourteen_arguments():
    wrong = []
    for source in sources("src"):
        if source.project == "cli":
            continue  # a command's options are its arguments
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.FunctionDef) or is_private(node.name):
                continue
            if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
            count -= node.args.args[:1] != [] and node.args.args[0].arg in ("self", "cls")
            listed = LONG_ARGUMENT_LISTS.get(str(source.path.relative_to(ROOT))) == node.name
            if count > MAX_ARGUMENTS and not listed:
                wrong.append(f"{source.at(node.lineno)}: {node.name} takes {count}")
    assert not wrong, "\n".join(wrong)


def test_launchers_do_not_validate_with_assert():
    wrong = [
        source.at(node.lineno)
        for source in sources("src")
        if "api" in source.parts
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assert)
    ]
    assert not wrong, "\n".join(wrong)


def test_nobody_reads_the_device_at_import():
    """Importing every package with a CUDA/HIP runtime that refuses each question must succeed."""
    code = """
        import importlib, sys
        try:
            import torch
        except ImportError:
            torch = None

        def refuse(*args, **kwargs):
            raise RuntimeError("the device was read at import")

        if torch is not None:
            for name in ("is_available", "device_count", "current_device", "get_device_properties",
                         "get_device_name", "get_device_capability", "init", "_lazy_init"):
                setattr(torch.cuda, name, refuse)
        for name in sys.argv[1:]:
            importlib.import_module(f"narrowkv.{name}")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), *sorted(PROJECTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def modules() -> dict[tuple[str, ...], Source]:
    """Every module under src, by its dotted name in parts."""
    return {source.parts: source for source in sources("src")}


def imported_modules(source: Source, known: dict[tuple[str, ...], Source]) -> set[tuple[str, ...]]:
    """The modules of its own package that a module imports: at its top, in functions, and for types only."""
    found = set()
    for entry in source.imports():
        target = entry.path if entry.path in known else entry.module
        if target in known and known[target].project == source.project and target != source.parts:
            found.add(target)
    return found


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The groups of two or more nodes of which each reaches every other one."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = edges[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reach = {node: reached(node) for node in edges}
    groups = {
        frozenset(other for other in reach[node] if node in reach[other])
        for node in edges
        if node in reach[node]
    }
    return sorted(sorted(group) for group in groups)


def test_the_search_for_cycles_finds_them():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_no_module_imports_itself_through_others(name):
    known = modules()
    edges = {
        ".".join(parts[2:]) or "__init__": {
            ".".join(target[2:]) or "__init__" for target in imported_modules(source, known)
        }
        for parts, source in known.items()
        if source.project == name
    }
    found = cycles(edges)
    assert found == CYCLES_LEFT.get(name, []), f"{name}: modules that import each other: {found}"


def code_lines(source: Source) -> int:
    return len(source.path.read_text().splitlines())


def test_a_file_has_at_most_400_lines():
    long = {
        str(source.path.relative_to(ROOT)): code_lines(source)
        for source in sources("src")
        if code_lines(source) > MAX_LINES
    }
    for path, lines in long.items():
        ceiling = LONG_FILES.get(path, MAX_LINES)
        assert lines <= ceiling, f"{path} has {lines} lines, of which {ceiling} are allowed: divide it"
    gone = sorted(set(LONG_FILES) - set(long))
    assert not gone, f"these files have at most {MAX_LINES} lines now: take them out of LONG_FILES: {gone}"


def jit_functions() -> Iterator[tuple[Source, ast.FunctionDef]]:
    for source in sources("src"):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                yield source, node


def test_jit_functions_take_at_most_thirty_parameters():
    functions = list(jit_functions())
    assert len(functions) > 50
    wrong = []
    for source, node in functions:
        count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
        if count > MAX_JIT_PARAMETERS:
            wrong.append(f"{source.at(node.lineno)}: {node.name} takes {count}")
    assert not wrong, "\n".join(wrong)


def test_the_online_softmax_is_updated_in_the_named_files_only():
    """A weight of the online softmax is `exp2` of a difference from a maximum."""
    found = {
        str(source.path.relative_to(ROOT))
        for source, function in jit_functions()
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("exp", "exp2")
        and isinstance(node.args[0], ast.BinOp)
        and isinstance(node.args[0].op, ast.Sub)
    }
    assert found == set(SOFTMAX_UPDATES), (
        "a kernel takes its softmax step from narrowkv.runtime.attention.softmax; "
        f"SOFTMAX_UPDATES names those that cannot: {sorted(found ^ set(SOFTMAX_UPDATES))}"
    )


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_an_operation_package_has_the_files_that_all_have(name):
    own = own_folder(name)
    missing = {
        file for file in OPERATION_FILES if not ((own / file).exists() or (own / f"{file}.py").is_file())
    }
    assert not missing, f"{name} lacks {sorted(missing)}"


def with_examples() -> list[str]:
    return [".".join(source.parts) for source in sources("src") if ">>> " in source.path.read_text()]


@pytest.mark.parametrize("name", with_examples())
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs={"torch": torch}):
        runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


def test_docstring_examples_are_skipped_only_where_they_cannot_run():
    """An example that needs a model, a GPU or minutes is skipped; the list of those does not grow."""
    skipped = {
        ".".join(source.parts): count
        for source in sources("src")
        if (count := source.path.read_text().count("doctest: +SKIP"))
    }
    more = {name: count for name, count in skipped.items() if count > SKIPPED_EXAMPLES.get(name, 0)}
    assert not more, f"write examples that run instead of skipped ones: {more}"
