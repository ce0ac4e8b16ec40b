"""Cases: one call of an operation as a frozen dataclass, as tensors, and as a line of text.

Each module here has a dataclass for an operation: its fields say the sizes, formats and options of a
call, and `inputs` makes the tensors. Tests, `narrowkv validate`, `probe` and `bench` use the same cases. The
line names what is not the default, such as `ratio=17,page_size=7,lens=33+0+130`.

Example:
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Case:
    ...     lens: tuple[int, ...] = (64,)
    ...     gqa_ratio: int = named(12, "ratio")
    ...     causal: bool = False
    >>> spell_case(Case(lens=(33, 0), causal=True))
    'lens=33+0,causal=1'
    >>> parse_case(Case, "ratio=17")
    Case(lens=(64,), gqa_ratio=17, causal=False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, field, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch

__all__ = [
    "Case", "CaseError", "Inputs", "each_alone", "named", "parse_case", "spell_case", "sweep_of", "unknown",
    "word_of",
]  # fmt: skip

_Case = TypeVar("_Case")
_EXPECTED = {int: "an integer", float: "a number", bool: "0 or 1"}
Results: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


class CaseError(ValueError):
    """A line is no case, or the fields of a case do not go together."""


class Inputs(Protocol):
    """The tensors of a case, and how the operation is called with them."""

    def call(self) -> Results:
        """Runs the operation: `(o, lse)`."""

    def prepare(self) -> Callable[[], torch.Tensor]:
        """Does the host's work once; the call that it returns gives `o`, and a graph can capture it."""

    def reference(self) -> Results:
        """`(o, lse)` in fp32, from the numbers that the operation reads."""

    def bytes_per_token(self) -> float | None:
        """Bytes of K and V that a token takes over all heads, or of a row; None without a cache."""
        return None

    def wrong_bytes(self) -> str:
        """After `call` and `reference`: which stored bytes are wrong; empty if all are right."""
        return ""  # an operation that stores only its outputs

    def exact(self) -> torch.Tensor | None:
        """`o` in fp32 from the tensors before quantisation; None if the operation does not quantise them."""
        return None

    def lse_slack(self) -> float:
        """After `call`: the error of lse that the target's own sums add to the case's bound."""
        return 0.0


class Case(Protocol):
    """One call of an operation."""

    @property
    def bound(self) -> float:
        """The largest relative L1 error that passes."""

    @property
    def lse_bound(self) -> float:
        """The largest difference of lse that passes."""

    @property
    def kind(self) -> tuple[str, str]:
        """For tables: the format of the query, and that of the keys and values."""

    @property
    def published(self) -> tuple[float, float, float] | None:
        """Published cosine similarity, relative L1 and RMSE against `Inputs.exact`; None without any."""
        return None

    def inputs(self, device: str = "cpu") -> Inputs:
        """The tensors, made on the CPU, so that every device gets the same numbers."""

    def __str__(self) -> str:
        return spell_case(self)


def named(
    default: Any,
    name: str = "",
    words: Mapping[str, Any] | Iterable[str] = (),
    *,
    kind: type | None = None,
    read: Callable[[str], Any] | None = None,
    spell: Callable[[Any], str] = str,
) -> Any:
    """A field of a case.

    Args:
        default: of the field; a line leaves it out.
        name: of the field in a line; without one, its own.
        words: the words that a line may contain: a literal value, or the name of a value.
        kind: of the values; without one, the type of `default`.
        read: makes a value of a line's text; without it, `kind`.
        spell: the text of a value.
    """
    known = words if isinstance(words, Mapping) else {word: word for word in words}
    metadata = {"name": name, "words": known, "kind": kind or type(default), "read": read, "spell": spell}
    return field(default=default, metadata=metadata)


def spell_case(case: Any) -> str:
    """The line of a case: `name=value` pairs of what is not the default, joined by commas."""
    changed = (f for f in fields(case) if getattr(case, f.name) != f.default)
    return ",".join(f"{_name(f)}={_spell(f, getattr(case, f.name))}" for f in changed) or "seed=0"


def parse_case(kind: type[_Case], line: str) -> _Case:
    """The case that `spell_case` spelled.

    Raises:
        CaseError: naming the part that is wrong and what is known.
    """
    known = {_name(f): f for f in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for part in filter(None, line.split(",")):
        name, equals, text = part.partition("=")
        if not equals:
            raise CaseError(f"must be name=value pairs of {', '.join(known)}; got {part!r}")
        if name not in known:
            raise unknown(f"a name ({part})", name, known)
        values[known[name].name] = _read(known[name], text)
    return kind(**values)


def word_of(case: Any, name: str) -> str:
    """The text of one field's value, as the case's line has it."""
    (found,) = (f for f in fields(case) if f.name == name)
    return _spell(found, getattr(case, name))


def each_alone(base: _Case, axes: Mapping[str, Iterable[Any]]) -> Iterator[_Case]:
    """Cases that differ from `base` in one value of one axis."""
    for name, values in axes.items():
        for value in values:
            if value != getattr(base, name):
                yield replace(base, **{name: value})  # type: ignore[type-var]


def sweep_of(
    quick: Callable[[], Iterable[_Case]], full: Callable[[], Iterable[_Case]]
) -> Callable[..., list[_Case]]:
    """A `narrowkv.testing.operation.Cases.sweep` that is the same on every target and with every seed."""

    def sweep(target: object = None, everything: bool = False, seed: int = 0) -> list[_Case]:
        """The quick cases, and with `everything` the full ones, each once."""
        return list(dict.fromkeys([*quick(), *(full() if everything else ())]))

    return sweep


def unknown(what: str, got: str, known: Iterable[str]) -> CaseError:
    """The error for a name that is not one of `known`, with the most similar names."""
    all_known = list(known)
    close = get_close_matches(got.lower(), all_known, n=2, cutoff=0.5)
    hint = f" (nearest: {', '.join(close)})" if close else ""
    words = ", ".join(word or "empty" for word in all_known)
    return CaseError(f"{what} must be one of {words}; got {got!r}{hint}")


def _name(f: Field[Any]) -> str:
    return f.metadata.get("name") or f.name


def _spell(f: Field[Any], value: Any) -> str:
    for word, meaning in f.metadata.get("words", {}).items():
        if value == meaning:
            return str(word)
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else f.metadata.get("spell", str)(value)


def _read(f: Field[Any], text: str) -> Any:
    words = f.metadata.get("words")
    kind: Any = f.metadata.get("kind") or type(f.default)
    if words:
        if text not in words:
            raise unknown(_name(f), text, words)
        return words[text]
    if kind is tuple:
        parts = text.split("+") if text else []
        if not all(part.isdecimal() for part in parts):
            raise CaseError(f"{_name(f)} must be numbers joined by '+', got {text!r}")
        return tuple(map(int, parts))
    if (read := f.metadata.get("read")) is not None:
        return read(text)
    try:
        return bool(int(text)) if kind is bool else kind(text)
    except ValueError:
        raise CaseError(f"{_name(f)} must be {_EXPECTED.get(kind, kind.__name__)}, got {text!r}") from None
