"""The commands from outside: help, exit codes, what stdout and stderr get."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import typer.main
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.cli.report import version
from narrowkv.testing.contracts import CONTRACT_SETS

run = CliRunner().invoke
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU says")
COMMANDS = ("probe", "validate", "bench", "inspect", "engines", "warmup", "env", "report")


def command(*arguments: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "narrowkv.cli", *arguments]
    return subprocess.run(line, capture_output=True, text=True, **kwargs)  # type: ignore[call-overload,no-any-return]


def test_help_answers_within_half_a_second() -> None:
    def seconds() -> float:
        # Processor time: a busy machine makes nothing slower by this clock.
        begin = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        done = command("--help")
        assert done.returncode == 0
        assert all(name in done.stdout for name in COMMANDS)
        return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - begin

    assert min(seconds() for _ in range(3)) < 0.5


@pytest.mark.parametrize("arguments", [("--help",), ("probe", "--help"), ("bench", "decode", "--help")])
def test_help_imports_neither_torch_nor_triton(arguments: tuple[str, ...]) -> None:
    code = f"""
import sys
import time
from narrowkv.cli.app import app
try:
    app({list(arguments)!r})
except SystemExit as end:
    assert not end.code, end.code
found = sorted({{"torch", "triton", "numpy", "matplotlib"}} & set(sys.modules))
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_command_is_named_in_its_own_help() -> None:
    for name in COMMANDS:
        result = run(app, [name, "--help"])
        assert result.exit_code == 0
        assert name in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["probe", "no-such-set"], ["CONTRACT-SET", "glm-gqa12", "no-such-set"]),
        (["probe", "--target", "gfx90a"], ["--target", "gfx942", "gfx90a"]),
        (["probe", "--on", "tpu"], ["--on", "cpu", "gfx942", "tpu"]),
        (["probe", "--on", "cpu,tpu"], ["--on", "cpu", "tpu"]),
        (["probe", "--on", "cpu", "--on", ""], ["--on", "cpu", "''"]),
        (["validate", "--on", "gfx942,gfx90a"], ["--on", "gfx950", "gfx90a"]),
        (["validate", "--on", "gfx942,cpu", "--detect-races"], ["--detect-races", "gfx942", "cpu"]),
        (["validate", "--case", "ratio=twelve"], ["ratio", "int", "twelve"]),
        (["validate", "--case", "colour=red"], ["colour=red", "page_size"]),
        (["validate", "--case", "lens=3+-1"], ["lens", "3+-1"]),
        (["validate", "--case", "q=fp8_e4m3fn"], ["q", "bf16", "fp8_e4m3fn"]),
        (["bench", "decode", "--batch", "4,x"], ["--batch", "4,x"]),
        (["bench", "decode", "--format", "fp3"], ["--format", "fp8_e4m3fn", "fp3"]),
        (["bench", "decode", "--context", "1000", "--page-size", "64"], ["--context", "1000", "64"]),
        (["inspect", "--format", "fp3"], ["fp3", "fp8_e4m3fn"]),
        (["engines", "try", "triton"], ["ENGINE", "transformers", "triton"]),
        (["engines", "try", "vllm", "--cache", "fp4"], ["--cache", "ultraquant_4bit"]),
        (["no-such-command"], ["no-such-command"]),
        (["probe", "--no-such-option"], ["--no-such-option"]),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_known(arguments: list[str], words: list[str]) -> None:
    result = run(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    missing = [word for word in words if word not in result.stderr]
    assert not missing, result.stderr


OPERATIONS = {"validate": {"decode", "prefill", "sparse", "sage", "fp4"},
              "bench": {"decode", "prefill", "sparse", "sage", "traffic", "host", "cp"},
              "inspect": {"decode", "prefill", "sparse", "sage", "model"},
              "engines": {"try"}}  # fmt: skip
# What they show is not a table of results that can be plotted and resumed.
WITHOUT_A_TABLE = [
    ("env",),
    ("report",),
    ("bench", "host"),
    ("bench", "cp"),
    ("inspect", "model"),
    ("engines", "try"),
]
EVERY = [
    ("probe",),
    ("env",),
    *((group, name) for group, names in OPERATIONS.items() for name in sorted(names)),
]


def options_of(*command: str) -> set[str]:
    found: Any = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]
    return {option for parameter in found.params for option in parameter.opts if option.startswith("--")}


def test_every_operation_has_its_command_and_every_command_the_options_of_its_results() -> None:
    main: Any = typer.main.get_command(app)
    assert {name: set(main.commands[name].commands) for name in OPERATIONS} == OPERATIONS
    for command in EVERY:
        assert {"--json", "--out"} <= options_of(*command)
        assert command in WITHOUT_A_TABLE or {"--csv", "--plot", "--resume"} <= options_of(*command)


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_an_option_of_another_command_is_an_error_that_names_it(command: tuple[str, ...]) -> None:
    """Every option that any command has, given to a command that lacks it."""
    foreign = set().union(*(options_of(*other) for other in EVERY)) - options_of(*command)
    assert foreign
    for option in sorted(foreign):
        result = run(app, [*command, option])
        assert (result.exit_code, result.stdout) == (2, ""), option
        assert option in result.stderr


