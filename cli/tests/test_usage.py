"""The commands from outside: help, completion, what is refused, and how each ends."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
import typer.main
from cli_support import document, narrowkv
from typer.testing import CliRunner

from narrowkv.cli import report
from narrowkv.cli.app import app
from narrowkv.context_parallel import exchange
from narrowkv.engines import tiny, trial
from narrowkv.paged_cache import CacheFormat
from narrowkv.paged_cache.descales import SCALE_GROUPS
from narrowkv.quant.formats import FORMATS
from narrowkv.quant.sage import SAGE_GRANULARITIES
from narrowkv.testing import words
from narrowkv.testing.accuracy import RECIPES
from narrowkv.testing.bench.sparse import WAYS as SPARSE_WAYS
from narrowkv.testing.operations import contract_sets


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, which must end well."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def cpu_seconds(*arguments: str, ends: int = 0) -> float:
    """Processor time of Python with these arguments, the least of three: a busy machine adds none."""
    found = []
    for _ in range(3):
        begun = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        done = subprocess.run([sys.executable, *arguments], capture_output=True)
        assert done.returncode == ends
        found.append(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - begun)
    return min(found)


def test_help_and_refusals_are_quick() -> None:
    """By the time that the command's libraries take to load; torch takes 14 times as long."""
    libraries = cpu_seconds("-c", "import typer, rich.console")
    command = "-m", "narrowkv.cli"
    assert cpu_seconds(*command, "--help") < 4 * libraries
    assert cpu_seconds(*command, "validate", "--case", "format=fp8_e4m3", ends=2) < 5 * libraries


def test_version() -> None:
    assert narrowkv("--version").output == f"narrowkv {report.version()}\n"


def commands_below(found: Any, *path: str) -> dict[tuple[str, ...], Any]:
    """Every group and command of the program by its words."""
    below = {path: found}
    for name, command in getattr(found, "commands", {}).items():
        below |= commands_below(command, *path, name)
    return below


PROGRAM = commands_below(typer.main.get_command(app))
COMMANDS = {path: command for path, command in PROGRAM.items() if not hasattr(command, "commands")}
OPERATIONS = {
    "validate": {"decode", "prefill", "sparse", "latent", "sage", "indexer", "topk", "fp4"},
    "bench": {"decode", "prefill", "sparse", "sage", "indexer", "traffic", "host", "cp"},
    "inspect": {"decode", "prefill", "sparse", "latent", "sage", "indexer", "topk", "model"},
    "engines": {"try"},
    "accuracy": {"measure", "train-tiny"},
}
# What they show is not a table of results that can be plotted and resumed.
WITHOUT_A_TABLE = {
    ("env",), ("report",), ("tune",), ("warmup",), ("bench", "host"), ("bench", "cp"), ("inspect", "model"),
    ("engines", "try"), ("accuracy", "measure"), ("accuracy", "train-tiny"),
}  # fmt: skip


def options_of(command: Any) -> set[str]:
    """The long options of a command, those that switch something off (`--full/--quick`) too."""
    names = (name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts))
    return {name for name in names if name.startswith("--")}


def test_every_operation_has_its_command_and_every_command_the_options_of_its_results() -> None:
    assert {name: set(PROGRAM[name,].commands) for name in OPERATIONS} == OPERATIONS
    alone = {path[0] for path in COMMANDS if len(path) == 1}
    assert alone == {"probe", "warmup", "tune", "env", "report"}
    for path, command in COMMANDS.items():
        assert path == ("report",) or {"--json", "--out"} <= options_of(command)
        assert path in WITHOUT_A_TABLE or {"--csv", "--plot", "--resume"} <= options_of(command)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_an_option_of_another_command_is_an_error_that_names_it(path: tuple[str, ...]) -> None:
    """Every option that any command has, given to a command that lacks it."""
    foreign = sorted(set().union(*map(options_of, COMMANDS.values())) - options_of(COMMANDS[path]))
    for option in foreign:
        with pytest.raises(Exception, match=f"No such option: {option}"):
            COMMANDS[path].make_context(path[-1], [option])
    result = narrowkv(" ".join(path), foreign[0], ends=2)
    assert result.stdout == ""
    assert foreign[0] in result.stderr


