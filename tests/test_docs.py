"""The documentation says what is so: snippets run, commands parse, links and quoted messages exist."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from narrowkv.cli.app import app

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


def test_the_stations_of_reading_the_code_exist_and_are_at_most_ten_each():
    page = ROOT / "docs" / "reading-the-code.md"
    links = re.findall(r"\[`([\w.]+)`\]\(([^)\s]+\.py)\)", page.read_text())
    assert len(links) > 30
    for name, link in links:
        path = page.parent / link
        assert path.is_file(), f"{name}: {link}"
        assert name in defined_in(path), f"{link} does not define {name}"
    routes = page.read_text().split("\n## ")[1:]
    assert len(routes) == 3
    for route in routes:
        assert len(re.findall(r"^\d+\. ", route, re.MULTILINE)) <= 10


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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_installed_by_name_is_on_an_index(page):
    # narrowkv's own distributions are not: they are installed from a checkout or a git URL.
    found = re.findall(r"pip install[^\n|#]*?(?<![/\w])narrowkv[-\w]*", page.read_text())
    assert not found
