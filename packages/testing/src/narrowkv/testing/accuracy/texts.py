"""Texts that every Python carries: the language reference to measure on, library sources to calibrate on."""

from __future__ import annotations

import argparse
import ast
import inspect
import random
import string
import types
import typing

__all__ = ["calibration_text", "evaluation_text", "needle_text", "training_text"]

_SOURCES: tuple[types.ModuleType, ...] = (argparse, typing, ast)


def _topics() -> list[str]:
    from pydoc_data import topics

    return [topics.topics[name] for name in sorted(topics.topics)]


def evaluation_text() -> str:
    """Every second section of Python's language reference, English with short pieces of code."""
    return "\n".join(_topics()[0::2])


def calibration_text() -> str:
    """Sources of the standard library: another kind of text than what is measured on."""
    return "\n".join(inspect.getsource(module) for module in _SOURCES)


def training_text() -> str:
    """The other sections of the language reference, and the calibration text."""
    return "\n".join(_topics()[1::2]) + calibration_text()


def needle_text(filler: str, seed: int, depth: float) -> tuple[str, str]:
    """A text with a fact in it that its end asks for.

    Args:
        filler: the text around the fact.
        seed: of the name and the number.
        depth: where the fact stands, from 0 (the beginning) to 1.

    Returns:
        The text up to the answer, and the answer.

    Example:
        >>> text, answer = needle_text("one. two. three.", 0, 0.5)
        >>> answer in text, text.endswith("is")
        (True, True)
    """
    chosen = random.Random(seed)
    name = "".join(chosen.choices(string.ascii_uppercase, k=4))
    answer = " " + "".join(chosen.choices(string.digits, k=5))
    at = filler.find(" ", int(len(filler) * depth))
    at = len(filler) if at < 0 else at
    fact = f"\nThe secret number of {name} is{answer}.\n"
    return f"{filler[:at]}{fact}{filler[at:]}\nThe secret number of {name} is", answer
