"""All that a new operation needs: an entry of the registry, and its cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowkv.attn_decode import merge_states
from narrowkv.testing.bench.measure import Bench, Columns
from narrowkv.testing.cases import Case, Inputs, named
from narrowkv.testing.operation import (
    Cases,
    ContractSet,
    OperationEntry,
    Shape,
    alike,
    contracts,
    option,
)
from narrowkv.testing.operations import corners


@dataclass(frozen=True, kw_only=True)
class ToyCase(Case):
    """A merge of partial results."""

    parts: int = 2
    tokens: int = 5
    heads: int = 3
    dtype: torch.dtype = named(torch.float32, words={"fp32": torch.float32, "bf16": torch.bfloat16})
    seed: int = 0

    bound = 0.01
    lse_bound = 1e-5

    @property
    def kind(self) -> tuple[str, str]:
        return "partial results", f"{self.parts} parts"

    def inputs(self, device: str = "cpu") -> ToyInputs:
        random = torch.Generator().manual_seed(self.seed)
        size = (self.parts, self.tokens, self.heads, 64)
        o, lse = torch.randn(size, generator=random), torch.randn(size[:3], generator=random)
        return ToyInputs(o.to(device, self.dtype), lse.to(device))


@dataclass(frozen=True)
class ToyInputs(Inputs):
    o: torch.Tensor
    lse: torch.Tensor

    def call(self) -> tuple[torch.Tensor, torch.Tensor]:
        return merge_states(self.o, self.lse)

    def prepare(self) -> Callable[[], torch.Tensor]:
        return lambda: self.call()[0]

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.lse.softmax(0)[..., None]
        return (weights * self.o.float()).sum(0), self.lse.logsumexp(0)


CASES = Cases(
    case=ToyCase,
    bounds={"relative_l1": ToyCase.bound},
    sweep=lambda target, full, seed: [ToyCase(tokens=tokens, seed=seed) for tokens in (1, 2, 33)],
    of_contract=lambda contract, shape, clean: ToyCase(tokens=shape.batch, dtype=torch.bfloat16),
    families=lambda target: {"merge of a toy": ToyCase()},
    shipped=lambda target: [ToyCase(parts=parts) for parts in (2, 4)],
    columns={"parts": lambda case: case.parts},
)


@dataclass(frozen=True)
class ToyRows:
    tokens: tuple[int, ...] = option((16, 64), "Tokens.")
    dtype: tuple[str, ...] = option(("fp32",), words=("fp32", "bf16"))
    samples: int = option(5, "The most samples of a row.")


def make(options: ToyRows) -> tuple[Bench[ToyCase], list[ToyCase], dict[str, Any]]:
    columns = Columns({"dtype": "dtype"}, {"tokens": "tokens"}, ("dtype",))
    return (
        Bench(name="toy", columns=columns, calls=lambda case: ()),
        [ToyCase(tokens=tokens) for tokens in options.tokens],
        {},
    )


SETS = ContractSet("toy", "a merge of two partial results", Shape(3, 1, 1, 3, 3, 64))
OPERATION = OperationEntry(
    name="toy",
    functions=("merge_toys",),
    module=__name__,
    contracts=(replace(SETS, contracts=contracts("merge_toys", ("bf16",), alike("bf16"), (0,), bound=0.01)),),
    samples={"_merge_states_kernel": corners},
    validate="Merge toys.",
    seed="Of the toys.",
    inspect="Show what toys compile to.",
    bench="Measure toys.",
    bench_rows=ToyRows,
    bench_module=__name__,
    report_cases=("tokens=7",),
    report_measured="--tokens 64",
)
