"""The documentation says what is so: snippets run, commands parse, links and quoted messages exist."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from narrowkv.attn_decode import planning
from narrowkv.attn_prefill.config import APPEND_KERNELS, KERNELS
from narrowkv.cli.app import app
from narrowkv.runtime import tuned
from narrowkv.testing.calls import trace_functions

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
    ROOT / "cli" / "README.md",
    ROOT / "benchmarks" / "baselines" / "README.md",
]
PAGES = [page for page in PAGES if "_build" not in page.parts]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Line and content of each fenced block in a language."""
    text = page.read_text()
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start()) + 2, match[1]) for match in pattern.finditer(text)]


def prose(page: Path) -> str:
    """The page without its blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """Every command line of `narrowkv` or `make` that a page shows, in a block or in a sentence."""
    fenced = [line for _, block in blocks(page, "(?:console|bash)?") for line in block.splitlines()]
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))
    found = [line.split(" #")[0].strip() for line in (*fenced, *spans)]
    return [line for line in found if re.match(r"(narrowkv (?!needs)|make )[-a-z]", line)]


def parse(arguments: list[str]) -> None:
    """Parses a command line of `narrowkv` without running it."""
    command: Any = typer.main.get_command(app)
    while arguments and arguments[0] in getattr(command, "commands", {}):
        command, *arguments = command.commands[arguments[0]], *arguments[1:]
    if getattr(command, "commands", {}):
        if arguments and not arguments[0].startswith("-"):
            raise LookupError(f"{arguments[0]!r} is not a command")
        if not arguments:
            return  # a group, named as such
    command.make_context(command.name, list(arguments))


with_python = pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
with_commands = pytest.mark.parametrize(
    "page", [p for p in PAGES if commands(p) and p.name != "CHANGELOG.md"], ids=name_of
)


@with_python
def test_the_snippets_of_a_page_run_one_after_the_other(page):
    namespace: dict[str, object] = {"__name__": "snippet"}  # Triton finds a kernel's source by file and line
    for line, block in blocks(page, "python"):
        exec(compile("\n" * (line - 1) + block, str(page), "exec"), namespace)


@with_commands
def test_the_commands_of_a_page_exist_and_take_these_options(page):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    versions = re.findall(r"^TRITONS *:= (.*)", makefile, re.MULTILINE)[0].split()
    targets |= {f"codegen-{version}" for version in versions}
    for line in commands(page):
        words = shlex.split(line)
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, f"{name_of(page)}: {line}"
            continue
        placeholders = {"LINE", "FILE", "FORMAT", "BASELINE.json", "CONTRACT-SET"}
        if placeholders & set(words) or any("[" in word for word in words):
            continue
        try:
            parse(words[1:])
        except typer.Exit:
            pass  # --help, --version
        except Exception as error:
            pytest.fail(f"{name_of(page)}: {line}: {error}")


@pytest.mark.parametrize("line", ["bench decodee", "bench decode --nope", "nothing"])
def test_a_command_that_does_not_exist_would_be_found(line):
    with pytest.raises(Exception, match=r"(?i)no such|not a command"):
        parse(line.split())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_to_files(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in link and not link.startswith("#"):
            assert (page.parent / link.split("#")[0]).exists(), f"{name_of(page)}: {link}"


def anchors(page: Path) -> set[str]:
    """What `page.md#anchor` may name: each heading as MyST and code hosts spell it."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_anchors_of_a_page_are_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        if anchor and "://" not in link and (not path or path.endswith(".md")):
            assert anchor in anchors(page.parent / path if path else page), f"{name_of(page)}: {link}"


