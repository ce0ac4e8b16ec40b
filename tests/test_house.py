"""The rules of the repository that no single file shows: imports, names, sizes, versions, examples."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
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

# Packages with kernels, and the files that each of them has.
OPERATIONS = {"attn_decode", "attn_prefill", "sage", "sparse_fp8"}
OPERATION_FILES = ("api", "config", "kernels", "reference")
# What each package may import of its siblings. cli, on top, may import all of them.
PAGED = {"runtime", "quant", "paged_cache"}
ARROWS = {
    "runtime": set(),
    "cdna_emulator": set(),
    "virtual_gpu": {"cdna_emulator"},
    "quant": {"runtime"},
    "paged_cache": {"runtime", "quant"},
    "attn_decode": PAGED,
    "attn_prefill": PAGED | {"attn_decode"},
    "sage": {"runtime", "quant"},
    "sparse_fp8": PAGED,
    "context_parallel": PAGED | OPERATIONS,
    "engines": PAGED | (OPERATIONS - {"sage"}) | {"context_parallel"},
}
# Of engines only narrowkv.testing.accuracy, whose extra requires it.
ARROWS["testing"] = set(ARROWS)
ARROWS["cli"] = set(ARROWS)
MAX_ARGUMENTS = 14
MAX_JIT_PARAMETERS = 30
MAX_HOST_LINES = 80
MAX_JIT_LINES = 120
# Longer functions, with their lines: the list may only shrink.
LONG_FUNCTIONS = {
    "packages/attn_decode/src/narrowkv/attn_decode/kernels/decode.py": {"_paged_decode_kernel": 169},
    "packages/runtime/src/narrowkv/runtime/launch/interpreter_types.py": {"share_types": 103},
}
# Public names that stand for several classes, with the number of these: the list may only shrink.
SHARED_CLASS_NAMES = {"Blocks": 2, "NarrowAttentionBackend": 2, "Queries": 2, "Rules": 2, "Sizes": 2}
# Modules of a package that import each other.
CYCLES_LEFT = {"engines": [["trial", "trial_sglang"]]}
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
    "packages/sparse_fp8/src/narrowkv/sparse_fp8/kernels/hopper/few_heads.py",
    "packages/sparse_fp8/src/narrowkv/sparse_fp8/kernels/hopper/frame.py",
}
# Lines of docstrings that cannot run here (`# doctest: +SKIP`), by package.
SKIPPED_EXAMPLES = {
    "attn_decode": 7, "attn_prefill": 9, "context_parallel": 7, "engines": 11, "runtime": 9, "sage": 3,
}  # fmt: skip
MAX_OWN_VARIABLES = 3


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

    @property
    def sibling(self) -> str | None:
        """The workspace package that the import reaches into, if it reaches into one."""
        return self.path[1] if self.path[0] == "narrowkv" and len(self.path) > 1 else None


@dataclass(frozen=True)
class Source:
    """A file of one project, under src or tests."""

    project: str
    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text, filename=str(self.path))))

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes at the top of the file."""
        return [node.name for node in ast.parse(self.text).body if isinstance(node, ast.ClassDef)]

    @cached_property
    def functions(self) -> list[ast.FunctionDef]:
        return [node for node in self.nodes if isinstance(node, ast.FunctionDef)]

    @property
    def parts(self) -> tuple[str, ...]:
        """The dotted name of the module, in parts, for a file under src."""
        relative = self.path.relative_to(PROJECTS[self.project] / "src").with_suffix("").parts
        return relative[:-1] if relative[-1] == "__init__" else relative

    @cached_property
    def imports(self) -> list[Import]:
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    module = tuple(alias.name.split("."))
                    found.append(Import(module, None, alias.asname or module[0], node.lineno))
            elif isinstance(node, ast.ImportFrom):
                module = tuple(node.module.split(".")) if node.module else ()
                if node.level:
                    package = self.parts if self.path.name == "__init__.py" else self.parts[:-1]
                    module = package[: len(package) - node.level + 1] + module
                found += [Import(module, a.name, a.asname or a.name, node.lineno) for a in node.names]
        return found


