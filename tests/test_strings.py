"""Strings of the sources that name a command, a case, a kernel or an option name one that exists."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import typer.main
from test_docs import PAGES, commands, name_of

from narrowkv.attn_prefill.config import APPEND_KERNELS, KERNELS
from narrowkv.cli import command_line
from narrowkv.cli.app import app
from narrowkv.cli.inspection import parse_call
from narrowkv.testing.cases import CaseError, parse_case
from narrowkv.testing.machine_report import commands as report_commands
from narrowkv.testing.operations import OPERATIONS, contract_sets
from narrowkv.testing.words import AMD_TARGETS, PLACES, QUERY_DTYPES, SPARSE_WAYS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("packages/*/src", "cli/src", "tools", "benchmarks", "examples", "docs")
SOURCES = sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py"))
PLACEHOLDERS = {"LINE", "FILE", "FORMAT", "BASELINE.json", "CONTRACT-SET", "OPERATION"}
# Options of other programs that pages and messages name.
FOREIGN = {
    "--attention-backend", "--kv-cache-dtype", "--index-url", "--no-deps", "--triton-attention-num-kv-splits",
    "--speculative-draft-attention-backend", "--dcp-size", "--enable-mixed-chunk", "--short",
}  # fmt: skip
# Operators that exist once an engine's adapter has been imported.
MADE_LATER = {"attend_places"}
# Values of `kernel=` of the plans that force one; sparse attention's are among them. Stored results of Sage
# have its granularity in that column.
FORCED_KERNELS = {"decode", "native", "fp8", *KERNELS, *APPEND_KERNELS, "per_thread"}


@cache
def strings(path: Path) -> tuple[str, ...]:
    """The string constants of a file, docstrings too; of f-strings those without a value in them."""
    tree = ast.parse(path.read_text())
    made = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in made for part in ast.walk(node)}
    found = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return tuple(str(node.value) for node in found if id(node) not in parts)


def context_of(line: str) -> Any:
    """The context of a parsed command line, without the program's name; None for the name of a group."""
    command: Any = typer.main.get_command(app)
    arguments = shlex.split(line)
    default = ""
    while commands_of := getattr(command, "commands", {}):
        default = getattr(command, "default", "")
        if arguments and arguments[0] in commands_of:
            command = commands_of[arguments.pop(0)]
        elif default and (not arguments or arguments[0].startswith("-")):
            command = commands_of[default]
        elif not arguments:
            return None
        elif arguments[0] in ("--help", "--version"):
            break
        else:
            raise LookupError(f"{arguments[0]!r} is not a command")
    return command.make_context(command.name, arguments)


def check_values(context: Any) -> None:
    """Checks the names in a command's options as the command does, which parsing them does not."""
    given, command = context.params, context.info_name
    for name, known in (("on", PLACES), ("target", AMD_TARGETS), ("mode", SPARSE_WAYS)):
        if given.get(name):
            command_line.choices(f"--{name}", given[name], known)
    if given.get("cache_format"):
        command_line.cache_formats("--format", given["cache_format"])
    if given.get("q") and command in ("decode", "warmup"):
        command_line.one_of("--q", given["q"], QUERY_DTYPES)
    if command == "probe" and given["contract_set"] not in ("cp", "models"):
        command_line.one_of("CONTRACT-SET", given["contract_set"], tuple(contract_sets()))
    cases = given.get("case") or ()
    for line in (cases,) if isinstance(cases, str) else cases:
        if command == "model":
            parse_call(line)
        elif "..." not in line:
            parse_case(OPERATIONS[command].cases.case, line)


def check_command(line: str) -> None:
    """Parses a command line of `narrowkv` and checks the names in it."""
    words = shlex.split(line)
    if PLACEHOLDERS & set(words) or any("[" in word or "..." in word for word in words):
        return
    try:
        context = context_of(line)
    except typer.Exit:
        return  # --help, --version
    except Exception as error:
        if getattr(error, "option_name", None) == words[-1]:
            return  # an option is named, without a value
        if type(error).__name__ != "MissingParameter" or any(word.startswith("-") for word in words):
            raise
        return  # the command is named, not given
    if context is not None:
        check_values(context)


def shown_commands() -> Iterator[tuple[str, str]]:
    """Place and arguments of each command line that a source, a page, the Makefile or CI shows or runs."""
    for path in SOURCES:
        for text in strings(path):
            for line in re.findall(r"`narrowkv ([a-z][^`]*)`", text):
                yield name_of(path), " ".join(line.split())
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            yield from ((name_of(page), line.removeprefix("narrowkv ")) for line in commands(page)
                        if line.startswith("narrowkv "))  # fmt: skip
    for file in (ROOT / "Makefile", ROOT / ".ci" / "run"):
        for line in re.findall(r"bin/narrowkv ([^;&|\n]+)", file.read_text()):
            command = line.replace("$(ARGS)", "").strip()
            for operation in OPERATIONS if "$$operation" in line else ("",):
                yield name_of(file), command.replace("$$operation", operation)
    for target in ("gfx942", "gfx950", "sm90", None):
        for quick in (False, True):
            yield from (("narrowkv report", line) for line in report_commands(target, quick=quick))


