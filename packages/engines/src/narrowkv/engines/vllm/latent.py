"""A backend for latent attention (MLA) in vLLM; it serves DeepSeek V2 and V3, Kimi and GLM-4.7-Flash.

For decodes vLLM absorbs the up-projections and calls `forward_mqa`. Prompts go through a second backend, the
one for prefills that vLLM is told to use: `NarrowLatentPrefill` or one of vLLM's own.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

from narrowkv.engines.geometry import latent_reasons
from narrowkv.engines.latent import MOST_QUERIES, attend_expanded, fp8_rows, latent_plan
from narrowkv.engines.vllm.slots import LATENT_CACHE_DTYPES, format_of
from narrowkv.paged_cache import PageTable
from narrowkv.quant import cast_fp8
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.sparse_fp8 import DSV4Rows, SparsePlan, latent_decode


class NarrowLatentBuilder(MLACommonMetadataBuilder):
    """vLLM's own metadata; decode steps with equal query lengths run in full graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM


class NarrowLatentBackend(MLACommonBackend):
    """What vLLM asks of a backend before it makes layers of latent attention."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*LATENT_CACHE_DTYPES]

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's log."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[NarrowLatentAttention]:
        """The class of layers."""
        return NarrowLatentAttention

    @staticmethod
    def get_builder_cls() -> type[NarrowLatentBuilder]:
        """The class that prepares steps."""
        return NarrowLatentBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any multiple of 16."""
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Columns of a row, with RoPE columns and without."""
        return [512, 576]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Those in which the pages of a layer follow each other."""
        return KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.LHBNC

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """With VLLM_BATCH_INVARIANT a decode gets the same bits in any step."""
        return True


