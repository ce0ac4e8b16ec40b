"""Draws the plots and writes the tables of the documentation from the JSON files in benchmarks/results/.

Called by `make results`. Standard library and narrowkv only. Plots go to docs/images/*.svg; a table goes
between the comments `<!-- table NAME -->` and `<!-- end -->` of docs/*.md, and a program of examples/ between
`<!-- program NAME -->` and `<!-- end -->`. With --check nothing is written, and the exit code is 1 if
anything would change.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

from narrowkv.cdna_emulator.matrix import MatrixShape
from narrowkv.cdna_emulator.timing.machine import MACHINES, Machine
from narrowkv.cdna_emulator.wait_states import matrix_clocks

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"

Row = dict[str, Any]
# Okabe and Ito's colours, which colour-blind readers can tell apart; every bar also has its name beside it.
BLUE, ORANGE, GREEN, GREY, RED = "#0072b2", "#e69f00", "#009e73", "#8c8c8c", "#d55e00"
WIDTH, NAMES, VALUES, BAR, GAP = 480, 182, 104, 20, 5  # pixels of the view box
FONT = "font-family='-apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif'"


@dataclass(frozen=True)
class Bar:
    """One bar: what it is, how long it is, what is written behind it."""

    name: str
    value: float
    text: str
    color: str


@dataclass(frozen=True)
class Group:
    """Bars under one heading."""

    heading: str
    bars: list[Bar]


@dataclass(frozen=True)
class Chart:
    """Horizontal bars on one scale that begins at zero; `mark` draws a line at a value."""

    title: str
    subtitle: list[str]
    groups: list[Group]
    mark: tuple[float, str] | None = None


def load(name: str) -> Row:
    """One results file."""
    found: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def rows(name: str, **wanted: object) -> Iterator[Row]:
    """The rows of a results file that have the given values."""
    for row in load(name)["rows"]:
        if all(row.get(key) == value for key, value in wanted.items()):
            yield row


def one(name: str, **wanted: object) -> Row:
    """The one row of a results file that has the given values."""
    (row,) = rows(name, **wanted)
    return row


def text(
    x: float, y: float, content: str, *, size: int = 14, weight: str = "normal", anchor: str = "start"
) -> str:
    """An SVG text element."""
    return (
        f"<text x='{x:g}' y='{y:g}' font-size='{size}' font-weight='{weight}' text-anchor='{anchor}' "
        f"fill='#1a1a1a' stroke='#ffffff' stroke-width='3' paint-order='stroke'>"
        f"{escape(content, quote=False)}</text>"
    )


def draw_chart(chart: Chart, top: float) -> tuple[list[str], float]:
    """The SVG elements of a chart that begins at `top`, and where it ends."""
    y = top + 22
    parts = [text(6, y, chart.title, size=17, weight="bold")]
    for line in chart.subtitle:
        y += 18
        parts.append(text(6, y, line, size=13))
    y += 8
    longest = max(bar.value for group in chart.groups for bar in group.bars)
    scale = (WIDTH - NAMES - VALUES) / longest
    begin = y + (18 if chart.mark else 0)
    y = begin
    bars: list[str] = []
    for group in chart.groups:
        if group.heading:
            y += 20
            bars.append(text(6, y, group.heading, size=14, weight="bold"))
            y += 4
        for bar in group.bars:
            y += GAP
            length = max(bar.value * scale, 1)
            bars.append(
                f"<rect x='{NAMES}' y='{y:g}' width='{length:.1f}' height='{BAR}' fill='{bar.color}'/>"
            )
            bars.append(text(NAMES - 8, y + 15, bar.name, anchor="end"))
            bars.append(text(NAMES + length + 6, y + 15, bar.text))
            y += BAR
        y += 4
    if chart.mark:
        x = NAMES + chart.mark[0] * scale
        parts.append(text(x, begin - 2, chart.mark[1], size=13, anchor="middle"))
        parts.append(
            f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{begin + 2:g}' y2='{y:g}' "
            "stroke='#555' stroke-dasharray='4 3'/>"
        )
    return [*parts, *bars], y + 10


def draw(*charts: Chart) -> str:
    """An SVG document of charts, one under the other, on a white ground."""
    parts: list[str] = []
    y = 4.0
    for chart in charts:
        drawn, y = draw_chart(chart, y)
        parts += drawn
    title = escape("; ".join(chart.title for chart in charts), quote=False)
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {y:g}' width='{WIDTH}' "
            f"{FONT} role='img'>",
            f"<title>{title}</title>",
            f"<rect width='{WIDTH}' height='{y:g}' fill='#ffffff'/>",
            *parts,
            "</svg>",
            "",
        ]
    )


PEERS = {
    "flashinfer fa2": "FlashInfer fa2",
    "aiter triton": "AITER (Triton)",
    "vllm triton": "vLLM (Triton)",
    "flashinfer xqa": "XQA, FP8 maths",
}


def times(value: float) -> str:
    """A ratio as it is written behind a bar."""
    return f"{value:.2f} x"


def over_floor(name: str, row: Row, color: str) -> Bar:
    """A bar of a row's time over the floor."""
    return Bar(name, row["ratio_to_floor"], times(row["ratio_to_floor"]), color)