@pytest.mark.parametrize("command", [(), *EVERY, ("validate",), ("bench",), ("inspect",)], ids=" ".join)
def test_h_is_help(command: tuple[str, ...]) -> None:
    short, long = (run(app, [*command, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert short.output == long.output
    assert "Usage" in short.output


def test_version() -> None:
    result = run(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"narrowkv {version()}\n")


@pytest.mark.parametrize("group", ["validate", "inspect"])
def test_decode_is_meant_where_no_operation_is_named(group: str) -> None:
    bare, named = (
        run(app, [*arguments, "--target", "x", "--on", "x"]) for arguments in ([group], [group, "decode"])
    )
    assert bare.exit_code == named.exit_code == 2
    assert bare.stderr == named.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", "--on", "gfx942", "fp4"],
        ["inspect", "--target", "gfx942", "sage"],
        ["validate", "--full", "sparse"],
    ],
)
def test_options_before_the_operation_are_an_error_that_says_where_they_go(arguments: list[str]) -> None:
    result = run(app, arguments)
    assert result.exit_code == 2
    words = " ".join(result.stderr.replace("│", " ").split())
    assert f"({arguments[-1]}); options follow the operation: " in words


def completed(line: str) -> list[str]:
    current = str(len(line.split(" ")) - 1)
    environment = {"_NARROWKV_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": current}
    result = run(app, [], env=environment, prog_name="narrowkv")
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("narrowkv pro", ["probe"]),
        ("narrowkv validate f", ["fp4"]),
        ("narrowkv probe glm", ["glm-gqa12", "glm-gqa12-long"]),
        ("narrowkv validate decode --on gfx942,gfx9", ["gfx942,gfx942", "gfx942,gfx950"]),
        ("narrowkv bench decode --format fp8_e4", ["fp8_e4m3fn", "fp8_e4m3fnuz"]),
        ("narrowkv bench sparse --mode f", ["fused", "fused-fp8q"]),
        ("narrowkv validate fp4 --res", ["--resume"]),
    ],
)
def test_a_shell_completes_commands_options_and_names(line: str, words: list[str]) -> None:
    assert completed(line) == words


MISSPELLED = [
    (["probe", "glm-gqa"], "glm-gqa12"),
    (["probe", "--on", "gfx94"], "gfx942"),
    (["probe", "--target", "gfx90a"], "gfx950"),
    (["validate", "--on", "gfx941"], "gfx942"),
    (["validate", "decode", "--case", "lens=3,format=fp8_e4m3"], "fp8_e4m3fn"),
    (["validate", "prefill", "--case", "format=fp4"], "fp4_e2m1"),
    (["validate", "fp4", "--on", "gfx942"], "cpu, gpu"),
    (["validate", "spars"], "'sparse'"),
    (["bench", "decode", "--format", "fp8"], "fp8_e5m2"),
    (["bench", "decode", "--q", "fp8"], "bf16"),
    (["bench", "prefill", "--format", "bf16,fp8_e4m3fnu"], "fp8_e4m3fnuz"),
    (["bench", "sparse", "--mode", "fusd"], "fused"),
    (["bench", "sage", "--qk", "int2"], "int8"),
    (["bench", "sage", "--granularity", "per_warps"], "per_warp"),
    (["bench", "sge"], "'sage'"),
    (["inspect", "--format", "bf61"], "bf16"),
    (["inspect", "decode", "--q", "fp61"], "fp16"),
    (["inspect", "--kernel", "nativ"], "native"),
    (["inspect", "prefil"], "'prefill'"),
    (["inspect", "sparse", "--case", "format=fp8_e4m3"], "fp8_e4m3fn"),
]