class NarrowLatentAttention(MLACommonImpl):
    """Latent attention of one layer: decodes over vLLM's pages.

    Raises:
        UnsupportedError: for rows, sliding windows and numbers of speculative tokens that are not served.
    """

    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, *args,
            **kwargs,
        )  # fmt: skip
        self.supports_quant_query_input = False
        if sliding_window is not None:
            raise UnsupportedError("narrowkv's latent attention has no sliding window: choose TRITON_MLA")
        for reason in latent_reasons(self.kv_lora_rank, self.qk_rope_head_dim):
            raise UnsupportedError(f"{reason}: choose TRITON_MLA")
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self._rows: tuple[weakref.ref[torch.Tensor], torch.Tensor | DSV4Rows] | None = None
        self._max_batch, self._max_seq_len = 1, 1
        self._reserve(get_current_vllm_config_or_none())

    def _reserve(self, config: Any) -> None:
        """Allocates the workspace of decode steps while the model is loaded."""
        if config is None:
            return
        tokens = 1 + config.num_speculative_tokens
        if tokens > MOST_QUERIES:
            raise UnsupportedError(
                f"narrowkv's latent attention decodes at most {MOST_QUERIES} tokens a request, got "
                f"num_speculative_tokens={tokens - 1}: use {MOST_QUERIES - 1}"
            )
        self._max_batch = config.scheduler_config.max_num_seqs
        self._max_seq_len = config.model_config.max_model_len
        device, dtype = torch.empty(0).device, config.model_config.dtype
        size = config.cache_config.block_size or 16
        one: torch.Tensor | DSV4Rows = torch.zeros(1, size, self.head_size, dtype=dtype, device="cpu")
        if self._is_narrow:
            stored = torch.zeros(1, size, self.head_size, dtype=torch.uint8, device="cpu")
            one = fp8_rows(stored, self._format(device))
        for q_len in range(1, tokens + 1):
            self._plan(one, self.num_heads, size, q_len, dtype, device)

    @property
    def _is_narrow(self) -> bool:
        return str(self.kv_cache_dtype).startswith("fp8")

    def _format(self, device: torch.device) -> str:
        """The E4M3 of the device, in which FP8 rows are stored."""
        return format_of("fp8", torch.bfloat16, device).k

    def _plan(
        self, rows: torch.Tensor | DSV4Rows, heads: int, page_size: int, q_len: int, dtype: torch.dtype,
        device: torch.device,
    ) -> SparsePlan:  # fmt: skip
        """The plan of steps over such rows, made once for all layers of a shape."""
        return latent_plan(
            rows, num_qo_heads=heads, page_size=page_size, q_len=q_len, dtype=dtype, device=device,
            sm_scale=self.scale, max_batch=self._max_batch, max_seq_len=self._max_seq_len, return_lse=True,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip

    def rows_of(self, layer: Any, kv_cache: torch.Tensor) -> torch.Tensor | DSV4Rows:
        """The layer's pages as rows, made again only if vLLM has another cache, and dropped with it."""
        own = layer.kv_cache
        if self._rows is None or self._rows[0]() is not own:
            pages = kv_cache.data  # a view of kv_cache itself would keep it
            rows: torch.Tensor | DSV4Rows = pages
            if self._is_narrow:
                rows = fp8_rows(pages, self._format(pages.device), layer._k_scale.view(1))
            self._rows = (weakref.ref(own, self._forget), rows)
        return self._rows[1]

    def _forget(self, kv_cache: weakref.ref[torch.Tensor]) -> None:
        if self._rows is not None and self._rows[0] is kv_cache:
            self._rows = None

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        *skip_scale: bool,
    ) -> None:
        """Stores the rows of new tokens, by vLLM's own operation where it is compiled.

        From vLLM 0.33 on `skip_scale` says whether the scale is 1.
        """
        if kv_cache.numel() == 0 or hasattr(torch.ops._C_cache_ops, "concat_and_cache_mla"):
            super().do_kv_cache_update(
                kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *skip_scale
            )
            return
        slots = slot_mapping.flatten()
        count = slots.shape[0]
        new = torch.cat([kv_c_normed[:count], k_pe.flatten(1)[:count]], -1)
        if self._is_narrow:
            stored = cast_fp8(new.float() / k_scale, self._format(kv_cache.device)).view(torch.uint8)
            kv_cache = kv_cache.view(torch.uint8)
        else:
            stored = new.to(kv_cache.dtype)
        # vLLM gives page 0 to no request: what is stored there for padding (-1) is read by none.
        places = slots.clamp(min=0)
        kv_cache[places // kv_cache.shape[1], places % kv_cache.shape[1]] = stored

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of decodes over their latent rows.

        Args:
            q: `[tokens, num_heads, columns]`, or its latent and RoPE columns.
            kv_c_and_k_pe_cache: vLLM's pages.
            attn_metadata: vLLM's; every request has as many tokens.
            layer: vLLM's layer, for its scale.

        Returns:
            `[tokens, num_heads, 512]`, and the log-sum-exp `[tokens, num_heads]`.
        """
        if not attn_metadata.causal:
            raise UnsupportedError("narrowkv's latent attention is causal, got causal=False from vLLM")
        q = torch.cat(q, -1) if isinstance(q, tuple) else q
        decode = attn_metadata.decode
        size = kv_c_and_k_pe_cache.shape[1]
        table = PageTable.from_block_table(decode.block_table, decode.seq_lens, page_size=size)
        rows = self.rows_of(layer, kv_c_and_k_pe_cache)
        q_len = q.shape[0] // decode.seq_lens.shape[0]
        plan = self._plan(rows, q.shape[1], size, q_len, q.dtype, q.device)
        o, lse = latent_decode(q, rows, table, plan=plan, return_lse=True)
        return o, lse


class NarrowLatentPrefill(MLAPrefillBackend):
    """Attention of prompts to expanded keys and values, by `batch_prefill`."""

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's log."""
        return "NARROWKV"

    def run_prefill_new_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_softmax_lse: bool,
        out: torch.Tensor | None = None, output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Causal attention of new tokens `[tokens, num_heads, channels]` to one another.

        Returns:
            `[tokens, num_heads, v_head_dim]`, with the log-sum-exp `[num_heads, tokens]` if it is asked for.
        """
        if output_scale is not None:
            raise UnsupportedError("narrowkv's latent attention has no quantised output")
        own = self._prefill_metadata
        starts, most = own.query_start_loc, own.max_query_len
        o, lse = attend_expanded(
            q, k, v, starts, starts, most, most, causal=True, sm_scale=self.scale
        )  # fmt: skip
        if out is not None:
            o = out.copy_(o)
        return (o, lse.T.contiguous()) if return_softmax_lse else o

    def run_prefill_context_chunk(
        self, chunk: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of new tokens to all tokens of a chunk of what was stored before them."""
        o, lse = attend_expanded(
            q, k, v, chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len,
            causal=False, sm_scale=self.scale,
        )  # fmt: skip
        return (o if out is None else out.copy_(o)), lse.T.contiguous()