def test_what_each_change_is_checked_by_is_what_ci_runs():
    steps = re.findall(r"^step \w+ (make .*)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    steps += re.findall(r"^ +- run: (make .*)$", workflow, re.MULTILINE)
    page = " ".join((ROOT / "README.md").read_text().split())
    (claimed,) = re.findall(r"each change is checked by (.*?)\. \|", page)
    for command in re.findall(r"`(make [^`]+)`", claimed):
        of_decode = f"{command} OPERATIONS=decode" in steps and f"`{command}` for decode" in claimed
        assert command in steps or of_decode, command


def defined_in(path: Path) -> set[str]:
    """Names of the functions, classes, methods (`Class.method`) and constants that a file defines."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


READING = ROOT / "docs" / "reading-the-code.md"
# How a CPU interprets a kernel: another way to run the same launch.
INTERPRETER = re.compile(r"/launch/(interpreter\w*|private_triton|parsing)\.py$")


def functions_linked(text: str) -> list[tuple[Path, str]]:
    """File and name of each function that links of the page name, in order."""
    links = re.findall(r"\[`([\w.]+)`\]\(([^)\s]+\.py)\)", text)
    return [((READING.parent / link).resolve(), name) for name, link in links]


def entered(call: Callable[[], Any]) -> list[tuple[Path, str]]:
    """File and name of each function of narrowkv's packages that a call enters, the interpreter's apart."""
    found = trace_functions(call)
    packages = str(ROOT / "packages")
    paths = {file: Path(file) for file, _ in found if file.endswith(".py") and not INTERPRETER.search(file)}
    return [(paths[file], name) for file, name in found if file in paths and file.startswith(packages)]


def inputs_of_reading() -> dict[str, Any]:
    """What the program of the page makes, anew; without its calls."""
    ((_, program),) = blocks(READING, "python")
    found: dict[str, Any] = {}
    exec(program.split("\nplan = ")[0], found)
    return found


@cache
def ways_of_reading() -> dict[str, list[tuple[Path, str]]]:
    """What the calls of each section of the page enter."""
    s = inputs_of_reading()
    arguments, plans = (s["q"], s["cache"], s["table"]), []
    ways = {"The plan": entered(lambda: plans.append(s["plan_decode"](*arguments, split="even")))}
    for section in ("The first call", "A later call"):
        ways[section] = entered(lambda: s["paged_decode"](*arguments, plan=plans[0]))
    way = ways["A later call"]
    starts = [index for index, (_, name) in enumerate(way) if name == "_paged_decode_kernel"]
    programs = [way[begin:end] for begin, end in zip(starts, [*starts[1:], None], strict=True)]
    ways["The kernel"] = max(programs, key=len)  # the one that merges
    s = inputs_of_reading()
    arguments = (s["q"], s["cache"], s["table"])
    planning._plans.clear()
    tuned._shipped_rows.cache_clear()
    ways["A call without a plan"] = entered(lambda: s["paged_decode"](*arguments))
    return ways


@pytest.mark.parametrize(
    "section", ["The plan", "The first call", "A later call", "A call without a plan", "The kernel"]
)
def test_a_call_enters_the_functions_of_reading_the_code_in_that_order(section):
    text = READING.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    steps = functions_linked("\n".join(re.findall(r"^(?:\d+\.|   ) .*$", text, re.MULTILINE)))
    assert len(steps) >= 3
    way = iter(ways_of_reading()[section])
    for path, name in steps:
        assert name in defined_in(path), f"{path} does not define {name}"
        assert (path, name.rpartition(".")[2]) in way, f"{section}: {name} is not entered, or entered before"


def test_reading_the_code_names_every_file_that_the_call_crosses():
    linked = {
        (READING.parent / link).resolve() for link in re.findall(r"\]\((\S+\.py)\)", READING.read_text())
    }
    crossed = {path for way in ways_of_reading().values() for path, _ in way}
    assert crossed <= linked, sorted(map(str, crossed - linked))
    assert linked - crossed <= {ROOT / "packages/attn_decode/src/narrowkv/attn_decode/reference.py"}


def test_quoted_messages_are_those_of_the_code():
    folders = [*ROOT.glob("packages/*/src"), ROOT / "cli" / "src", ROOT / "tools"]
    sources = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    code = re.sub(r"\"\s*\n\s*f?\"", "", sources)  # literals over several lines
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = page.split("## Wrong numbers")[0]
    messages = re.findall(r"^### `([^`]+)`", tables, re.MULTILINE)
    assert len(messages) > 20
    foreign = {"No matching distribution found for narrowkv-runtime"}  # pip's
    unknown = [message for message in messages if message not in code and message not in foreign]
    assert not unknown, unknown


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_in_the_reference_and_has_a_docstring(name):
    page = (ROOT / "docs" / "api" / f"{name}.md").read_text()
    assert f".. automodule:: narrowkv.{name}\n" in page
    assert re.search(rf"^{name}$", (ROOT / "docs" / "api" / "index.md").read_text(), re.MULTILINE)
    for module in re.findall(r"automodule:: ([\w.]+)", page):
        package = importlib.import_module(module)
        for public in package.__all__:
            value = getattr(package, public)
            if callable(value):
                assert value.__doc__, f"{module}.{public}"


def test_plots_and_tables_are_those_of_the_stored_results(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["results.py", "--check"])
    runpy.run_path(str(ROOT / "tools" / "results.py"), run_name="__main__")  # exits where one is not


@pytest.mark.parametrize(
    ("plan", "kernels"),
    [
        ("plan_decode", ("decode", "native", "fp8")),
        ("plan_prefill", KERNELS),
        ("plan_append", APPEND_KERNELS),
    ],
)
def test_the_tuning_page_lists_every_kernel_that_can_be_forced(plan, kernels):
    page = (ROOT / "docs" / "tuning.md").read_text()
    (values,) = re.findall(rf"^\|(?: `kernel=`)? \|(?: of \|)? `{plan}` \| (.*) \|$", page, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", values)) == sorted(kernels)


def test_a_release_is_described_in_at_most_60_lines():
    _, *releases = re.split(r"^## \[", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert releases[0].startswith("Unreleased]\n")
    assert len(releases) > 1
    for release in releases:
        assert len(release.rstrip().splitlines()) <= 60, release.splitlines()[0]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_installed_by_name_is_on_an_index(page):
    # narrowkv's own distributions are not: they are installed from a checkout or a git URL.
    found = re.findall(r"pip install[^\n|#]*?(?<![/\w])narrowkv[-\w]*", page.read_text())
    assert not found