@cache
def sources(*folders: str) -> list[Source]:
    return [
        Source(name, path)
        for name, project in sorted(PROJECTS.items())
        for folder in folders
        for path in sorted((project / folder).rglob("*.py"))
    ]


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def is_jit(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def count_arguments(function: ast.FunctionDef) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)


def count_lines(function: ast.FunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    assert function.end_lineno is not None
    count = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        count -= docstring.end_lineno - docstring.lineno + 1
    return count


def max_lines(function: ast.FunctionDef) -> int:
    return MAX_JIT_LINES if is_jit(function) else MAX_HOST_LINES


# A rule gives the line and the fault of each place of a file under src that does not keep it.
Wrong = Iterator[tuple[int, str]]


def follows_the_arrows(source: Source) -> Wrong:
    allowed = {None, source.project, *ARROWS[source.project]}
    return ((i.line, f"imports narrowkv.{i.sibling}") for i in source.imports if i.sibling not in allowed)


def has_kernels_without_references_and_launchers(source: Source) -> Wrong:
    for entry in source.imports if "kernels" in source.parts else ():
        if entry.path[0] == "narrowkv" and {"reference", "api"} & set(entry.path):
            yield entry.line, ".".join(entry.path)


def has_references_without_kernels_and_triton(source: Source) -> Wrong:
    for entry in source.imports if "reference" in source.parts else ():
        if entry.path[0] == "triton" or "kernels" in entry.path:
            yield entry.line, ".".join(entry.path)


def has_public_functions_of_at_most_14_arguments(source: Source) -> Wrong:
    for function in source.functions if source.project != "cli" else ():  # a command's options are arguments
        count, args = count_arguments(function), function.args.args
        count -= bool(args) and args[0].arg in ("self", "cls")
        if count > MAX_ARGUMENTS and not (is_private(function.name) or is_jit(function)):
            yield function.lineno, f"{function.name} takes {count}"


def has_jit_functions_of_at_most_30_parameters(source: Source) -> Wrong:
    for function in source.functions:
        if is_jit(function) and count_arguments(function) > MAX_JIT_PARAMETERS:
            yield function.lineno, f"{function.name} takes {count_arguments(function)}"


def has_kernels_without_functions_of_tritons_module(source: Source) -> Wrong:
    """`triton.next_power_of_2` and the like: SGLang replaces them by functions that no kernel can call."""
    for function in source.functions:
        for node in (n for line in function.body for n in ast.walk(line)) if is_jit(function) else ():
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "triton":
                yield node.lineno, ast.unparse(node)


def does_not_validate_with_assert(source: Source) -> Wrong:
    for node in source.nodes if "api" in source.parts else ():
        if isinstance(node, ast.Assert):
            yield node.lineno, ast.unparse(node)


def has_functions_of_at_most_80_lines_and_kernels_of_120(source: Source) -> Wrong:
    known = LONG_FUNCTIONS.get(source.name, {})
    for function in source.functions:
        lines, limit = count_lines(function), max_lines(function)
        if lines > max(limit, known.get(function.name, 0)):
            yield function.lineno, f"{function.name} has {lines} lines: divide it into named steps"


RULES: list[Callable[[Source], Wrong]] = [
    follows_the_arrows,
    has_kernels_without_references_and_launchers, has_references_without_kernels_and_triton,
    has_public_functions_of_at_most_14_arguments, has_jit_functions_of_at_most_30_parameters,
    has_kernels_without_functions_of_tritons_module,
    does_not_validate_with_assert, has_functions_of_at_most_80_lines_and_kernels_of_120,
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file(rule: Callable[[Source], Wrong]) -> None:
    wrong = [f"{source.name}:{line}: {what}" for source in sources("src") for line, what in rule(source)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (follows_the_arrows, "quant/made_up.py", "from narrowkv import sage"),
        (follows_the_arrows, "quant/made_up.py", "def f():\n    from ..paged_cache import append"),
        (has_kernels_without_references_and_launchers, "sage/kernels/x.py", "from ..api import a"),
        (has_kernels_without_references_and_launchers, "sage/kernels/x.py", "import narrowkv.sage.reference"),
        (has_references_without_kernels_and_triton, "sage/reference.py", "import triton.language"),
        (has_references_without_kernels_and_triton, "sage/reference.py", "from .kernels import x"),
        (has_public_functions_of_at_most_14_arguments, "sage/x.py",
         f"def f({', '.join('abcdefghijklmno')}): ..."),
        (has_jit_functions_of_at_most_30_parameters, "sage/x.py",
         f"@triton.jit\ndef f({', '.join(f'x{i}' for i in range(31))}): ..."),
        (has_kernels_without_functions_of_tritons_module, "sage/x.py",
         "@triton.jit\ndef f(n):\n    x: tl.constexpr = triton.next_power_of_2(n)"),
        (does_not_validate_with_assert, "sage/api.py", "assert x"),
        (has_functions_of_at_most_80_lines_and_kernels_of_120, "sage/x.py", "def f():" + "\n    x" * 80),
        (has_functions_of_at_most_80_lines_and_kernels_of_120, "sage/x.py",
         "@triton.jit\ndef f():" + "\n    x" * 120),
    ],
)  # fmt: skip
def test_a_rule_finds_what_it_forbids(rule: Callable[[Source], Wrong], path: str, text: str) -> None:
    assert list(rule(made_up(path, text)))


def test_a_docstring_does_not_make_a_function_long() -> None:
    text = 'def f():\n    """One.' + "\n" * 9 + '    """' + "\n    x" * 79
    assert not list(has_functions_of_at_most_80_lines_and_kernels_of_120(made_up("sage/x.py", text)))


def test_long_functions_are_those_that_are_listed() -> None:
    found = {
        (source.name, function.name)
        for source in sources("src")
        for function in source.functions
        if count_lines(function) > max_lines(function)
    }
    listed = {(path, name) for path, names in LONG_FUNCTIONS.items() for name in names}
    assert listed <= found, f"no longer too long, take them off LONG_FUNCTIONS: {sorted(listed - found)}"


def shared_class_names(files: list[Source]) -> dict[str, int]:
    """Each public name of several classes, with their number."""
    names = Counter(name for source in files for name in source.classes if not is_private(name))
    return {name: count for name, count in names.items() if count > 1}


def test_a_class_name_stands_for_one_class() -> None:
    found = shared_class_names(sources("src"))
    more = {name: count for name, count in found.items() if count > SHARED_CLASS_NAMES.get(name, 0)}
    assert not more, f"name new classes otherwise, or import the one that there is: {more}"
    gone = SHARED_CLASS_NAMES.keys() - found
    assert not gone, f"take them off SHARED_CLASS_NAMES: {sorted(gone)}"


def test_the_search_for_shared_class_names_finds_them() -> None:
    files = [
        made_up("sage/x.py", "class A: ...\nclass _B: ..."),
        made_up("quant/x.py", "class A: ...\nclass _B: ..."),
    ]
    assert shared_class_names(files) == {"A": 2}


def made_up(path: str, text: str) -> Source:
    """A file that is not there."""
    project = path.partition("/")[0]
    source = Source(project, PROJECTS[project] / "src" / "narrowkv" / path)
    vars(source)["text"] = text
    return source


def test_no_package_uses_a_siblings_underscore_names() -> None:
    wrong = []
    for source in sources("src", "tests"):
        siblings = [entry for entry in source.imports if entry.sibling not in (None, source.project)]
        wrong += [
            f"{source.name}:{e.line}: {'.'.join(e.path)}" for e in siblings if any(map(is_private, e.path))
        ]
        bound = {entry.bound_to for entry in siblings} - {"narrowkv"}
        wrong += [
            f"{source.name}:{node.lineno}: {ast.unparse(node)}"
            for node in source.nodes
            if isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and isinstance(node.value, ast.Name)
            and node.value.id in bound
        ]
    assert not wrong, "\n".join(wrong)


def project_table(name: str) -> dict:
    return tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text())["project"]