def test_every_command_line_parses_and_names_what_exists() -> None:
    lines = sorted(set(shown_commands()))
    assert len(lines) > 100
    wrong = []
    for place, line in lines:
        try:
            check_command(line)
        except Exception as error:
            wrong.append(f"{place}: narrowkv {line}: {getattr(error, 'message', error)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    ["validate --case lens=33,k=bf16", "validate prefill --case kernel=dence",
     "validate --case split=uniform", "bench sparse --mode bf61", "inspect model --case decode:ration=3",
     "bench decode --on gfx943", "probe glm", "bench decode --nope 1", "validate decodes"],
)  # fmt: skip
def test_what_does_not_exist_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)must be|no such|not a command|unexpected|got"):
        check_command(line)


def test_every_string_that_looks_like_a_case_is_one() -> None:
    pattern = re.compile(r"(?:(?:decode|prefill|sparse):)?([a-z_0-9]+=[\w.+/:]*(?:,[a-z_0-9]+=[\w.+/:]*)+)")
    wrong, found = [], 0
    for path in SOURCES:
        for text in strings(path):
            for span in (text, *re.findall(r"`([^`]+)`", text)):
                if (match := pattern.fullmatch(span)) is None:
                    continue
                found += 1
                if not any(_is_case(entry.cases.case, match[1]) for entry in OPERATIONS.values()):
                    wrong.append(f"{name_of(path)}: {span}")
    assert found
    assert not wrong, "\n".join(wrong)


def _is_case(kind: Any, line: str) -> bool:
    try:
        parse_case(kind, line)
    except CaseError:
        return False
    return True


def test_every_kernel_that_is_named_exists() -> None:
    defined = set()
    for path in (*SOURCES, *ROOT.glob("**/tests/*.py")):
        defined |= set(re.findall(r"def (_\w+_kernel)\(", path.read_text()))
    texts = {name_of(path): path.read_text() for path in (*SOURCES, *PAGES) if path.name != "CHANGELOG.md"}
    wrong = [
        f"{place}: {kernel}"
        for place, text in texts.items()
        for kernel in set(re.findall(r"(?<![\w.])_(?!cuda_)\w+_kernel\b", text)) - defined
    ]
    assert not wrong, "\n".join(sorted(wrong))


@cache
def own_options() -> frozenset[str]:
    """Every option of every command, and of the tools."""
    found: set[str] = set()

    def walk(command: Any) -> None:
        for parameter in command.params:
            found.update((*parameter.opts, *parameter.secondary_opts))
        for one in getattr(command, "commands", {}).values():
            walk(one)

    walk(typer.main.get_command(app))
    for path in SOURCES:
        found |= set(re.findall(r'"(--[a-z-]+)"', path.read_text()))
    return frozenset({*found, "--help"})


def test_every_option_that_a_message_names_exists() -> None:
    wrong = []
    for path in SOURCES:
        for text in strings(path):
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text))
            wrong += [f"{name_of(path)}: {o}" for o in named - own_options() - FOREIGN]
    assert not wrong, "\n".join(sorted(set(wrong)))


@cache
def options_of(script: Path) -> frozenset[str]:
    """The options that a script of this repository, or a module beside it that it imports, declares."""
    text = script.read_text()
    found = set(re.findall(r'"(--[a-z-]+)"', text))
    for module in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE):
        beside = script.parent / f"{module}.py"
        if beside.exists() and beside != script:
            found |= options_of(beside)
    return frozenset({*found, "--help"})


def wrong_scripts(place: Path, text: str) -> list[str]:
    """Command lines of Python and pytest in a text whose file or option does not exist.

    Files of other projects lie in folders that this repository lacks.
    """
    wrong = []
    for name, rest in re.findall(r"(?:python3? |pytest [^`\n]*?)((?:[\w-]+/)+\w+\.py)([^`\n#]*)", text):
        folders = [each for each in (ROOT, place.parent) if (each / name.split("/")[0]).exists()]
        found = [each / name for each in folders if (each / name).exists()]
        if folders and not found:
            wrong.append(name)
        elif found and "/tests/test_" not in f"/{name}":
            wrong += sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", rest)) - options_of(found[0]))
    return wrong


