"""A new operation is an entry of the registry and its cases; every command then has it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import toy_operation
import typer
from cli_support import document
from typer.testing import CliRunner, Result

from narrowkv.cli.app_operations import add_operations
from narrowkv.cli.command_line import Commands
from narrowkv.testing import machine_report
from narrowkv.testing.operations import OPERATIONS, contract_sets, families
from narrowkv.testing.words import AMD_TARGETS

Run = Any


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line of a program that knows the toy operation."""
    monkeypatch.setitem(OPERATIONS, "toy", toy_operation.OPERATION)
    program = typer.Typer(cls=Commands, pretty_exceptions_enable=False)
    add_operations(program)

    def run(line: str, ends: int = 0) -> Result:
        result = CliRunner().invoke(program, line.split())
        assert result.exit_code == ends, result.output
        return result

    return run


def test_cases_of_a_new_operation_are_validated(toy: Run) -> None:
    line = json.loads(toy("validate toy --on cpu --jobs 1 --case tokens=7,dtype=bf16 --json").stdout)
    (case,) = line["cases"]
    assert (line["operation"], case["case"], case["passed"]) == ("merge_toys", "tokens=7,dtype=bf16", True)
    assert case["command"].startswith("narrowkv validate toy ")
    assert case["command"].endswith("--case tokens=7,dtype=bf16")
    swept = json.loads(toy("validate toy --on cpu --jobs 1 --seed 3 --json").stdout)
    assert [case["case"] for case in swept["cases"]] == [f"tokens={n},seed=3" for n in (1, 2, 33)]
    assert "--case a name (token=3)" in toy("validate toy --case token=3", ends=2).stderr


def test_options_of_the_bench_of_a_new_operation_come_from_its_fields(toy: Run) -> None:
    said = " ".join(toy("bench toy --help").stdout.split())
    assert all(word in said for word in ("Measure toys.", "--tokens", "16,64", "Of fp32, bf16.", "--samples"))
    assert "--dtype must be one of fp32, bf16; got 'bf61'" in toy("bench toy --dtype bf61", ends=2).stderr
    assert "--tokens must be numbers" in toy("bench toy --tokens 0", ends=2).stderr
    assert "--samples does not apply" in toy("bench toy --on gfx942 --samples 3", ends=2).stderr


def test_shipped_configurations_of_a_new_operation_are_inspected(toy: Run) -> None:
    found = json.loads(toy("inspect toy --target gfx942 --no-model --json").stdout)
    assert [one["case"] for one in found["inspections"]] == ["seed=0", "parts=4"]
    assert {one["kernels"][0]["name"] for one in found["inspections"]} == {"_merge_states_kernel"}


@pytest.mark.usefixtures("toy", "without_gpu")
def test_contracts_and_families_and_the_report_have_a_new_operation() -> None:
    assert list(contract_sets())[-1] == "toy"
    assert "toy" in [one["name"] for one in document("probe --list")["sets"]]
    found = document("probe toy --jobs 1 --target gfx942")
    assert {row["status"] for row in found["rows"]} == {"pass"}
    assert found["emulation"]["samples"] == 1
    assert families("gfx942")["merge of a toy"].operation == "toy"
    lines = machine_report.commands(AMD_TARGETS[0])
    assert "validate toy --on gpu --case tokens=7" in lines
    assert "bench toy --tokens 64 --samples 20" in lines
