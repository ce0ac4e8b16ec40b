"""Strings of the sources that name a command, a case, a kernel or an option name one that exists."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from test_docs import PAGES, commands, name_of

from narrowkv.cli import options
from narrowkv.cli.app import app
from narrowkv.cli.inspection import parse_call
from narrowkv.testing.cases import CaseError, parse_case
from narrowkv.testing.cases.sage import one_shape
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
}  # fmt: skip


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
            options.choices(f"--{name}", given[name], known)
    if given.get("cache_format"):
        options.cache_formats("--format", given["cache_format"])
    if given.get("q") and command in ("decode", "warmup"):
        options.one_of("--q", given["q"], QUERY_DTYPES)
    if command == "probe" and given["contract_set"] not in ("cp", "models"):
        options.one_of("CONTRACT-SET", given["contract_set"], tuple(contract_sets()))
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
                known = any(_is_case(entry.cases.case, match[1]) for entry in OPERATIONS.values())
                if not (known or _is_shape_of_sage(match[1])):
                    wrong.append(f"{name_of(path)}: {span}")
    assert found
    assert not wrong, "\n".join(wrong)


def _is_shape_of_sage(line: str) -> bool:
    try:
        one_shape(line, precision="", granularity="", seed=0)
    except ValueError:
        return False
    return True


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
    for path in ROOT.glob("tools/*.py"):
        found |= set(re.findall(r'"(--[a-z-]+)"', path.read_text()))
    return frozenset({*found, "--help"})


def test_every_option_that_a_message_names_exists() -> None:
    wrong = []
    for path in SOURCES:
        if "cli" in path.parts or "testing" in path.parts:
            for text in strings(path):
                named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text))
                wrong += [f"{name_of(path)}: {o}" for o in named - own_options() - FOREIGN]
    assert not wrong, "\n".join(sorted(set(wrong)))