def siblings_declared(name: str) -> list[Requirement]:
    table = project_table(name)
    extras = table.get("optional-dependencies", {}).values()
    declared = map(Requirement, [*table.get("dependencies", []), *(r for extra in extras for r in extra)])
    return [requirement for requirement in declared if requirement.name.startswith("narrowkv-")]


def folder_name(distribution: str) -> str:
    return distribution.removeprefix("narrowkv-").replace("-", "_")


@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_a_package_has_what_every_package_has(name: str) -> None:
    assert name in ARROWS, "a new package needs its arrows here and in docs/architecture.md"
    project, namespace = PROJECTS[name], PROJECTS[name] / "src" / "narrowkv"
    own = namespace / name
    assert not list(namespace.glob("*.py")), "narrowkv is a namespace package"
    folders = [path.name for path in namespace.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert folders == [name]
    for needed in (project / "README.md", own / "__init__.py", own / "py.typed"):
        assert needed.is_file(), f"{needed.relative_to(ROOT)} is missing"
    assert list((project / "tests").glob("**/test_*.py")), f"{name} has no tests"
    assert (project / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    for file in OPERATION_FILES if name in OPERATIONS else ():
        assert (own / file).exists() or (own / f"{file}.py").is_file(), f"{name} lacks {file}"
    table = project_table(name)
    assert folder_name(table["name"]) == name
    assert table["license"] == "Apache-2.0"
    assert table["requires-python"] == ">=3.10"
    own_sources = [source for source in sources("src") if source.project == name]
    imported = {entry.sibling for source in own_sources for entry in source.imports}
    assert imported - {None, name} == {folder_name(declared.name) for declared in siblings_declared(name)}


def test_versions_move_together() -> None:
    (version,) = {project_table(name)["version"] for name in PROJECTS}
    for name, project in PROJECTS.items():
        assert {str(declared.specifier) for declared in siblings_declared(name)} <= {f"=={version}"}, name
        text = (project / "src" / "narrowkv" / name / "__init__.py").read_text()
        stated = re.findall(r'^__version__ = "(.*)"', text, re.MULTILINE)
        assert stated in ([], [version]), f"{name} states {stated}"
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_workspace_root_names_every_package() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    folders = {str((project / "src").relative_to(ROOT)) for project in PROJECTS.values()}
    assert set(tool["hatch"]["build"]["dev-mode-dirs"]) == folders
    assert set(tool["hatch"]["build"]["targets"]["wheel"]["packages"]) == {f"{f}/narrowkv" for f in folders}
    assert set(tool["uv"]["sources"]) == {project_table(name)["name"] for name in PROJECTS} - {"narrowkv-cli"}


def environment_uses(source: Source) -> Iterator[tuple[int, str | None]]:
    """Line and name of each environment variable that a file reads or sets; None for a name that is computed.

    Handing the whole environment on to a child process (`os.environ.copy()`, `dict(os.environ)`,
    `**os.environ`) reads no variable.
    """
    local = {entry.bound_to: entry.name for entry in source.imports if entry.module == ("os",) and entry.name}

    def meaning(node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            return node.attr
        return local.get(node.id) if isinstance(node, ast.Name) else None

    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    uses = [node for node in source.nodes if meaning(node) in names]
    parents = {child: node for node in source.nodes for child in ast.iter_child_nodes(node)} if uses else {}
    for node in uses:
        above = parents[node]
        arguments: list[ast.expr] = []
        match above:
            case ast.Call(func=function) if function is node:  # getenv(name)
                arguments = above.args[:1]
            case ast.Subscript():  # environ[name]
                arguments = [above.slice]
            case ast.Compare():  # name in environ
                arguments = [above.left]
            case ast.Attribute(attr="copy") | ast.Dict() | ast.Call(func=ast.Name("dict")):
                continue
            case ast.Attribute() if isinstance(parents[above], ast.Call):  # environ.get(name)
                arguments = parents[above].args[:1]
        constant = arguments[0].value if arguments and isinstance(arguments[0], ast.Constant) else None
        yield node.lineno, constant if isinstance(constant, str) else None


def test_environment_variables_are_those_of_the_one_table() -> None:
    table = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE))
    used: dict[str, str] = {}
    for source in sources("src"):
        for line, name in environment_uses(source):
            assert name, f"{source.name}:{line}: the name of an environment variable must be written out"
            used[name] = f"{source.name}:{line}"
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
        ("import os\nrun(env={**os.environ, 'A': '1'})\nos.environ.copy()\ndict(os.environ)", []),
    ],
)
def test_the_search_for_environment_variables_sees_every_spelling(text: str, found: list[str | None]) -> None:
    assert [name for _, name in environment_uses(made_up("runtime/made_up.py", text))] == found


