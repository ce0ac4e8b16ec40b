"""Refuses misspelled names in options, with the most similar ones, before torch is imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from narrowkv.cli.report import UsageError
from narrowkv.testing.words import CACHE_FORMATS, FP4, SCALE_GROUPS


def unknown(what: str, got: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not one of `known`, with the most similar names."""
    all_known = list(known)
    close = get_close_matches(got.lower(), all_known, n=2, cutoff=0.5)
    hint = f" (nearest: {', '.join(close)})" if close else ""
    return UsageError(f"{what} must be one of {', '.join(all_known)}; got {got!r}{hint}")


def one_of(what: str, got: str, known: Sequence[str]) -> str:
    """`got`, if it is known.

    Raises:
        UsageError: it is not.
    """
    if got not in known:
        raise unknown(what, got, known)
    return got


def choices(option: str, text: str | Iterable[str], known: Sequence[str]) -> list[str]:
    """The known names in a comma-separated text, or in several such texts, without duplicates.

    Raises:
        UsageError: a name is not known, or there is none.
    """
    texts = [text] if isinstance(text, str) else text
    found = dict.fromkeys(name for part in texts for name in part.split(","))
    return [one_of(option, name, known) for name in found]


def _check_cache(text: str) -> None:
    """Checks a cache format: "K" or "K/V", with FP4 also ":CHANNELS", ":e4m3" or ":CHANNELS+e4m3" for scales.

    Raises:
        UsageError: an unknown format, or scales that no FP4 cache has.
    """
    formats, colon, scales = text.partition(":")
    k, slash, v = formats.partition("/")
    k, v = one_of("K's format", k, CACHE_FORMATS), v if slash else k
    one_of("V's format", v, CACHE_FORMATS)
    if not colon:
        return
    groups = list(map(str, SCALE_GROUPS))
    if scales not in [*groups, "e4m3", *(f"{group}+e4m3" for group in groups)]:
        raise UsageError(
            "FP4 has one scale a head or, after a colon, one per "
            f"{' or '.join(groups)} channels; e4m3 or {groups[0]}+e4m3 stores it so; got {scales!r}"
        )
    if FP4 not in (k, v):
        raise UsageError(f"only FP4 has scales {scales}; got {formats}")


def cache_formats(option: str, text: str) -> list[str]:
    """Cache formats joined by commas.

    Raises:
        UsageError: one is none, or there is none.
    """
    found = text.split(",")
    for name in found:
        _check_format(option, name)
    return found


def _check_format(option: str, name: str) -> None:
    try:
        _check_cache(name)
    except UsageError as error:
        raise UsageError(f"{option} {name}: {error}") from None


def check_case_formats(lines: Iterable[str]) -> None:
    """Refuses a --case line with a misspelled format; the rest is checked after torch is imported.

    Raises:
        UsageError: naming the part.
    """
    for line in lines:
        for part in line.split(","):
            name, _, value = part.partition("=")
            if name == "format":
                _check_format("--case format", value)
