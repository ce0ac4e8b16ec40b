"""Plans of prefill and of appending prefill, and their calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from narrowkv.attn_prefill.binding import storing_constants
from narrowkv.attn_prefill.calls import run
from narrowkv.attn_prefill.launch import Kind, make_routes
from narrowkv.attn_prefill.plan_base import PlanBase
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope
from narrowkv.runtime.errors import check_instance
from narrowkv.runtime.launch import BoundLaunch, is_compiled

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AppendOptions(TypedDict, total=False):
    """Keywords that say where results go and what is checked.

    Attributes:
        out_dtype: bf16, fp16 or fp32, of a new output; default q's dtype, and bf16 for FP8 queries.
        return_lse: also return the log-sum-exp.
        lse: where to write the log-sum-exp, `[tokens, num_qo_heads]` fp32, last dimension contiguous. It is
            returned only with `return_lse`.
        validate: True looks at the values of all metadata first (cu_seqlens_q, lengths, page ids, descales,
            positions, bounds of the plan), which waits for the device. None, the default, reads `q_descale`
            and descale tensors per tensor, head or sequence in the first call that has them, and again if
            they have changed in place; if lengths are on the CPU, the first call of some size refuses those
            beyond the plan's maxima. False reads nothing.
    """

    out_dtype: torch.dtype | None
    return_lse: bool
    lse: torch.Tensor | None
    validate: bool | None


class PrefillOptions(AppendOptions, total=False):
    """`AppendOptions`, and whether the bits of a result may depend on the batch.

    Attributes:
        batch_invariant: a sequence's result has the same bits alone and in any batch; see `plan_prefill`.
    """

    batch_invariant: bool


APPEND_OPTIONS = frozenset(AppendOptions.__annotations__)
PREFILL_OPTIONS = APPEND_OPTIONS | {"batch_invariant"}


def refuse_keywords(function: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises for a keyword that an operation does not have.

    Raises:
        TypeError: as Python does.
    """
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


class PrefillPlan(PlanBase):
    """A prepared prefill: what does not depend on the values of lengths and page ids; see `PlanBase`."""

    def kernels(
        self,
        cache: PagedKVCache,
        *,
        ragged: bool = False,
        logits_soft_cap: float = 0.0,
        window_left: int = -1,
        window_right: int = 0,
        sinks: bool = False,
        return_lse: bool = False,
        rope: Rope | None = None,
    ) -> tuple[BoundLaunch, ...]:
        """Every kernel of prefill, with its constants and options, that calls of this plan can launch.

        Kernels of `paged_decode`, where that serves calls, are those of `plan.decode.kernels(cache)`.

        Args:
            cache: a cache like those of the calls; one page is enough.
            ragged: whether their page tables are ragged.
            logits_soft_cap, window_left, window_right, return_lse: as in the calls, causal ones by default;
                sinks: whether they have sinks.
            rope: of an append: the rotary embedding.

        Example:
            >>> for launch in plan.kernels(cache):          # doctest: +SKIP
            ...     print(launch.kernel, launch.constexprs, launch.options)
        """
        bound = self.bind(cache)
        kind = Kind(
            ragged, logits_soft_cap > 0, sinks, return_lse, False, window_left, window_right,
            bound.has_offset and (logits_soft_cap > 0 or sinks or return_lse), True,
            storing_constants(cache, self.exponent, rope) if self.exponent is not None else None,
            self.target.is_amd and is_compiled(cache.k), cache.negative_zero_free,
        )  # fmt: skip
        found: dict[int, BoundLaunch] = {}
        for config, shape in self.configs_of_calls():
            if config.kernel != "decode":
                for route in make_routes(self, shape, config, cache, bound, kind):
                    for launch in (route.fill, route.attend):
                        if launch is not None:
                            found[id(launch)] = launch
        return tuple(found.values())

    def run(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        page_table: PageTable,
        cu_seqlens_q: torch.Tensor,
        *,
        causal: bool = True,
        sm_scale: float | None = None,
        q_descale: float | torch.Tensor = 1.0,
        logits_soft_cap: float = 0.0,
        window_left: int = -1,
        window_right: int = -1,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        **options: Unpack[PrefillOptions],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`batch_prefill` by this plan: the same arguments and results.

        The first call with some dtypes, strides and options checks them, and the first one of some size
        prepares its launches; later calls with the same ones only launch.
        """
        get = options.get
        if not PREFILL_OPTIONS.issuperset(options):
            refuse_keywords("batch_prefill", options, PREFILL_OPTIONS)
        if get("batch_invariant") and not self.batch_invariant:
            raise ValueError("plan must be made with batch_invariant=True: call plan_prefill again")
        given = (
            q, None, None, cache, page_table, cu_seqlens_q, None, causal, sm_scale, q_descale,
            logits_soft_cap, window_left, window_right, sinks, out, get("out_dtype"),
            get("return_lse", False), get("lse"), get("validate"),
        )  # fmt: skip
        return run(self, given)


class AppendPlan(PrefillPlan):
    """A `PrefillPlan` for `prefill_append`."""

    def run(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        cache: PagedKVCache,
        page_table: PageTable,
        cu_seqlens_q: torch.Tensor,
        *,
        rope: Rope | None = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        window_left: int = -1,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        **options: Unpack[AppendOptions],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`prefill_append` by this plan: the same arguments and results; see `PrefillPlan.run`."""
        if not APPEND_OPTIONS.issuperset(options):
            refuse_keywords("prefill_append", options, APPEND_OPTIONS)
        get = options.get
        given = (
            q, k_new, v_new, cache, page_table, cu_seqlens_q, rope, True, sm_scale, 1.0,
            logits_soft_cap, window_left, -1, sinks, out, get("out_dtype"), get("return_lse", False),
            get("lse"), get("validate"),
        )  # fmt: skip
        return run(self, given)


def check_plan(plan: object, kind: type[PrefillPlan], maker: str) -> None:
    """Refuses what is no plan, or one for the other operation."""
    check_instance("plan", plan, PrefillPlan)
    if type(plan) is not kind:
        raise ValueError(f"plan must be made by {maker}, got one for another operation: call {maker} again")