@pytest.mark.parametrize("path", PROGRAM, ids=" ".join)
def test_h_is_help_that_names_the_command(path: tuple[str, ...]) -> None:
    short, long = (narrowkv(" ".join(path), option).output for option in ("-h", "--help"))
    assert short == long
    assert " ".join(("Usage: narrowkv", *path)) in said(short)


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
    current = str(len(line.split(" ")) - 1)
    environment = {"_NARROWKV_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": current}
    assert CliRunner().invoke(app, [], env=environment, prog_name="narrowkv").stdout.split() == words


def test_the_names_that_are_known_without_torch_are_those_of_the_library() -> None:
    def can_be_cached(name: str) -> bool:
        try:
            CacheFormat.parse(name)
        except ValueError:
            return False
        return True

    assert set(words.CACHE_FORMATS) == {name for name in FORMATS if can_be_cached(name)}
    assert words.SCALE_GROUPS == SCALE_GROUPS
    assert set(words.SAGE_GRANULARITIES) == set(SAGE_GRANULARITIES)
    assert set(words.SPARSE_WAYS) == set(SPARSE_WAYS)
    assert words.COMMS == exchange.COMMS
    assert words.ENGINE_CACHES == trial.CACHES
    assert set(words.TINY_MODELS) == set(tiny.TINY_MODELS)
    assert tuple(recipe.name for recipe in RECIPES) == words.ACCURACY_RECIPES


