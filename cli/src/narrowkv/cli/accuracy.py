"""`narrowkv accuracy`: shows what cache recipes cost a language model."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowkv.cli.report import ExitCode, Report, Sheet, UnsupportedHereError, UsageError, keys, numbers
from narrowkv.testing.accuracy.evaluate import Score, Statistics, collect, frontier, measure, statistics_of
from narrowkv.testing.accuracy.models import (
    LanguageModel,
    TinySizes,
    calibration_text,
    evaluation_text,
    load_model,
    train_tiny,
)
from narrowkv.testing.machine import versions
from narrowkv.testing.recipes import REFERENCE, find_recipes

# Bound on KL between 16-bit kernels and the same attention in float32, in a model that computes in bf16.
_BOUND = 0.02
_CALIBRATION_TOKENS = 1024


def _load(name: str) -> LanguageModel:
    try:
        return load_model(name)
    except ImportError as error:
        raise UnsupportedHereError(str(error)) from None
    except OSError as error:
        raise UsageError(f"--model {name} cannot be loaded: {error}") from None


def measure_model(
    report: Report, name: str, recipes: Sequence[str], *, tokens: int, context: int, needles: int,
    calibration: Path | None,
) -> ExitCode:  # fmt: skip
    """Measures and shows the recipes; 16-bit kernels that differ from plain attention are a failure."""
    model = _load(name)
    samples = collect(model, _CALIBRATION_TOKENS)
    chosen = find_recipes(recipes)
    if calibration is not None:
        (recommended,) = find_recipes(["fp4-e4m3"])[1:]
        found = recommended.calibration(samples.values())
        assert found is not None
        found.save(calibration)
        report.note(f"{calibration} has the calibration of {recommended.name}")
    sequences = -(-tokens // context) + needles
    with report.progress(sequences * len(chosen), "measuring") as bar:
        try:
            scores = measure(
                model, chosen, tokens=tokens, context=context, needles=needles, samples=samples,
                progress=bar.advance,
            )  # fmt: skip
        except ValueError as error:
            raise UsageError(str(error)) from None
    made = statistics_of(samples)
    best = frontier(scores)
    _show(report, model, scores, made, best)
    rows = [{**dataclasses.asdict(score), "frontier": score.recipe in best} for score in scores]
    failed = any(s.recipe == REFERENCE.name and s.ran == "kernels" and not s.kl < _BOUND for s in scores)
    body = {
        "model": name,
        "head_dim": model.head_dim,
        "device": str(model.device),
        "tokens": tokens,
        "context": context,
        "texts": {
            kind: hashlib.sha256(text.encode()).hexdigest()[:16]
            for kind, text in (("evaluation", evaluation_text()), ("calibration", calibration_text()))
        },
        "versions": versions(),
        "statistics": made,
        "recipes": rows,
    }

    def plot(path: Path) -> None:
        from narrowkv.testing.plot import plot_frontier

        points = [(s.recipe, s.bits, s.kl, s.recipe in best) for s in scores if s.kl > 0]
        plot_frontier(points, path, title=f"{name}: what a cache recipe costs, {tokens} tokens")

    code = ExitCode.NUMERICAL if failed else ExitCode.OK
    return report.finish(body, code, interrupted=len(scores) < len(chosen), rows=rows, plot=plot)


def _show(
    report: Report, model: LanguageModel, scores: Sequence[Score], made: Statistics, best: set[str]
) -> None:
    report.say(
        f"{model.name} on {model.device}: KL per token against a 16-bit cache, {scores[0].tokens} predictions"
    )
    if all(score.ran == "torch" for score in scores):
        report.say("the bytes that append stores, dequantised and attended in torch: no kernel ran")
    columns = ["bits", "KL", "perplexity", "change", "same next token"]
    asked = scores[0].needles > 0
    sheet = Sheet(
        [*keys("recipe"), *numbers(*columns, *(["retrieved"] if asked else [])), *keys("ran", "frontier", "")]
    )
    for s in scores:
        found = [f"{s.retrieved}/{s.needles}"] if asked else []
        sheet.add(
            s.recipe, f"{s.bits:.2f}", f"{s.kl:.4f}", f"{s.perplexity:.3f}", f"{s.perplexity_change:+.1%}",
            f"{s.agreement:.1%}", *found, s.ran, "yes" if s.recipe in best else "", s.note,
        )  # fmt: skip
    report.show(sheet)
    about = (
        ("largest channel of K over the median channel", made.k_outlier),
        ("largest channel of V over the median channel", made.v_outlier),
        ("largest |mean| over standard deviation of a channel of K", made.k_bias),
        ("norm of the first token's key over the median key's", made.k_first),
    )
    for what, (median, largest) in about:
        report.say(f"{what}: median of heads {median:.1f}, largest {largest:.1f}")


def train(report: Report, folder: Path, *, steps: int, context: int, seed: int) -> ExitCode:
    """Trains the small model and keeps it in a folder for `--model`."""
    sizes = TinySizes(steps=steps, context=context)
    losses: dict[int, float] = {}
    with report.progress(steps, "training") as bar:

        def progress(step: int, loss: float) -> None:
            if loss == loss:
                losses[step] = loss
            bar.advance(f"loss {list(losses.values())[-1]:.3f}")

        model = train_tiny(sizes, seed=seed, progress=progress)
    model.model.save_pretrained(folder)
    last = list(losses.values())[-1]
    report.say(f"loss {last:.3f} nats a byte; next: narrowkv accuracy --model {folder}")
    body: dict[str, Any] = {"sizes": sizes, "seed": seed, "losses": losses, "versions": versions()}
    return report.finish(body, ExitCode.OK)