def test_a_misspelled_name_is_refused_with_the_nearest_before_torch_is_imported() -> None:
    """All in one process, whose imports of torch and triton fail."""
    code = f"""
import sys
sys.modules["torch"] = sys.modules["triton"] = None
from typer.testing import CliRunner
from narrowkv.cli.app import app
for arguments, nearest in {MISSPELLED!r}:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, ""), (arguments, result.output)
    words = " ".join(result.stderr.replace("│", " ").split())
    assert nearest in words, words
    assert any(phrase in words for phrase in ("nearest", "Did you mean", "must be one of")), words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_misspelled_name_costs_less_than_a_second() -> None:
    def seconds() -> float:
        begin = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        assert command("validate", "--case", "format=fp8_e4m3").returncode == 2
        return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - begin

    assert min(seconds() for _ in range(3)) < 1


def test_the_names_are_those_of_the_library() -> None:
    from narrowkv.cli import names
    from narrowkv.paged_cache import CacheFormat
    from narrowkv.paged_cache.descales import SCALE_GROUPS
    from narrowkv.quant.formats import FORMATS
    from narrowkv.quant.sage import SAGE_GRANULARITIES
    from narrowkv.testing import places
    from narrowkv.testing.traffic import MODELS, TRAFFIC

    def can_be(name: str) -> bool:
        try:
            CacheFormat.parse(name)
        except ValueError:
            return False
        return True

    assert {name for name in FORMATS if can_be(name)} == set(names.CACHE_FORMATS)
    assert set(names.SAGE_GRANULARITIES) == set(SAGE_GRANULARITIES)
    assert set(names.CONTRACT_SETS) == set(CONTRACT_SETS)
    assert (TRAFFIC, tuple(MODELS)) == (names.TRAFFIC, names.TRAFFIC_MODELS)
    assert names.SCALE_GROUPS == SCALE_GROUPS
    assert set(names.PLACES) == set(places.PLACES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["probe", "--list", "glm-gqa12", "--jobs", "2"], "CONTRACT-SET, --jobs do not apply with --list"),
        (["probe", "--list", "--plot", "x.png"], "--plot does not apply with --list"),
        (["validate", "--case", "lens=3", "--full"], "--full does not apply with --case"),
        (["validate", "--case", "lens=3", "--seed", "1"], "--seed does not apply with --case"),
        (["validate", "sparse", "--case", "lens=3", "--quick"], "--full does not apply with --case"),
        (["inspect", "--case", "lens=3", "--ratio", "4"], "--ratio does not apply with --case"),
        (["inspect", "--case", "lens=3", "--format", "bf16"], "--format does not apply with --case"),
        (["validate", "--on", "cpu", "--detect-races"], "--detect-races must be with --on gfx942 or gfx950"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(arguments: list[str], words: str) -> None:
    result = run(app, arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr


@pytest.mark.parametrize("arguments", [["env"], ["probe"], ["validate"], ["inspect"], ["bench", "decode"]])
def test_an_unwritable_output_file_is_refused_before_the_run(arguments: list[str], tmp_path: Path) -> None:
    target = tmp_path / "missing" / "out.json"
    begin = time.perf_counter()
    result = run(app, [*arguments, "--out", str(target)])
    assert result.exit_code == 2
    assert str(target) in result.stderr
    assert time.perf_counter() - begin < 5


def test_checking_an_output_file_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    assert run(app, ["probe", "no-such-set", "--out", str(target)]).exit_code == 2
    assert not target.exists()
    target.write_text("kept")
    assert run(app, ["probe", "no-such-set", "--out", str(target)]).exit_code == 2
    assert target.read_text() == "kept"


def test_list_names_every_set() -> None:
    result = run(app, ["probe", "--list"])
    assert result.exit_code == 0
    assert all(name in result.stdout for name in CONTRACT_SETS)
    named = json.loads(run(app, ["probe", "--list", "--json"]).stdout)["sets"]
    assert [entry["name"] for entry in named] == list(CONTRACT_SETS)


def test_json_is_all_of_stdout_and_out_gets_the_same(tmp_path: Path) -> None:
    target = tmp_path / "env.json"
    result = run(app, ["env", "--json", "--out", str(target)])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document == json.loads(target.read_text())
    assert document["schema_version"] == 1
    assert document["command"] == "env"
    assert document["exit_code"] == 0
    assert document["environment"]["torch"]["version"] == torch.__version__
    assert torch.__version__ in result.stderr


def test_env_without_json_puts_the_table_on_stdout() -> None:
    result = run(app, ["env"])
    assert result.exit_code == 0
    assert torch.__version__ in result.stdout
    assert result.stderr == ""


@without_gpu
@pytest.mark.parametrize(
    "arguments", [["bench", "decode"], ["validate", "--on", "gpu"], ["probe", "--on", "gpu"]]
)
def test_what_needs_a_gpu_ends_with_3_and_says_why(arguments: list[str]) -> None:
    result = run(app, arguments)
    assert result.exit_code == 3
    assert "GPU" in result.stderr
    assert torch.__version__ in result.stderr


def test_a_missing_triton_ends_with_3_and_says_what_to_do() -> None:
    code = """
import importlib.abc, sys

class NoTriton(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

sys.meta_path.insert(0, NoTriton())
from narrowkv.cli.app import app
app(["probe"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def colours_on_a_terminal(**variables: str) -> list[str]:
    """Escapes that set a colour in what `env` writes to a terminal."""
    leader, follower = pty.openpty()
    line = [sys.executable, "-m", "narrowkv.cli", "env"]
    hidden = ("NO_COLOR", "FORCE_COLOR", "CI")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"TERM": "xterm-256color", **variables}
    child = subprocess.Popen(line, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    seen = b""
    try:
        while chunk := os.read(leader, 65536):
            seen += chunk
    except OSError:  # a terminal whose other end is closed
        pass
    assert child.wait() == 0
    styles = [code.split(";") for code in re.findall(r"\x1b\[([0-9;]*)m", seen.decode())]
    return [part for style in styles for part in style if re.fullmatch(r"[39][0-7]", part)]


def test_no_color_is_honoured() -> None:
    assert colours_on_a_terminal()
    assert not colours_on_a_terminal(NO_COLOR="1")