def against_peers() -> Chart:
    """Decode over one shape: narrowkv's caches and other libraries."""
    shape = {"batch": 128, "context": 32768, "page_size": 16}
    fp8 = one("decode-h100", format="fp8_e4m3fn", **shape)
    bf16 = one("decode-h100", format="bf16", **shape)["median_us"] / fp8["floor_us"]
    fp4 = one("decode-fp4-h100", format="fp4_e2m1", **shape)["ratio_to_fp8"] * fp8["ratio_to_floor"]
    bars = [
        Bar("narrowkv, FP4 cache *", fp4, times(fp4), GREEN),
        over_floor("narrowkv, FP8 cache", fp8, BLUE),
        *(
            over_floor(f"{PEERS[row['backend']]}, FP8", row, GREY)
            for row in rows("decode-peers-h100", exact=True, **shape)
        ),
        Bar("narrowkv, bf16 cache", bf16, times(bf16), ORANGE),
    ]
    return Chart(
        "Decode time on an H100",
        [
            "96 query heads over 8 KV heads, bf16 queries, batch 128, context 32768,",
            "page 16. 1.0: reading the FP8 cache once at the measured bandwidth.",
            "* its ratio to the FP8 cache is of another run",
        ],
        [Group("", bars)],
        mark=(1.0, "floor of an FP8 cache"),
    )


CAPACITIES = {
    "bf16": ("bf16", None, ORANGE),
    "FP8": ("fp8_e4m3fn", None, BLUE),
    "FP8 keys, FP4 values": ("fp8_e4m3fn/fp4_e2m1", None, GREEN),
    "FP4, a scale per 32": ("fp4_e2m1", 32, GREEN),
    "FP4, a scale per head": ("fp4_e2m1", None, GREEN),
}


def capacity_rows() -> list[Row]:
    """Bytes a token and tokens per GiB of each format, as the cache class says."""
    from narrowkv.paged_cache import CacheFormat, PagedKVCache

    found = []
    for name, (format, group, color) in CAPACITIES.items():
        parsed = CacheFormat(*format.split("/")) if "/" in format else format
        cache = PagedKVCache.empty(1, 16, 8, 128, format=parsed, scale_group=group)
        found.append(
            {"name": name, "bytes": cache.bytes_per_token(), "tokens": cache.tokens_per_gib(), "color": color}
        )
    return found


def capacity() -> Chart:
    """Tokens per GiB of each format."""
    found = capacity_rows()
    base = found[0]["tokens"]
    bars = [
        Bar(
            row["name"],
            row["tokens"],
            f"{row['tokens'] // 1000}k, {row['tokens'] / base:.1f} x",
            row["color"],
        )
        for row in found
    ]
    return Chart(
        "Tokens per GiB of cache, one layer",
        ["8 KV heads, head_dim 128 (GLM-4.5-Air); scales included."],
        [Group("", bars)],
    )


def decode_by_shape() -> Chart:
    """Decode over an FP8 cache against other libraries, by shape."""
    groups = []
    for shape in ((64, 8192), (128, 32768)):
        where = {"batch": shape[0], "context": shape[1], "page_size": 16}
        bars = [over_floor("narrowkv", one("decode-h100", format="fp8_e4m3fn", ratio=12, **where), BLUE)]
        for row in rows("decode-peers-h100", **where):
            bars.append(over_floor(PEERS[row["backend"]], row, GREY if row["exact"] else RED))
        groups.append(Group(f"batch {shape[0]}, context {shape[1]}", bars))
    return Chart(
        "FP8 decode, H100: time over the floor",
        [
            "Page 16, 96 query heads over 8 KV heads, bf16 queries.",
            "FlashInfer XQA casts queries and probabilities to FP8.",
        ],
        groups,
        mark=(1.0, "floor"),
    )


def fp4_against_fp8() -> Chart:
    """FP4 and mixed caches against FP8, by shape."""
    groups = []
    for batch, context in ((64, 8192), (64, 32768), (128, 8192), (128, 32768)):
        bars = []
        for format, name, color in (
            ("fp8_e4m3fn", "FP8", BLUE),
            ("fp8_e4m3fn/fp4_e2m1", "FP8 keys, FP4 values", ORANGE),
            ("fp4_e2m1", "FP4", GREEN),
        ):
            row = one("decode-fp4-h100", batch=batch, context=context, page_size=16, format=format)
            bars.append(
                Bar(name, row["ratio_to_fp8"], f"{row['ratio_to_fp8']:.2f}, {row['median_us']:.0f} us", color)
            )
        groups.append(Group(f"batch {batch}, context {context}", bars))
    return Chart(
        "Decode time over that of an FP8 cache, H100", ["Page 16, one FP4 scale a position and head."], groups
    )


def prefill() -> Chart:
    """Prefill over an FP8 cache against gathering, dequantising and SDPA."""
    groups = []
    for new, prefix in ((1024, 0), (1024, 4096), (1024, 32768), (4096, 0), (4096, 4096), (4096, 32768)):
        row = one("prefill-h200", format="fp8_e4m3fn", heads="96/8", new_tokens=new, prefix=prefix)
        sdpa = row["sdpa_us"] / row["median_us"] * row["ratio_to_floor"]
        bars = [over_floor("narrowkv", row, BLUE), Bar("dequantise + SDPA", sdpa, times(sdpa), GREY)]
        groups.append(Group(f"{new} new tokens over {prefix}", bars))
    return Chart(
        "FP8 prefill, H200: time over the floor",
        ["96 query heads over 8 KV heads, causal, bf16 queries."],
        groups,
        mark=(1.0, "floor"),
    )