def test_nobody_reads_the_device_at_import() -> None:
    """Importing every package with a CUDA/HIP runtime that refuses each question must succeed."""
    code = """
        import importlib, sys
        import torch

        def refuse(*args, **kwargs):
            raise RuntimeError("the device was read at import")

        for name in ("is_available", "device_count", "current_device", "get_device_properties",
                     "get_device_name", "get_device_capability", "init", "_lazy_init"):
            setattr(torch.cuda, name, refuse)
        for name in sys.argv[1:]:
            importlib.import_module(f"narrowkv.{name}")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), *sorted(PROJECTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


def test_the_search_for_cycles_finds_them() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_no_module_imports_itself_through_others(name: str) -> None:
    """At its top, in functions, or for types only."""
    own = {source.parts: source for source in sources("src") if source.project == name}
    edges = {}
    for parts, source in own.items():
        targets = {entry.path if entry.path in own else entry.module for entry in source.imports}
        edges[".".join(parts[2:])] = {".".join(target[2:]) for target in targets & own.keys() - {parts}}
    found = cycles(edges)
    assert found == CYCLES_LEFT.get(name, []), f"{name}: modules that import each other: {found}"


def test_the_online_softmax_is_updated_in_the_named_files_only() -> None:
    """A weight of the online softmax is `exp2` of a difference from a maximum."""
    jit_functions = [(source, f) for source in sources("src") for f in source.functions if is_jit(f)]
    assert len(jit_functions) > 50
    found = {
        source.name
        for source, function in jit_functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("exp", "exp2")
        and isinstance(node.args[0], ast.BinOp)
        and isinstance(node.args[0].op, ast.Sub)
    }
    assert found == SOFTMAX_UPDATES, (
        "a kernel takes its softmax step from narrowkv.runtime.attention.softmax; "
        f"SOFTMAX_UPDATES names those that cannot: {sorted(found ^ SOFTMAX_UPDATES)}"
    )


@pytest.mark.parametrize(
    "name", [".".join(source.parts) for source in sources("src") if ">>> " in source.text]
)
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs={"torch": torch}):
        runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


def test_docstring_examples_are_skipped_only_where_they_cannot_run() -> None:
    """An example that needs a model, a GPU or minutes is skipped; the number of those does not grow."""
    skipped: Counter[str] = Counter()
    for source in sources("src"):
        skipped[source.project] += source.text.count("doctest: +SKIP")
    more = {name: count for name, count in skipped.items() if count > SKIPPED_EXAMPLES.get(name, 0)}
    assert not more, f"write examples that run instead of skipped ones: {more}"