# A command and what its message must hold. These are refused before torch is imported.
MISSPELLED = [
    ("probe no-such-set", "CONTRACT-SET", "glm-gqa12", "no-such-set"),
    ("probe glm-gqa", "nearest: glm-gqa12"),
    ("probe --target gfx90a", "--target", "gfx942", "gfx90a", "nearest: gfx950"),
    ("probe --on tpu", "--on must be one of cpu, gpu, gfx942, gfx950; got 'tpu'"),
    ("probe --on cpu,tpu", "--on", "'tpu'"),
    ("probe --on gfx94", "nearest: gfx942"),
    ("probe --no-such-option", "--no-such-option"),
    ("validate --on gfx942,gfx90a", "--on", "gfx950", "gfx90a"),
    ("validate --on gfx941", "nearest: gfx942"),
    ("validate decode --case lens=3,format=fp8_e4m3", "nearest: fp8_e4m3fn"),
    ("validate prefill --case format=fp4", "nearest: fp16, fp4_e2m1"),
    ("validate fp4 --on gfx942", "must be one of cpu, gpu"),
    ("validate spars", "Did you mean 'sparse'"),
    ("bench decode --batch 4,x", "--batch", "4,x"),
    ("bench decode --format fp3", "--format fp3", "fp8_e4m3fn"),
    ("bench decode --format fp8", "nearest: fp16, fp8_e5m2"),
    ("bench decode --format fp8_e4m3fn:32", "--format fp8_e4m3fn:32", "only FP4 has scales 32"),
    ("bench decode --format fp8_e4m3fn:e4m3", "--format fp8_e4m3fn:e4m3", "only FP4"),
    ("bench decode --format fp4_e2m1:8", "--format fp4_e2m1:8", "16 or 32 channels"),
    ("bench decode --format fp4_e2m1:e4m3+16", "--format fp4_e2m1:e4m3+16", "16+e4m3"),
    ("bench decode --q fp8", "--q must be one of bf16"),
    ("bench decode --on cpu", "--on must be one of gpu"),
    ("bench decode --on gpu,gfx942", "measure in another run"),
    ("bench decode --on gfx942 --samples 3", "--samples does not apply to modelled times"),
    ("bench decode --on gfx942 --peers", "--peers does not apply to modelled times"),
    ("bench prefill --format bf16,fp8_e4m3fnu", "nearest: fp8_e4m3fnuz"),
    ("bench prefill --heads 96", "--heads must be"),
    ("bench sparse --mode fusd", "nearest: fused"),
    ("bench sparse --mode best", "--mode must be"),
    ("bench sparse --tokens 0", "--tokens must be"),
    ("bench sage --qk int2", "nearest: int8"),
    ("bench sage --granularity per_warps", "nearest: per_warp"),
    ("bench sage --granularity per_row", "--granularity must be"),
    ("bench sage --context many", "--context must be"),
    ("bench sge", "Did you mean 'sage'"),
    ("bench cp --heads 96", "--heads must be"),
    ("bench traffic --choices --batch 8", "--batch does not apply with --choices"),
    ("inspect --format bf61", "nearest: bf16"),
    ("inspect --format fp3", "fp3", "fp8_e4m3fn"),
    ("inspect decode --q fp61", "nearest: fp16"),
    ("inspect --kernel nativ", "nearest: native"),
    ("inspect prefil", "Did you mean 'prefill'"),
    ("inspect parse", "Did you mean 'sparse'"),
    ("inspect sparse --case format=fp8_e4m3", "nearest: fp8_e4m3fn"),
    ("inspect --case lens=3 --ratio 4", "--ratio does not apply with --case"),
    ("inspect --case lens=3 --format bf16", "--format does not apply with --case"),
    ("validate --case lens=3 --full", "--full does not apply with --case"),
    ("validate --case lens=3 --seed 1", "--seed does not apply with --case"),
    ("validate sparse --case lens=3 --quick", "--full does not apply with --case"),
    ("probe --list glm-gqa12 --jobs 2", "CONTRACT-SET, --jobs do not apply with --list"),
    ("probe cp --full", "--full does not apply to cp"),
    ("probe glm-gqa12 --ranks 3", "--ranks does not apply to contract sets"),
    ("validate --on gfx942 fp4", "(fp4); options follow the operation: "),
    ("inspect --target gfx942 sage", "(sage); options follow the operation: "),
    ("validate --full sparse", "(sparse); options follow the operation: "),
    ("engines try triton", "ENGINE", "transformers", "triton"),
    ("engines try vllm --cache fp4", "--cache", "ultraquant_4bit"),
    ("accuracy --recipe fp5", "nearest"),
    ("no-such-command", "no-such-command"),
    ("validate --plot plot.jpeg2000", ".png, .svg, .pdf"),
]
# These need torch, or what imports it.
WRONG = [
    ("probe --list --plot x.png", "--plot does not apply with --list"),
    ("validate --on cpu --detect-races", "--detect-races must be with --on gfx942 or gfx950"),
    ("validate --on gfx942,cpu --detect-races", "--detect-races must be with --on gfx942 or gfx950; got cpu"),
    ("validate --case ratio=twelve", "--case ratio must be an integer, got 'twelve'"),
    ("validate prefill --case page=3", "--case a name (page=3)", "nearest: page_size"),
    ("validate sage --case tokens=3", "--case a name (tokens=3)", "q_lens"),
    ("validate sage --case granularity=per_page", "--case granularity must be one of per_tensor"),
    ("bench decode --context 1000 --page-size 64", "--context", "1000", "64"),
    ("bench prefill --new 0", "--new must be"),
    ("bench cp --comm mail", "--comm must be"),
    ("bench cp --gpus 8", "--gpus does not apply without --model"),
    ("bench cp --model --ranks 4", "--ranks does not apply with --model"),
    ("bench cp --model --link ether", "--link must be"),
    ("inspect model --target gfx942 --family nothing", "--family must be one of"),
    ("inspect model --target gfx942 --case nothing:", "--case must begin with decode:"),
    ("inspect model --target gfx942 --peer no-such-file", "--peer no-such-file"),
    ("accuracy --model /no/such/folder", "cannot be loaded"),
    ("report --folder no-such-folder", "--folder must be a folder that exists"),
]


def said(text: str) -> str:
    """A message without the frame around it."""
    return " ".join(text.replace("│", " ").split())


def assert_refused(line: str, *words: str) -> None:
    result = narrowkv(line, ends=2)
    assert result.stdout == ""
    missing = [word for word in words if word not in said(result.stderr)]
    assert not missing, result.stderr


@pytest.mark.parametrize("row", [*MISSPELLED, *WRONG], ids=lambda row: row[0])
def test_what_is_wrong_ends_with_2_and_says_what_is_known(row: tuple[str, ...]) -> None:
    assert_refused(*row)


