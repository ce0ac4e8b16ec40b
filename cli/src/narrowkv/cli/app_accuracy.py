"""The commands `narrowkv accuracy`; each imports its work when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowkv.cli.command_line import MeasureByDefault, command
from narrowkv.cli.names import choices
from narrowkv.cli.options import listed
from narrowkv.cli.report import ExitCode, Report, check_writable
from narrowkv.testing.words import ACCURACY_RECIPES

accuracy = typer.Typer(cls=MeasureByDefault)


@command(accuracy, "measure", title="accuracy", files=("out", "csv", "plot"))
def accuracy_measure(
    report: Report,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="smollm2, or a folder or name that transformers' from_pretrained takes."
        ),
    ] = "smollm2",
    recipe: Annotated[str, listed("Recipes joined by commas; default all.", *ACCURACY_RECIPES)] = "",
    tokens: Annotated[int, typer.Option(min=2, help="Of the text.")] = 1024,
    context: Annotated[int, typer.Option(min=2, help="Tokens of each sequence.")] = 1024,
    needles: Annotated[int, typer.Option(min=0, help="Sequences with a fact that is asked for.")] = 0,
    save_calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the model's calibration, for NarrowCache (.npz)."),
    ] = None,
) -> ExitCode:
    """Measure perplexity, KL per token against a 16-bit cache, agreement and retrieval with each recipe.

    On a GPU through the kernels; on a CPU with the same bytes dequantised and attended in torch.
    """
    names = choices("--recipe", recipe, ACCURACY_RECIPES) if recipe else []
    check_writable("--save-calibration", save_calibration)
    from narrowkv.cli.accuracy import measure_model

    return measure_model(
        report, model, names, tokens=tokens, context=context, needles=needles, calibration=save_calibration
    )


@command(accuracy, "train-tiny", title="accuracy train-tiny", files=("out",))
def accuracy_train_tiny(
    report: Report,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model goes.")],
    steps: Annotated[int, typer.Option(min=1, help="Of the training.")] = 1500,
    context: Annotated[int, typer.Option(min=128, help="Tokens (bytes) of a sequence.")] = 4096,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
) -> ExitCode:
    """Train a small model with grouped queries, RoPE and a long context on text that Python ships."""
    from narrowkv.cli.accuracy import train

    return train(report, folder, steps=steps, context=context, seed=seed)
