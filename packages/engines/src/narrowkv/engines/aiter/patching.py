"""Lets the functions stand in for AITER's own where those refuse a call or are known to be wrong."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from narrowkv.engines.aiter import functions, indexer
from narrowkv.engines.versions import EngineVersionError
from narrowkv.runtime.errors import UnsupportedError

__all__ = ["AITER_GQA_RATIOS", "patch"]

# GQA ratios that AITER's paged attention is tuned and tested for; others fail there, some of them silently.
AITER_GQA_RATIOS = (1, 2, 4, 8, 16)
# Where AITER keeps each function, where it looks it up again, and the arguments that hold queries and keys.
_PLACES = {
    "mha_batch_prefill_func": (("aiter.ops.mha", "aiter"), "q", "k"),
    "unified_attention": (("aiter.ops.triton.attention.unified_attention",), "q", "k"),
    "paged_attention_ragged": (("aiter.ops.attention", "aiter"), "query", "key_cache"),
    "paged_attention_v1": (("aiter.ops.attention", "aiter"), "query", "key_cache"),
}
# The same of the indexer, which is AITER's own unless every call is to go to narrowkv.
_INDEXER_PLACES = {
    "fp8_mqa_logits": (("aiter.ops.triton.attention.fp8_mqa_logits",), "Q", "KV"),
    "deepgemm_fp8_paged_mqa_logits": (("aiter.ops.triton.attention.pa_mqa_logits",), "q_fp8", "kv_cache"),
}
_announced: set[tuple[str, str]] = set()


def patch(*, everything: bool = False) -> Callable[[], None]:
    """Lets narrowkv stand in for AITER's functions where AITER is known to refuse or to be wrong.

    That is a GQA ratio other than 1, 2, 4, 8 and 16, and 16-bit queries over an FP8 cache in
    `mha_batch_prefill_func`. A warning says so, once for each function and reason. Modules that imported
    AITER's functions before keep them: patch first. Parameters that AITER has added since go to AITER
    with the calls that narrowkv leaves to it; the others refuse them.

    Args:
        everything: every call goes to narrowkv, those of the indexer, too.

    Returns:
        A function that puts AITER's functions back.

    Raises:
        ImportError: AITER is not installed.
        EngineVersionError: AITER has moved its functions; nothing is replaced then.
    """
    put_back: list[tuple[Any, str, Any]] = []
    replaced = _PLACES | _INDEXER_PLACES if everything else _PLACES
    places = {path: _import(path) for modules, _, _ in replaced.values() for path in modules}
    for name, (modules, query, key) in replaced.items():
        own = getattr(indexer if name in _INDEXER_PLACES else functions, name)
        for path in modules:
            module = places[path]
            theirs = getattr(module, name, None)
            if theirs is None:
                continue
            put_back.append((module, name, theirs))
            setattr(module, name, _standing_in(name, own, theirs, query, key, everything))

    def undo() -> None:
        for module, name, theirs in put_back:
            setattr(module, name, theirs)

    return undo


def _import(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name == "aiter" or not path.startswith(error.name or "?"):
            raise
        raise EngineVersionError(
            f"narrowkv's patch does not fit this aiter, which has no {error.name}: it knows commit e4048607",
            name=error.name,
        ) from error


def _standing_in(
    name: str, own: Callable[..., Any], theirs: Callable[..., Any], query: str, key: str, everything: bool
) -> Callable[..., Any]:
    parameters = list(inspect.signature(own).parameters)

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        # AITER may have added parameters since, at the end or by name: they are not bound to narrowkv's.
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        reason = None
        if name in _PLACES and query in given and key in given:
            reason = _known_refusal(name, given[query], given[key], given)
        if reason is None and not everything:
            return theirs(*args, **kwargs)
        reason = reason or "patch(everything=True)"
        added = sorted(kwargs.keys() - set(parameters)) + ["by position"] * (len(args) > len(parameters))
        if added:
            raise UnsupportedError(
                f"narrowkv stands in for aiter's {name} ({reason}) and knows its parameters of August 2026, "
                f"got others too ({', '.join(added)}): leave them out, or call what patch() returned"
            )
        if (name, reason) not in _announced:
            _announced.add((name, reason))
            warnings.warn(f"narrowkv stands in for aiter's {name}: {reason}", stacklevel=2)
        return own(*args, **kwargs)

    return call


def _known_refusal(name: str, q: torch.Tensor, k: torch.Tensor, given: dict[str, Any]) -> str | None:
    heads_first = k.dim() == 5 or given.get("kv_cache_layout") == "HND"
    ratio = q.shape[1] // k.shape[1 if heads_first or k.dim() == 3 else 2]
    if ratio not in AITER_GQA_RATIOS:
        return f"a GQA ratio of {ratio}"
    if name == "mha_batch_prefill_func" and q.element_size() == 2 and k.element_size() == 1:
        return "16-bit queries over an FP8 cache"
    return None
