"""Makes the tables of the configurations that operations choose, over a grid of shapes, formats and targets.

    python tools/choices.py    # writes tests/choices/*.txt; their diff is what a change does

tests/test_choices.py compares. Nothing is compiled. The tables are those of Triton 3.8, on which a few
choices depend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import Any

from narrowkv.attn_decode.config import DecodeShape
from narrowkv.attn_decode.config import choose_config as choose_decode
from narrowkv.attn_decode.tiles import MergeTile
from narrowkv.attn_prefill import PrefillShape, plan_append, plan_prefill
from narrowkv.paged_cache import CacheFormat, PagedKVCache
from narrowkv.runtime.launch import LaunchOptions, executing
from narrowkv.runtime.targets import get_target
from narrowkv.sage.config import choose_config as choose_sage
from narrowkv.sparse_fp8 import config as sparse
from narrowkv.sparse_fp8.layouts import LAYOUTS
from narrowkv.testing.calls import LaunchRecorder

CHOICES = Path(__file__).resolve().parent.parent / "tests" / "choices"
TARGETS = ("sm90", "cuda", "gfx90a", "gfx942", "gfx950", "cpu")
# Formats of K and V, and FP4's channels per scale.
_CACHES = (
    ("bf16", "bf16", 0), ("fp8_e4m3fn", "fp8_e4m3fn", 0), ("fp8_e4m3fnuz", "fp8_e4m3fnuz", 0),
    ("fp4_e2m1", "fp4_e2m1", 0), ("fp4_e2m1", "fp4_e2m1", 16), ("fp4_e2m1", "fp4_e2m1", 32),
    ("fp8_e4m3fn", "fp4_e2m1", 0), ("int8", "int8", 0), ("int8", "int4", 0),
)  # fmt: skip
# Query heads, KV heads, head_dim.
_HEADS = ((96, 8, 128), (12, 1, 128), (64, 8, 64), (16, 4, 256), (32, 4, 512))
_BATCHES = tuple(product((1, 4, 16, 64), (1024, 8192, 32768)))  # sequences and keys of each
_CHUNKS = (
    (1, 64, 4096),
    (1, 1024, 1024),
    (1, 1024, 32768),
    (8, 4, 8192),
    (64, 8, 8192),
    (64, 256, 2048),
)  # sequences, new, all

Table = Iterator[tuple[str, str, str]]


def described(config: Any, left_out: tuple[str, ...] = ("why",)) -> str:
    """A configuration in one line: the fields that differ from their defaults."""
    if is_dataclass(config):
        known = [(each.name, each.default, getattr(config, each.name)) for each in fields(config)]
        parts = [
            described(value) if isinstance(value, LaunchOptions) else f"{name}={described(value)}"
            for name, default, value in known
            if name not in left_out and value not in (default, MergeTile())
        ]
        return f"({' '.join(parts)})"
    if isinstance(config, tuple):
        return "[" + " ".join(map(described, config)) + "]"
    return str(config)


def decode() -> Table:
    """Target, format and heads; the call, its splits, m where it merges them; its configuration."""
    for name, (k, v, group), heads, q_len in product(TARGETS, _CACHES, _HEADS, (1, 4)):
        for invariant, (batch, keys) in product((False, True), _BATCHES):
            if invariant and (batch, keys) != (64, 8192):
                continue
            shape = DecodeShape(batch, q_len, *heads, 16, keys)
            config = choose_decode(
                get_target(name), shape, k, v, scale_group=group, batch_invariant=invariant
            )
            title = f"{name} {k}/{v}:{group} {'/'.join(map(str, heads))} q{q_len}"
            merges = "m" if config.merge_in_launch else ""
            call = f"{batch}x{keys}{' invariant' if invariant else ''}:{config.num_items}{merges}"
            yield title, call, described(config, ("num_items", "merge_in_launch", "kernel"))


def prefill() -> Table:
    """The same of prefill and append."""
    caches = [each for each in _CACHES if each[2] == 0 and each[0] != "fp8_e4m3fnuz"]
    for name, (k, v, _), heads, appends in product(TARGETS, caches, _HEADS[::2], (False, True)):
        for batch, new, keys in _CHUNKS:
            qo_heads, kv_heads, head_dim = heads
            shape = PrefillShape(
                batch, batch * new, new, qo_heads, kv_heads, head_dim, 16, keys, batch * keys
            )
            cache = PagedKVCache.empty(1, 16, *heads[1:], format=CacheFormat(k, v))
            with executing(LaunchRecorder(name)):
                plan = (plan_append if appends else plan_prefill)(shape, cache)
            title = f"{name} {k}/{v} {'/'.join(map(str, heads))} {'append' if appends else 'prefill'}"
            yield title, f"{batch}x{new}/{keys}", described(plan.config)


def sparse_attention() -> Table:
    """The same of sparse attention: the portable kernel, and the one for the target's family."""
    rows = (("16bit", ()), *(("fused", (layout,)) for layout in LAYOUTS.values()))
    for name, (kernel, layouts), fp8_qk, fp16 in product(TARGETS, rows, (False, True), (False, True)):
        title = f"{name} {kernel} {' '.join(one.name for one in layouts)}"
        call = f"{' fp8_qk' if fp8_qk else ''}{' fp16' if fp16 else ''}"
        for heads in (8, 16, 32, 64, 128):
            target = get_target(name)
            config = sparse.choose_config(
                target, kernel=kernel, num_heads=heads, fp8_qk=fp8_qk, fp16_query=fp16, layouts=layouts
            )
            yield title, f"{heads}{call}", described(config)
            columns = max((one.head_dim for one in layouts), default=512)
            own = sparse.specialised_config(
                target, kernel=kernel, num_heads=heads, head_dim=columns, layouts=layouts
            )
            if own is not None and not call:
                yield title, f"{heads} own", described(own)


def sage() -> Table:
    """The same of Sage attention."""
    for name, qk, smooth, window in product(TARGETS, ("int8", "int4", "fp8"), (False, True), (False, True)):
        config = choose_sage(get_target(name), qk, smooth_q=smooth, window=window)
        yield name, f"{qk}{' smooth' if smooth else ''}{' window' if window else ''}", described(config)


TABLES: dict[str, Callable[[], Table]] = {
    "decode": decode, "prefill": prefill, "sparse": sparse_attention, "sage": sage,
}  # fmt: skip


def text_of(name: str) -> str:
    """A table as text: under each title the configurations, each followed by the calls that choose it."""
    sections: dict[str, dict[str, list[str]]] = {}
    for title, call, config in TABLES[name]():
        sections.setdefault(title, {}).setdefault(config, []).append(call)
    # Titles with the same configurations share a section.
    alike: dict[str, list[str]] = {}
    for title, configs in sections.items():
        body = "".join(f"  {config}: {', '.join(calls)}\n" for config, calls in configs.items())
        alike.setdefault(body, []).append(title)
    return "\n".join("\n".join(titles) + "\n" + body for body, titles in alike.items())


def main() -> None:
    """Writes the tables."""
    CHOICES.mkdir(exist_ok=True)
    for name in TABLES:
        (CHOICES / f"{name}.txt").write_text(text_of(name))


if __name__ == "__main__":
    main()