def sparse() -> Chart:
    """DeepSeek-V4 sparse prefill by mode."""
    groups = []
    for heads, topk in ((16, 512), (16, 2048), (64, 512), (64, 2048), (128, 512), (128, 2048)):
        bars = [
            over_floor(mode, one("sparse-h200", tokens=4096, heads=heads, topk=topk, mode=mode), color)
            for mode, color in (("bf16", ORANGE), ("prepass", GREY), ("fused", BLUE))
        ]
        groups.append(Group(f"{heads} heads, top-k {topk}", bars))
    return Chart(
        "Sparse prefill, H200: time over the floor",
        ["4096 tokens. bf16: 16-bit rows; prepass, fused: FP8 rows."],
        groups,
        mark=(1.0, "floor"),
    )


def sage() -> Chart:
    """Sage attention against torch SDPA."""
    groups = []
    names = {"per_thread": BLUE, "per_thread, K and V quantised before": GREEN, "torch SDPA bf16": GREY}
    for tokens, mask in ((16384, "full"), (16384, "causal"), (4096, "full"), (4096, "causal")):
        base = one("sage-h200", tokens=tokens, mask=mask, kernel="torch SDPA bf16")["median_ms"]
        bars = []
        for kernel, color in names.items():
            value = one("sage-h200", tokens=tokens, mask=mask, kernel=kernel)["median_ms"]
            label = {"per_thread": "int8", "torch SDPA bf16": "torch SDPA, bf16"}.get(
                kernel, "int8, K and V ready"
            )
            bars.append(Bar(label, value / base, f"{value / base:.2f}, {value:.2f} ms", color))
        groups.append(Group(f"{tokens} tokens, {mask}", bars))
    return Chart("Sage attention over torch SDPA, H200", ["Batch 2, 32 heads, head_dim 128."], groups)


def accuracy() -> Chart:
    """KL of each recipe on SmolLM2, by bits."""
    found = [row for row in load("accuracy-smollm2")["recipes"] if row["kl"] > 0]
    groups = []
    for bits in sorted({round(row["bits"]) for row in found}, reverse=True):
        bars = [
            Bar(
                row["recipe"],
                row["kl"],
                f"{row['kl']:.4f}, {row['bits']:.2f} bits",
                GREEN if row["frontier"] else GREY,
            )
            for row in sorted(found, key=lambda row: -row["kl"])
            if round(row["bits"]) == bits
        ]
        groups.append(Group(f"about {bits} bits an element", bars))
    return Chart(
        "KL against a bf16 cache, SmolLM2-135M", ["Nats a token. Green: no recipe has less of both."], groups
    )


# Caches of `benchmarks/engines_transformers.py`.
GENERATED = {
    "dynamic-sdpa": ("DynamicCache, SDPA", ORANGE),
    "dynamic-sdpa-flash": ("DynamicCache, torch flash", RED),
    "dynamic-flash": ("DynamicCache, flash", RED),
    "static-sdpa": ("StaticCache, SDPA", GREY),
    "static-narrowkv": ("StaticCache, narrowkv", RED),
    "fp8": ("narrowkv, FP8", BLUE),
    "k8v4": ("narrowkv, K8V4", GREEN),
    "fp4": ("narrowkv, FP4", GREEN),
}


def generate_cells(name: str) -> dict[tuple[int, int], dict[str, Row]]:
    """The rows of a file by batch and context, then by cache."""
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for row in sorted(rows(name), key=lambda row: (row.get("batch", 0), row.get("context", 0))):
        if "batch" in row:
            found.setdefault((row["batch"], row["context"]), {})[row["cache"]] = row
    return found


def generate(name: str) -> list[Chart]:
    """Generation in transformers: tokens a second beside a DynamicCache, and memory of the largest batch."""
    cells = generate_cells(name)
    # torch's own choice of a kernel depends on the GPU, so its flash kernel is the measure where it ran.
    names = {row["cache"] for row in rows(name) if "step_ms" in row}
    measure = "dynamic-sdpa-flash" if "dynamic-sdpa-flash" in names else "dynamic-sdpa"
    model = wrap(", ".join(load(name)["shape"].split(", ")[:3]), 66)
    speed, memory = [], []
    for (batch, context), found in cells.items():
        measured = {cache: row for cache, row in found.items() if "step_ms" in row and cache in GENERATED}
        heading = f"batch {batch}, context {context}"
        if base := measured.get(measure):
            bars = []
            for cache, row in measured.items():
                ratio = row["tokens_per_s"] / base["tokens_per_s"]
                bars.append(Bar(GENERATED[cache][0], ratio, times(ratio), GENERATED[cache][1]))
            speed.append(Group(heading, bars))
        if batch == max(cells)[0] and measured:
            memory.append(Group(heading, [
                Bar(GENERATED[cache][0], row["peak_gib"], f"{row['peak_gib']:.1f} GiB", GENERATED[cache][1])
                for cache, row in measured.items()
            ]))  # fmt: skip
    device = load(name)["device"]
    return [
        Chart(f"Tokens a second over {GENERATED[measure][0]}", [*model, device], speed, mark=(1.0, "")),
        Chart("Peak memory beside the weights", ["A cache that is not shown does not fit."], memory),
    ]


