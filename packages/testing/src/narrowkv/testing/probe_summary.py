"""What a probe's answers come to: rows and columns of a table, capacity, machine code, reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from narrowkv.testing.backends import OURS
from narrowkv.testing.checking import Sample
from narrowkv.testing.contracts import Contract
from narrowkv.testing.operations import operation_of
from narrowkv.testing.probing import FAIL, INEXACT, NOT_RUN, PASS, REFUSED, SKIPPED, STATUSES, ProbeRun
from narrowkv.testing.records import number
from narrowkv.testing.words import QUERY_DTYPES

__all__ = [
    "BackendColumn", "ContractRow", "capacity", "cell", "code", "columns", "device_times", "emulated",
    "reasons", "sections",
]  # fmt: skip

_MARKS = {PASS: "ok", FAIL: "FAIL", INEXACT: "over"}
_COUNTED = (NOT_RUN, SKIPPED, REFUSED)


@dataclass(frozen=True)
class BackendColumn:
    """A backend at a place or target, which answered a contract."""

    head: tuple[str, str]
    backend: str
    place: str


ContractRow = tuple[str, tuple[int, ...]]
"""A cache format, and indices into the set: contracts that differ in page size and 16-bit query alone."""


def columns(seen: ProbeRun) -> list[BackendColumn]:
    """The columns of the table: narrowkv at each place and target, then other implementations."""
    found = []
    for name in dict.fromkeys([*(place.name for place in seen.places), *seen.targets]):
        place = next((place for place in seen.places if place.name == name), None)
        if place is None or place.is_emulated:
            ran = place is not None or any(where == name for _, _, where in seen.answers)
            head = (f"{name} code", "emulated" if ran else "compiled")
        else:
            head = ("this GPU", "") if place.is_gpu else ("this CPU", "interpreted")
        found.append(BackendColumn(head, OURS.name, name))
    where = next((place.name for place in seen.places if not place.is_emulated), "")
    peers = [name for name, why in seen.absent.items() if why is None]
    return found + [BackendColumn((name, "peer"), name, where) for name in peers]


def sections(contracts: Sequence[Contract]) -> dict[str, list[ContractRow]]:
    """Rows by what they have in common: operation, queries, page sizes, bound."""
    pages: dict[tuple[str, str, str, float], list[int]] = {}
    for index, c in enumerate(contracts):
        pages.setdefault((c.function, c.q, c.cache, c.bound), []).append(index)
    # 16-bit queries over the same pages share a row.
    rows: dict[tuple[str, str, str, float, tuple[int, ...]], list[int]] = {}
    for (function, q, cache, bound), indices in pages.items():
        sizes = tuple(contracts[i].page_size for i in indices)
        kind = "16-bit" if q in QUERY_DTYPES else q
        rows.setdefault((function, kind, cache, bound, sizes), []).extend(indices)
    found: dict[str, list[ContractRow]] = {}
    for (function, _, cache, bound, sizes), indices in rows.items():
        queries = ", ".join(dict.fromkeys(contracts[i].q for i in indices))
        title = f"{function}: Q {queries}"
        if any(sizes):
            title += f"; pages of {', '.join(map(str, sizes))} tokens"
        found.setdefault(f"{title}; bound {bound:.1e}", []).append((cache, tuple(indices)))
    return found


def cell(seen: ProbeRun, row: ContractRow, column: BackendColumn) -> tuple[str, str]:
    """A mark with the worst error, and the worst status."""
    statuses: list[str] = []
    _, indices = row
    for index in indices:
        found = seen.statuses(index, column.backend, column.place)
        statuses += found or ([NOT_RUN] if column.backend == OURS.name else [])
    if not statuses:
        return "-", PASS
    worst = max(statuses, key=STATUSES.index)
    if worst in _COUNTED:
        count = statuses.count(worst)
        return f"{worst} {count}/{len(statuses)}" if count < len(statuses) else worst, worst
    answers = (seen.answers.get((i, column.backend, column.place)) for i in indices)
    errors = [a.relative_l1 for a in answers if a is not None and a.relative_l1 is not None]
    mark = _MARKS[worst]
    if errors:
        # NaN is the worst of all, and no comparison finds it.
        return f"{mark} {next((e for e in errors if e != e), max(errors)):.2e}", worst
    return mark if worst == FAIL else f"{mark} compiled", worst


def capacity(seen: ProbeRun) -> list[str]:
    """How many tokens a GiB holds in each format, and how many times bf16's that is."""
    sizes: dict[str, float] = {}
    for (index, backend, _), answer in seen.answers.items():
        if backend == OURS.name and answer.kv_bytes_per_token is not None:
            sizes[seen.contracts.contracts[index].cache] = answer.kv_bytes_per_token
    order = dict.fromkeys(c.cache for c in seen.contracts.contracts)
    shape = seen.contracts.shape
    paged = all(operation_of(c.operation).is_paged for c in seen.contracts.contracts)
    bf16 = sizes.get("bf16", 4.0 * shape.num_kv_heads * shape.head_dim if paged else None)
    parts = []
    for name in (name for name in order if name in sizes):
        ratio = f" ({bf16 / sizes[name]:.2f}x)" if bf16 else ""
        parts.append(f"{name} {number(2**30 / sizes[name] / 1000)}k{ratio}")
    if parts and bf16 and "bf16" not in sizes:
        parts.append("beside bf16")
    return parts