def wrong_targets(place: Path, text: str) -> list[str]:
    """Targets and variables of make in a text that the Makefile does not have."""
    makefile = (ROOT / "Makefile").read_text()
    targets = {*re.findall(r"^([a-z-]+):", makefile, re.MULTILINE), "codegen-3.8.0", "codegen-3.9.0"}
    variables = set(re.findall(r"^([A-Z]+) *[?:]?=", makefile, re.MULTILINE))
    wrong = []
    for line in re.findall(r"`make ([a-z][^`\n]*)`", text):
        words = shlex.split(line.split(" #")[0])
        wrong += [w for w in words if "=" in w and w.split("=")[0] not in variables]
        wrong += [w for w in words if "=" not in w and w not in targets]
    return wrong


def wrong_paths(place: Path, text: str) -> list[str]:
    """Files, and tests in files, that a text names and that do not exist.

    Paths begin at a folder above or at one of a package.
    """
    packages = [each.parent for each in ROOT.glob("packages/*/src")]
    folders = [ROOT, *place.parents[: len(place.relative_to(ROOT).parents)], *packages]
    folders += [each / "src" / "narrowkv" / each.name for each in packages]
    folders += [folder for each in packages for folder in (each / "src", each / "src" / "narrowkv")]
    wrong = []
    for name, test in re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|toml|md|json))(?:::(\w+))?`", text):
        found = [folder / name for folder in folders if (folder / name).exists()]
        if not found or (test and f"def {test}(" not in found[0].read_text()):
            wrong.append(f"{name}::{test}" if test else name)
    return wrong


def wrong_kernels(place: Path, text: str) -> list[str]:
    """Values of `kernel=` in a text that no operation has."""
    return sorted(set(re.findall(r"(?<!\w)kernel=[\"'](\w+)[\"']", text)) - FORCED_KERNELS)


def wrong_names(place: Path, text: str) -> list[str]:
    """Names `narrowkv.package.name`, and operators of torch, in a text that cannot be looked up."""
    found = set(re.findall(r"`(narrowkv(?:\.\w+)+)(?:\([^`]*\))?`", text))
    operators = set(re.findall(r"`torch\.ops\.narrowkv\.(\w+)`", text)) - MADE_LATER
    return [each for each in sorted(found) if not _exists(each)] + [
        each for each in sorted(operators) if not hasattr(torch.ops.narrowkv, each)
    ]


def _exists(dotted: str) -> bool:
    """Whether a module has that name, or an attribute of one; modules of an engine are not imported."""
    module, *names = dotted, *()
    while find_spec_of(module) is None:
        module, _, name = module.rpartition(".")
        names.insert(0, name)
    if not names:
        return True
    value: Any = importlib.import_module(module)
    for name in names:
        if not hasattr(value, name):
            return name in getattr(value, "__annotations__", {})
        value = getattr(value, name)
    return True


def find_spec_of(module: str) -> Any:
    """As `find_spec`; None also where what lies above is no package."""
    try:
        return find_spec(module)
    except ModuleNotFoundError:
        return None


CHECKS = (wrong_scripts, wrong_targets, wrong_paths, wrong_kernels, wrong_names)


@pytest.mark.parametrize("check", CHECKS)
def test_what_sources_and_pages_name_exists(check: Any) -> None:
    places = [*SOURCES, *(page for page in PAGES if page.name != "CHANGELOG.md")]
    wrong = [f"{name_of(path)}: {each}" for path in places for each in check(path, path.read_text())]
    assert not wrong, "\n".join(sorted(set(wrong)))


@pytest.mark.parametrize(
    ("check", "text", "found"),
    [
        (wrong_scripts, "`python tools/tile_swep.py --small`", "tools/tile_swep.py"),
        (wrong_scripts, "`python tools/tile_sweep.py --proceses 14`", "--proceses"),
        (wrong_scripts, "`pytest -m gpu packages/engines/tests/test_step.py`",
         "packages/engines/tests/test_step.py"),
        (wrong_targets, "run `make set-up` first", "set-up"),
        (wrong_targets, "`make test ARG='-k append'`", "ARG=-k append"),
        (wrong_paths, "see `tests/test_tile.py`", "tests/test_tile.py"),
        (wrong_paths, "see `tests/test_tiles.py::test_none`", "tests/test_tiles.py::test_none"),
        (wrong_kernels, "plan with kernel='spilt'", "spilt"),
        (wrong_names, "`narrowkv.quant.calibrates()`", "narrowkv.quant.calibrates"),
        (wrong_names, "`torch.ops.narrowkv.paged_decodes`", "paged_decodes"),
    ],
)  # fmt: skip
def test_a_name_of_nothing_is_found(check: Any, text: str, found: str) -> None:
    assert check(ROOT / "README.md", text) == [found]