def test_an_empty_name_is_refused() -> None:
    assert "''" in narrowkv("probe --on cpu --on", "", ends=2).stderr


def test_help_and_misspelled_names_need_neither_torch_nor_triton() -> None:
    """All in one process, whose imports of torch and triton fail."""
    code = """
import json, sys
for name in ("torch", "triton", "numpy", "matplotlib"):
    sys.modules[name] = None
from typer.testing import CliRunner
from narrowkv.cli.app import app
for ends, line in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, line.split())
    assert (result.exit_code, bool(result.stdout)) == (ends, ends == 0), (line, result.output)
"""
    helps = ["--help", "probe --help", "bench decode --help"]
    lines = [*((0, line) for line in helps), *((2, line) for line, *_ in MISSPELLED)]
    python(code, json.dumps(lines))


@pytest.mark.parametrize("group", ["validate", "inspect"])
def test_decode_is_meant_where_no_operation_is_named(group: str) -> None:
    bare, named = (narrowkv(f"{words} --target x --on x", ends=2) for words in (group, f"{group} decode"))
    assert bare.stderr == named.stderr


@pytest.mark.parametrize(
    ("line", "option"),
    [
        *((line, "--out") for line in ("env", "probe", "validate", "inspect", "bench decode")),
        ("bench decode", "--csv"),
        ("bench decode", "--plot"),
        ("accuracy", "--save-calibration"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    line: str, option: str, tmp_path: Path
) -> None:
    begun = time.perf_counter()
    for path in (tmp_path / "missing" / "file.png", tmp_path):
        assert (
            f"{option} must be a file that can be written, got {path}"
            in narrowkv(line, option, path, ends=2).stderr
        )
    assert time.perf_counter() - begun < 5


def test_checking_an_output_file_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    narrowkv("probe no-such-set --out", target, ends=2)
    assert not target.exists()
    target.write_text("kept")
    narrowkv("probe no-such-set --out", target, ends=2)
    assert target.read_text() == "kept"


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("validate --on gpu", torch.__version__),
        ("probe --on gpu", torch.__version__),
        *(
            (f"bench {name}", f"needs a GPU; torch {torch.__version__} sees none. Without one, "
             f"`narrowkv bench {name} --on gfx942,gfx950`")
            for name in ("decode", "prefill", "sparse", "sage", "indexer")
        ),
        ("engines try sglang --model deepseek-v4-tiny", "try it in transformers"),
    ],
)  # fmt: skip
def test_what_this_machine_lacks_ends_with_3_and_says_why(line: str, words: str) -> None:
    result = narrowkv(line, ends=3)
    assert words in said(result.stderr)
    assert "GPU" in result.stderr or "engines" in line


def test_a_missing_engine_matplotlib_or_triton_ends_with_3_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise ModuleNotFoundError("No module named 'vllm'")

    monkeypatch.setattr("narrowkv.cli.serving.try_engine", missing)
    assert "vllm" in narrowkv("engines try vllm", ends=3).stderr
    absent = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(report, "importlib", absent)
    assert "narrowkv-cli[plot]" in narrowkv("bench decode --plot x.png", ends=3).stderr
    code = """
import importlib.abc, sys

class NoTriton(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

sys.meta_path.insert(0, NoTriton())
from narrowkv.cli.app import app
try:
    app(["probe"])
except SystemExit as end:
    assert end.code == 3, end.code
"""
    done = python(code)
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_list_names_every_set() -> None:
    assert [entry["name"] for entry in document("probe --list")["sets"]] == list(contract_sets())


def test_json_is_all_of_stdout_and_out_gets_the_same(tmp_path: Path) -> None:
    target = tmp_path / "env.json"
    result = narrowkv("env --json --out", target)
    found = json.loads(result.stdout)
    assert found == json.loads(target.read_text())
    assert (found["schema_version"], found["command"], found["exit_code"]) == (1, "env", 0)
    assert found["environment"]["torch"]["version"] == torch.__version__
    assert torch.__version__ in result.stderr
    people = narrowkv("env")
    assert torch.__version__ in people.stdout
    assert people.stderr == ""