def code(seen: ProbeRun) -> Iterator[tuple[str, str, str]]:
    """A label, a sentence on the machine code and a status, for each target."""
    for target in seen.targets:
        found = [one for (_, name), one in sorted(seen.compiled.items()) if name == target]
        kernels = [kernel for one in found for kernel in one.kernels]
        if not kernels:
            why = next((one.detail for one in found if one.detail), "interrupted before it was compiled")
            yield target, f"not compiled: {why}", SKIPPED
            continue
        spills, scratch = max(k.spills for k in kernels), max(k.scratch_bytes for k in kernels)
        text = "no spills; "
        if bad := sum(any(k.faulty for k in one.kernels) for one in found):
            text = f"{bad} of {len(found)} calls spill: {spills} registers, {scratch} bytes of scratch; "
        models = [one.model for one in found if one.model is not None]
        shares = sorted(k.matrix_share for k in kernels if k.matrix_share)
        if models:
            over = sorted(model["issue_over_memory"] for model in models)
            by_memory = sum(model["bound_by"] == "memory" for model in models)
            bound = "decode bound by memory" if by_memory else "decode bound by issue"
            if 0 < by_memory < len(models):
                bound = f"bound by memory in {by_memory}/{len(models)}"
            text += f"{bound}, issue {over[0]:.2f}-{over[-1]:.2f} of it (model)"
        elif shares:
            text += f"matrix instructions {shares[0]:.0%} to {shares[-1]:.0%} of issue (model)"
        yield f"{target} code", text, FAIL if spills or scratch else PASS


def device_times(seen: ProbeRun) -> str:
    """Device times of each operation, where there is a GPU."""
    times: dict[str, list[float]] = {}
    for (index, backend, _), answer in seen.answers.items():
        if backend == OURS.name and answer.time_us is not None:
            times.setdefault(seen.contracts.contracts[index].function, []).append(answer.time_us["median"])
    return "; ".join(f"{name} {number(min(us))} to {number(max(us))} us" for name, us in times.items())


def emulated(seen: ProbeRun) -> str:
    """How much of the machine code was run, where that was a sample."""
    samples = [answer.sample for answer in seen.answers.values() if answer.sample is not None]
    if not samples:
        return ""
    total = {name: sum(getattr(s, name) for s in samples) for name in Sample.__dataclass_fields__}
    return (
        "{workgroups} of {launched} workgroups, {rows} of {all_rows} output rows; "
        "bounds, alignment and uninitialised values checked in each".format(**total)
    )


def reasons(seen: ProbeRun) -> list[tuple[str, str]]:
    """Labels and reasons: failures first, then what was refused or skipped, then who was not asked."""
    counts: dict[tuple[str, str, str], int] = {}
    for (_, name, place), answer in seen.answers.items():
        if answer.status == INEXACT:
            reason = f"{name}: error above the bound, which a peer may have"
            counts["over", "", reason] = counts.get(("over", "", reason), 0) + 1
        elif answer.status != PASS and answer.detail:
            key = (answer.status, place, f"{name}: {answer.detail}")
            counts[key] = counts.get(key, 0) + 1
    for (_, target), compiled in seen.compiled.items():
        if compiled.status == FAIL:
            key = (compiled.status, target, f"{OURS.name} for {target}: {compiled.detail}")
            counts[key] = counts.get(key, 0) + 1
    found = sorted(
        counts.items(), key=lambda item: STATUSES.index(item[0][0]) if item[0][1] else 0, reverse=True
    )
    blocks = [(status, f"{text} ({count} x)" if count > 1 else text) for (status, _, text), count in found]
    missing: dict[str, list[str]] = {}
    for name, why in seen.absent.items():
        if why is not None:
            missing.setdefault(why, []).append(name)
    blocks += [("not asked", f"{', '.join(names)}: {why}") for why, names in missing.items()]
    return blocks