IMAGES: dict[str, Callable[[], list[Chart]]] = {
    "accuracy": lambda: [accuracy()],
    "summary": lambda: [against_peers(), capacity()],
    "decode": lambda: [decode_by_shape()],
    "fp4": lambda: [fp4_against_fp8()],
    "prefill": lambda: [prefill()],
    "sparse": lambda: [sparse()],
    "sage": lambda: [sage()],
    **{path.stem: partial(generate, path.stem) for path in RESULTS.glob("generate-*.json")},
}


def table(heads: list[str], body: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def pivot(
    name: str, lines: Row, shape: list[str], columns: list[Row], ratio: str = "ratio_to_floor"
) -> list[list[str]]:
    """A line for each row with the values of `lines`: its shape, and the time and ratio of each column."""
    body = []
    for first in rows(name, **lines):
        where = {key: first[key] for key in shape if key != "floor_us"}  # which differs from column to column
        found = [one(name, **where, **column) for column in columns]
        cells = [f"{row['median_us']:g} ({row[ratio]:.2f})" for row in found]
        body.append([f"{first[key]:g}" for key in shape] + cells)
    return body


def decode_table() -> str:
    """Decode: time and ratio to the floor of each shape."""
    chosen = [("fp8_e4m3fn", 1), ("fp8_e4m3fn", 16), ("fp8_e4m3fn", 64), ("bf16", 16)]
    columns: list[Row] = [{"format": format, "page_size": page, "ratio": 12} for format, page in chosen]
    found = pivot("decode-h100", columns[0], ["batch", "context", "floor_us"], columns)
    heads = ["FP8 page 1", "FP8 page 16", "FP8 page 64", "bf16 page 16"]
    return table(["batch", "context", "floor", *heads], found)


def fp4_table() -> str:
    """FP4 and mixed caches: time and ratio to FP8."""
    chosen = [(name, page) for name in ("FP4", "K8V4") for page in (1, 16, 64)]
    formats = {"FP4": "fp4_e2m1", "K8V4": "fp8_e4m3fn/fp4_e2m1"}
    columns: list[Row] = [{"format": formats[name], "page_size": page} for name, page in chosen]
    lines = {"page_size": 1, "format": "fp8_e4m3fn"}
    found = pivot("decode-fp4-h100", lines, ["batch", "context"], columns, "ratio_to_fp8")
    heads = [f"{name}, page {page}" for name, page in chosen]
    return table(["batch", "context", *heads], found)


def peers_table() -> str:
    """Other libraries' decode."""
    found: dict[tuple[int, int], dict[str, list[str]]] = {}
    for row in rows("decode-peers-h100"):
        value = f"{row['median_us']:g} us" if "median_us" in row else f"{row['ratio_to_floor']:g} x"
        cell = f"p{row['page_size']} {value}"
        found.setdefault((row["batch"], row["context"]), {}).setdefault(row["backend"], []).append(cell)
    body = [
        [str(batch), str(context), *(", ".join(cells.get(name, [])) for name in PEERS)]
        for (batch, context), cells in found.items()
    ]
    return table(["batch", "context", *PEERS.values()], body)


def prefill_table() -> str:
    """Prefill: time, ratio to the floor and the alternatives."""
    body = []
    for row in rows("prefill-h200"):
        ratio = f"{row['ratio_to_floor']:.2f}" if "ratio_to_floor" in row else "-"
        both = row["append_then_prefill_us"]
        body.append([
            row["format"], row["heads"], f"{row['new_tokens']} / {row['prefix']}", f"{row['median_us']:g}",
            ratio, f"{row['sdpa_us']:g}", f"{row['append_us']:g}",
            "disturbed" if both is None else f"{both:g}",
        ])  # fmt: skip
    heads = ["cache", "heads", "new / prefix", "batch_prefill", "x floor", "dequantise + SDPA"]
    return table([*heads, "prefill_append", "append, then prefill"], body)


def sparse_table(name: str) -> str:
    """Sparse prefill: time and ratio to the floor."""
    columns: list[Row] = [{"mode": mode} for mode in ("bf16", "prepass", "fused")]
    found = pivot(name, columns[0], ["tokens", "heads", "topk"], columns)
    heads = ["tokens", "heads", "top-k", "bf16 rows", "prepass", "fused"]
    return table(heads, found)


def sage_table() -> str:
    """Sage attention: milliseconds."""
    kernels = list(dict.fromkeys(row["kernel"] for row in rows("sage-h200")))
    body = []
    for first in rows("sage-h200", kernel="per_thread"):
        shape = {"tokens": first["tokens"], "mask": first["mask"]}
        values = [one("sage-h200", kernel=kernel, **shape)["median_ms"] for kernel in kernels]
        body.append(
            [*map(str, shape.values()), *(f"{value:g}" for value in values), f"{first['ratio_to_floor']:g}"]
        )
    names = [kernel.replace("K and V quantised before", "K, V ready") for kernel in kernels]
    return table(["tokens", "mask", *names, "per_thread x floor"], body)


def traffic_table() -> str:
    """Seeded steps of a serving engine: microseconds and times the floor."""
    body = []
    for row in rows("traffic-h100", backend="narrowkv"):
        if row["call"] == "batch_prefill" and row["traffic"] in ("decode", "speculative"):
            continue  # `paged_decode` serves these
        step = {key: row[key] for key in ("model", "traffic", "new_tokens", "keys")}
        peer = next(rows("traffic-h100", backend="torch sdpa", operation=row["operation"], **step), None)
        body.append([
            *map(str, step.values()), row["call"], f"{row['median_us']:.0f} ({row['ratio_to_floor']:.2f})",
            "-" if peer is None else f"{peer['median_us']:.0f}",
        ])  # fmt: skip
    return table(["model", "step", "new tokens", "keys", "call", "us (x floor)", "torch SDPA"], body)


def generate_tables() -> str:
    """Generation in transformers, of every GPU whose file is stored: tokens a second, and memory."""
    parts = []
    for name in sorted(path.stem for path in RESULTS.glob("generate-*.json")):
        shown = [cache for cache in GENERATED if any("batch" in row for row in rows(name, cache=cache))]
        heads = ["batch", "context", *(GENERATED[cache][0].removeprefix("narrowkv, ") for cache in shown)]

        def lines(cell: Callable[[Row], str], name: str = name, shown: list[str] = shown) -> list[list[str]]:
            return [
                [*map(str, shape), *(
                    "-" if (row := found.get(cache)) is None else
                    "does not fit" if "skipped" in row else cell(row)
                    for cache in shown
                )]
                for shape, found in generate_cells(name).items()
            ]  # fmt: skip

        parts += [
            f"![Generation in transformers, by cache](images/{name}.svg)",
            "Tokens a second of the batch:",
            table(heads, lines(lambda row: f"{row['tokens_per_s']:.0f}")),
            "GiB of the cache, and at the peak of a step:",
            table(heads, lines(lambda row: f"{row['cache_gib']:.2f}, {row['peak_gib']:.2f}")),
            *(
                f"{GENERATED[row['cache']][0]} was not measured: {row['skipped']}"
                for row in rows(name)
                if row["cache"] in GENERATED and "batch" not in row
            ),
            source_table(name),
        ]
    return "\n\n".join(parts) or "No run on a GPU is stored."


def steps_tables() -> str:
    """Steps of an engine, of every GPU whose file is stored: times of the host and of the device."""
    parts = []
    for name in sorted(path.stem for path in RESULTS.glob("steps-*.json")):
        keys = ("heads", "trace", "way")
        times = ("step", "prepare", "first", "other", "device_us", "products_us")
        body = [
            [*(row[key] for key in keys), *(f"{row[key]:,.0f}" for key in times), f"{row['share']:.0%}"]
            for row in rows(name)
        ]
        heads = ["heads", "step", "served as", "host, step", "preparation", "first layer", "another"]
        heads += ["device, a layer", "products", "share"]
        parts += [table(heads, body), source_table(name)]
    return "\n\n".join(parts) or "No run on a GPU is stored."


def capacity_table() -> str:
    """Bytes a token and tokens per GiB."""
    base, *_ = found = capacity_rows()
    body = [
        [row["name"], f"{row['bytes']:g}", f"{row['tokens']:,}", f"{row['tokens'] / base['tokens']:.2f}"]
        for row in found
    ]
    return table(["format", "bytes a token", "tokens per GiB", "over bf16"], body)


def source_table(name: str) -> str:
    """Where a results file comes from: device, versions, commands, ceilings."""
    found = load(name)
    versions = ", ".join(f"{key} {value or 'not recorded'}" for key, value in found["versions"].items())
    ceilings = ", ".join(
        f"{value} {key.split('_')[0]} {'TFLOP/s' if 'tflop' in key else 'GB/s'}"
        for key, value in found.get("ceilings", {}).items()
    )
    lines = [f"- Device: {found['device']}; {versions}."]
    if "commit" in found:
        lines.append(f"- Measured on {found['date']}, commit {found['commit']}.")
    lines += [f"- Command: `{command}`" for command in found["commands"]]
    if note := found.get("commands_note"):
        lines.append(f"- Command: {note}")
    lines.append(f"- Shape: {found['shape']}.")
    if ceilings:
        lines.append(f"- Ceilings of the same run: {ceilings}.")
    return "\n".join([*lines, f"- Data: `benchmarks/results/{name}.json`"])


def report_table(name: str) -> str:
    """Rows of a document of `narrowkv report`: measured beside modelled times."""
    heads = ["bench", "call", "measured us", "model us", "measured / model"]
    keys = ("measured_us", "model_us", "measured_over_model")
    return table(heads, [
        [row["bench"], row["call"], *("-" if row.get(k) is None else f"{row[k]:.4g}" for k in keys)]
        for row in load(name)["rows"]
    ])  # fmt: skip


# Recipes of `narrowkv accuracy` that no kernel stores or reads.
_SIMULATED = ("fp8-tensor", "fp4-mx", "nvfp4", "nvfp4-offset")


def accuracy_table(name: str) -> str:
    """What each recipe costs a language model: a document of `narrowkv accuracy`."""
    body = []
    for row in load(f"accuracy-{name}")["recipes"]:
        note = row["note"] + ("; simulated" if row["recipe"] in _SIMULATED else "")
        body.append(
            [
                f"`{row['recipe']}`", note, f"{row['bits']:.2f}", f"{row['kl']:.4f}",
                f"{row['perplexity_change']:+.1%}", f"{row['agreement']:.1%}",
                "yes" if row["frontier"] else "",
            ]
        )  # fmt: skip
    heads = ["recipe", "K and V", "bits", "KL", "change", "same next token", "frontier"]
    return table(heads, body)


def statistics_table(name: str) -> str:
    """How keys and values of a language model are made: a document of `narrowkv accuracy`."""
    found = load(f"accuracy-{name}")["statistics"]
    said = {
        "k_outlier": "K: root mean square of the largest channel over the median one's",
        "v_outlier": "V: the same",
        "k_bias": "K: largest abs(mean) over standard deviation of a channel",
        "k_first": "K: norm of the first token over the median token's",
    }
    body = [[text, *(f"{number:.1f}" for number in found[key])] for key, text in said.items()]
    return table(["of a head", "median head", "largest"], body)


def relative_table(name: str) -> str:
    """KL of the recommended FP4 recipe relative to others: a document of `narrowkv accuracy`."""
    kl = {row["recipe"]: row["kl"] for row in load(f"accuracy-{name}")["recipes"]}
    own = kl["fp4-e4m3"]
    others = ("fp4", "fp4-offset", "fp4-mx", "fp4-32", "nvfp4", "nvfp4-offset")
    return table(
        ["KL of `fp4-e4m3` over that of", *(f"`{other}`" for other in others)],
        [[name, *(f"{own / kl[other]:.2f}" for other in others)]],
    )


def amd_code_table(name: str) -> str:
    """Registers and LDS of the kernel with the matrix instructions: `tools/amd_figures.py`."""
    heads = [
        "target",
        "call",
        "VGPRs",
        "spills, scratch",
        "LDS",
        "matrix instructions",
        "vector instructions",
    ]
    return table(heads, [
        [
            row["target"], row["name"], str(row["vgprs"]), f"{row['spills']}, {row['scratch_bytes']}",
            f"{row['lds_bytes'] / 1024:.0f} KB", str(row["matrix_instructions"]),
            str(row["vector_instructions"]),
        ]
        for row in rows("amd-code", table=name)
    ]) + amd_source("amd-code")  # fmt: skip


def amd_model_table(name: str, target: str) -> str:
    """Hot loops on a full chip under the timing model: `tools/amd_figures.py --models`."""
    heads = [
        "call", "waves per CU", "clocks per pass", "matrix busy", "HBM busy", "TFLOP/s", "at peak clock",
        "bound by", "largest waits, share of a wave's time",
    ]  # fmt: skip
    return table(heads, [
        [
            row["name"], str(row["waves_per_unit"]), f"{row['model_loop_clocks']:.0f}",
            f"{row['model_matrix_share']:.0%}", f"{row['model_memory_share']:.0%}",
            f"{row['model_flops_per_s'] / 1e12:.0f}", f"{row['model_flops_at_peak_clock'] / 1e12:.0f}",
            row["model_bound"], row["model_waits"],
        ]
        for row in rows("amd-model", table=name, target=target) if "model_loop_clocks" in row
    ]) + amd_source("amd-model")  # fmt: skip


# Goals of loops in TFLOP/s at the data sheet's clock, on gfx942 and gfx950; None: none was set.
GOALS: dict[str, tuple[float | None, float | None]] = {
    "dense prefill, FP8 cache": (830, 1600), "dense prefill, bf16 cache": (830, 1600),
    "prefill, FP8 queries": (1150, 2100), "append, then attend, FP8 cache": (None, None),
    "sparse, 16-bit rows": (400, 700), "sparse, fused": (None, None), "sparse, FP8 query": (None, None),
    "Sage, int8": (1400, 1900), "Sage, FP8": (None, None),
}  # fmt: skip


# Rows like the published points of `amd-attention`: 16-bit products under a causal mask.
_LIKE_PUBLISHED = ("dense prefill, FP8 cache", "dense prefill, bf16 cache", "append, then attend, FP8 cache")


def goals_table() -> str:
    """Rates of the hot loops beside their goals and of whole calls; what misses its goal is bold."""
    body = []
    factors = load("amd-attention")["factors"]
    for name, goals in GOALS.items():
        table_name = "large" if "cache" in name or name == "prefill, FP8 queries" else "families"
        for target, goal in zip(("gfx942", "gfx950"), goals, strict=True):
            found = rows("amd-model", table=table_name, target=target)
            (row,) = [row for row in found if row["name"] == name]
            peak, rate = row["model_flops_at_peak_clock"] / 1e12, row["model_flops_per_s"] / 1e12
            factor = min(factors[f"{target}, causal"], 1.0) if name in _LIKE_PUBLISHED else None
            call = "-"
            if table_name == "large":
                per_us = row["model_call_flops"] / row["model_call_us"] / 1e6
                call = f"{row['model_call_us']:.0f} us, {per_us:.0f}"
            body.append([
                name, target, "-" if goal is None else f"{goal:.0f}",
                f"**{peak:.0f}**" if goal is not None and peak < goal else f"{peak:.0f}",
                f"{rate:.0f}", "-" if factor is None else f"{factor * rate:.0f}", call,
                f"{row['model_matrix_share']:.0%}", row["model_bound"], row["model_waits"],
            ])  # fmt: skip
    heads = [
        "call", "target", "goal", "at peak clock", "model", "expected", "whole call", "matrix busy",
        "bound by", "largest waits",
    ]  # fmt: skip
    return table(heads, body) + amd_source("amd-model")


def measured_goals_table() -> str:
    """Lines of `tools/measured_goals.py`, their goals and what they reached; missed goals are bold."""
    found = load("goals")["lines"]

    def best(row: Row, key: str) -> str:
        return "-" if row[key] is None else f"{row[key][0].replace(', shipped', '')} {row[key][1]:.1f}"

    body = [
        [
            row["line"], row["goal"], f"{row['reached']:.4g}" if row["met"] else f"**{row['reached']:.4g}**",
            f"{row['median_us']:.1f}" + (f" ({row['ratio_to_floor']:.2f})" if row["ratio_to_floor"] else ""),
            best(row, "best_choice"), best(row, "best_peer"),
        ]
        for row in found
    ]  # fmt: skip
    heads = ["call", "goal, at most", "reached", "us (x floor)", "best other choice, us", "fastest peer, us"]
    met = sum(row["met"] for row in found)
    return f"{met} of {len(found)} goals are met.\n\n{table(heads, body)}"


def _matrix_clocks(machine: Machine, element: str, depth: int) -> str:
    """Clocks of the two tiles of a type; `depth` is that over the least one."""
    shapes = [MatrixShape("f32", edge, edge, depth * 256 // edge, 1, element, element) for edge in (16, 32)]
    return "; ".join(f"{s.m}x{s.n}x{s.k}: {matrix_clocks(s, machine.name)}" for s in shapes)


# What is shown of a machine, how, and where it comes from.
_MACHINE_ROWS: list[tuple[str, Callable[[Machine], str], str]] = [
    ("compute units; SIMDs each", lambda m: f"{m.compute_units}; {m.simds}", "ISA documents, white papers"),
    ("waves per SIMD; registers per lane", lambda m: f"{m.waves_per_simd}; {m.registers}", "the same"),
    ("LDS; allocation granule", lambda m: f"{m.lds_bytes // 1024} KB; {m.lds_granule} B",
     "the same; LLVM AMDGPU usage guide"),
    ("clocks of issue, and of a vector instruction", lambda m: f"{m.issue}; {m.valu}", "ISA documents"),
    ("clocks of a transcendental", lambda m: f"{m.transcendental}",
     "chips and cheese, gfx950-gluon-tutorials"),
    ("clocks of a 32-bit multiply", lambda m: f"{m.multiply}", "ISA documents"),
    ("clocks of 16-bit matrix instructions",
     lambda m: _matrix_clocks(m, "f16", 2 if m.name == "gfx950" else 1), "ISA documents' rates"),
    ("clocks of FP8 matrix instructions", lambda m: _matrix_clocks(m, "fp8", 2), "ISA documents' rates"),
    ("vector ALU blocked after a matrix instruction", lambda m: f"{m.matrix_shadow} clocks",
     "AMD's calculator, gfx950-gluon-tutorials"),
    ("LDS bytes per clock: reads; writes", lambda m: f"{m.lds_read}; {m.lds_write}",
     "shark-ai LDS guide, gfx950-gluon-tutorials"),
    ("LDS bytes per clock returned to a pair of SIMDs", lambda m: f"{m.lds_return}", "the same"),
    ("LDS latency; queue of a pair of SIMDs", lambda m: f"{m.lds_latency} clocks; {m.lds_queue}",
     "pyhip, gfx950-gluon-tutorials"),
    ("vector cache; its rate", lambda m: f"{m.l1_bytes // 1024} KB; {m.l1} B per clock",
     "gfx950-gluon-tutorials"),
    ("bytes in flight", lambda m: f"{m.in_flight // 1024} KB", "gfx950-gluon-tutorials"),
    ("XCDs; L2 of each", lambda m: f"{m.xcds}; {m.l2_bytes // 2**20} MB", "ISA documents, white papers"),
    ("Infinity Cache; its rate",
     lambda m: f"{m.mall_bytes // 2**20} MB; {m.mall_bytes_per_s / 1e12:.1f} TB/s",
     "white papers; chips and cheese (MI300X)"),
    ("latency under load: L2; Infinity Cache; HBM",
     lambda m: f"{m.memory_latency}; {m.mall_latency}; {m.hbm_latency} clocks",
     "gfx950-gluon-tutorials; by idle latencies; fitted to row 14"),
    ("HBM rate", lambda m: f"{m.hbm_bytes_per_s / 1e12:.2f} TB/s", "best published"),
    ("barrier", lambda m: f"{m.barrier} clocks", "fitted to rows 10 and 19"),
    ("taken branch; scalar load", lambda m: f"{m.branch}; {m.scalar_load} clocks", "assumed"),
    ("clock in GHz, u = matrix unit's busy share", lambda m: f"{m.clock_idle} - {m.clock_slope} u",
     "fitted to published rates"),
    ("clock of the data sheet's peak rates", lambda m: f"{m.clock_peak} GHz", "ISA documents, white papers"),
]  # fmt: skip


def machines_table() -> str:
    """The figures of the timing model, and where they come from."""
    machines = [MACHINES[name] for name in ("gfx942", "gfx950")]
    heads = ["figure", *(f"{machine.name} ({machine.chip})" for machine in machines), "source"]
    return table(heads, [
        [what, *(value(machine) for machine in machines), source] for what, value, source in _MACHINE_ROWS
    ])  # fmt: skip


def attention_points_table() -> str:
    """Published attention and products beside the model: `tools/model_validation.py attention`."""
    found = load("amd-attention")
    body = [
        [row["row"], row["what"], row["block"], f"{row['measured']:g}", f"{row['modelled']:.0f}",
         f"{row['error']:+.0%}"]
        for row in found["rows"]
    ]  # fmt: skip
    summary, factors = found["summary"], found["factors"]
    fitted = "; ".join(f"{series} {factor:.2f}" for series, factor in factors.items())
    heads = ["row", "kernel", "tile", "TFLOP/s measured", "model", "error"]
    summed = (
        f"Median error: attention {summary['attention']:.0%}, products {summary['products']:.0%}. With "
        f"factors fitted to three lengths of each series ({fitted}), the median error of the other lengths "
        f"is {summary['held_out']:.0%}, the worst {summary['held_out_worst']:.0%}."
    )
    return f"{table(heads, body)}\n\n{summed}{amd_source('amd-attention')}"


def xcds_table() -> str:
    """Launches in their own order and in that for several XCDs, modelled: `tools/xcd_figures.py`."""
    heads = [
        "kernel", "call", "target", "L2 serves", "ordered", "HBM serves", "last XCD over the mean", "ordered",
        "speed-up",
    ]  # fmt: skip
    return table(heads, [
        [
            row["family"], row["what"], row["target"], f"{row['l2_hits']:.0%}",
            f"{row['l2_hits_ordered']:.0%}", f"{row['hbm_ordered']:.1%}",
            f"{row['last']:.2f}", f"{row['last_ordered']:.2f}", f"{row['speedup']:.2f}",
        ]
        for row in rows("amd-xcds")
    ]) + amd_source("amd-xcds")  # fmt: skip


def cp_model_table() -> str:
    """Modelled decode steps over many GPUs: `narrowkv bench cp --model`."""
    from narrowkv.testing.bench.context_parallel import LINK_OF_TARGET, Setting, predict

    body = []
    for context in (2**20, 10 * 2**20):
        for world in (8, 16, 72):
            cells = [str(world), str(context)]
            for target in ("gfx942", "gfx950"):
                step = predict(Setting(), world, context, 1, target=target, link=LINK_OF_TARGET[target])
                cells += [f"{step.one_gpu_us:.0f}", f"{step.step_us:.0f}", f"{step.speedup:.1f}"]
            body.append(cells)
    heads = ["GPUs", "tokens", "one MI300X", "step", "speed-up", "one MI355X", "step", "speed-up"]
    return table(heads, body)


def amd_source(name: str) -> str:
    """The versions and the command of a file of `tools/amd_figures.py`."""
    found = load(name)
    return f"\n\nTriton {found['versions']['triton']}; `{found['command']}`."


TABLES: dict[str, Callable[[], str]] = {
    "capacity": capacity_table,
    **{f"amd-code {name}": partial(amd_code_table, name) for name in ("decode", "prefill", "sparse")},
    **{
        f"amd-model {name} {target}": partial(amd_model_table, name, target)
        for name in ("families", "large")
        for target in ("gfx942", "gfx950")
    },
    "amd-attention": attention_points_table,
    "amd-goals": goals_table,
    "amd-machines": machines_table,
    "amd-xcds": xcds_table,
    "cp-model": cp_model_table,
    "generate": generate_tables,
    "goals": measured_goals_table,
    "decode": decode_table,
    "fp4": fp4_table,
    "peers": peers_table,
    "prefill": prefill_table,
    "sparse-h200": lambda: sparse_table("sparse-h200"),
    "sage": sage_table,
    "steps": steps_tables,
    "traffic": traffic_table,
    **{
        f"accuracy {path.stem[9:]}": partial(accuracy_table, path.stem[9:])
        for path in RESULTS.glob("accuracy-*.json")
    },
    "statistics smollm2": lambda: statistics_table("smollm2"),
    "relative smollm2": lambda: relative_table("smollm2"),
    **{f"report {path.stem}": partial(report_table, path.stem) for path in RESULTS.glob("*.json")},
    **{f"source {path.stem}": partial(source_table, path.stem) for path in RESULTS.glob("*.json")},
}


def fill(page: str) -> str:
    """A page with its tables as the stored results give them."""

    def replace(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n\n{TABLES[match[1]]()}\n\n<!-- end -->"

    def program(match: re.Match[str]) -> str:
        source = (ROOT / "examples" / f"{match[1]}.py").read_text()
        return f"<!-- program {match[1]} -->\n\n```python\n{source}```\n\n<!-- end -->"

    page = re.sub(r"<!-- program (\w+) -->.*?<!-- end -->", program, page, flags=re.DOTALL)
    return re.sub(r"(?<!`)<!-- table ([\w -]+?) -->.*?<!-- end -->", replace, page, flags=re.DOTALL)


def main() -> None:
    """Writes what is not up to date, or says what it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if anything is not up to date"
    )
    check = parser.parse_args().check
    wanted = {DOCS / "images" / f"{name}.svg": draw(*charts()) for name, charts in IMAGES.items()}
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    wanted |= {page: fill(page.read_text()) for page in pages}
    stale = [path for path, content in wanted.items() if not path.exists() or path.read_text() != content]
    for path in stale:
        print(f"{'not up to date' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path])
    if check and stale:
        sys.exit("run: make results")


if __name__ == "__main__":
    main()
