"""Latent attention (MLA) in SGLang: DeepSeek V2 and V3, Kimi and GLM-4.7-Flash.

SGLang hands prompts without a prefix over expanded, after it has stored their rows itself. All other steps
have the up-projections absorbed into queries: decodes, guesses, and prompts behind a prefix.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVWriteLoc, MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from narrowkv.engines.geometry import latent_reasons
from narrowkv.engines.latent import MOST_QUERIES, Pieces, attend_expanded, fp8_rows, latent_plan
from narrowkv.engines.sglang.backend import NarrowAttentionBackend
from narrowkv.engines.sglang.layers import check_layer, check_options
from narrowkv.engines.steps import Step
from narrowkv.quant.formats import get_format
from narrowkv.sparse_fp8 import DSV4Rows, SparsePlan, latent_decode

__all__ = ["LatentPoolBackend"]


class LatentPoolBackend(NarrowAttentionBackend):
    """Attention over SGLang's pool of latent rows, which new tokens are stored in by the pool itself.

    Args:
        runner: SGLang's `ModelRunner`.

    Raises:
        UnsupportedError: for pools, models and options that narrowkv does not serve.
    """

    _most_guesses: ClassVar[int] = MOST_QUERIES

    def _pool_reasons(self) -> list[str]:
        self._latents = self.pool
        if isinstance(self.pool, HybridLinearKVPool):  # other layers keep a state
            self._latents = self.pool.full_kv_pool
        if type(self._latents) is not MLATokenToKVPool:
            kind = type(self._latents).__name__
            return [f"its pool is a {kind}, and narrowkv reads a MLATokenToKVPool"]
        return latent_reasons(self._latents.kv_lora_rank, self._latents.qk_rope_head_dim)

    def _reserve(self, config: Any, dtype: torch.dtype) -> None:
        self._rows: dict[int, tuple[int, torch.Tensor | DSV4Rows]] = {}
        self._pieces: tuple[Step, Pieces] | None = None
        heads = config.num_attention_heads // get_parallel().attn_tp_size
        rows = self._as_rows(
            torch.empty(self.page_size, 1, self._latents.kv_cache_dim, dtype=self._latents.dtype)
        )
        scale = config.head_dim**-0.5  # of no consequence to the size
        for q_len in {1, self.guesses}:
            self._plan(rows, heads, q_len, dtype, scale, self.max_batch)

    def _as_rows(self, buffer: torch.Tensor) -> torch.Tensor | DSV4Rows:
        """A layer's memory, `[tokens, 1, columns]`, as rows in pages; FP8 rows have a scale of 1."""
        pages = buffer.view(-1, self.page_size, buffer.shape[-1])
        form = get_format(buffer.dtype)
        if form.kind == "float":
            return pages
        return fp8_rows(pages, form.name)

    def _plan(
        self, rows: torch.Tensor | DSV4Rows, heads: int, q_len: int, dtype: torch.dtype, sm_scale: float,
        max_batch: int,
    ) -> SparsePlan:  # fmt: skip
        return latent_plan(
            rows, num_qo_heads=heads, page_size=self.page_size, q_len=q_len, dtype=dtype, device=self.device,
            sm_scale=sm_scale, max_batch=max_batch, max_seq_len=self.max_context_len,
            batch_invariant=self.deterministic,
        )  # fmt: skip

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of a layer to the rows of its pages, which first take the new tokens, or of a prompt.

        Args:
            q: `[tokens, num_qo_heads * channels]`; the channels are those of a row, or of expanded keys.
            k, v: `[tokens, 1, columns]`, the new tokens' rows and their latents; of a prompt without a prefix
                `[tokens, num_qo_heads, channels]`.
            layer: SGLang's `RadixAttention`.
            forward_batch: where the new tokens go, and how many each request has.
            save_kv_cache: whether new rows are to be stored.
            sinks, **kwargs: what other backends take; refused unless None.

        Returns:
            `[tokens, num_qo_heads * value's channels]`.

        Raises:
            UnsupportedError: for what narrowkv does not serve.
        """
        if kwargs or sinks is not None:
            check_options({"sinks": sinks, **kwargs})
        assert self.forward_metadata is not None
        group = self.forward_metadata[False]
        tokens = group.step.num_tokens
        rows = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        if layer.head_dim != self._latents.kv_cache_dim:
            starts, most = group.step.query_start_loc, group.step.max_query_len
            assert starts is not None
            k, v = (x[:tokens].view(tokens, layer.tp_k_head_num, -1) for x in (k, v))
            found, _ = attend_expanded(
                rows[:tokens], k, v, starts, starts, most, most, causal=True, sm_scale=layer.scaling
            )
        else:
            if save_kv_cache and k is not None:
                where = KVWriteLoc.for_batch(forward_batch)
                self.pool.set_kv_buffer(layer, where, k.view(k.shape[0], 1, -1), v)
            found = self._attend_rows(rows[:tokens], layer, forward_batch)
        out = found
        if tokens != rows.shape[0]:
            out = found.new_zeros(rows.shape[0], *found.shape[1:])
            out[:tokens] = found
        return out.flatten(1)

    forward_decode = forward_extend

    def _attend_rows(self, q: torch.Tensor, layer: Any, forward_batch: Any) -> torch.Tensor:
        """Attention of absorbed queries to a layer's rows."""
        buffer = self.pool.get_key_buffer(layer.layer_id)  # waits for tokens that SGLang is loading
        kept = self._rows.get(layer.layer_id)
        if kept is None or kept[0] != buffer.data_ptr():
            check_layer(layer, latent=True)
            kept = self._rows[layer.layer_id] = buffer.data_ptr(), self._as_rows(buffer)
        assert self.forward_metadata is not None
        step, rows, heads = self.forward_metadata[False].step, kept[1], q.shape[1]
        if step.query_start_loc is None:
            plan = self._plan(rows, heads, step.max_query_len, q.dtype, layer.scaling, self.max_batch)
            o = latent_decode(q, rows, step.table, plan=plan)
            assert isinstance(o, torch.Tensor)
            return o
        if self._pieces is None or self._pieces[0] is not step:  # of another step
            q_lens = forward_batch.extend_seq_lens, list(forward_batch.extend_seq_lens_cpu)
            self._pieces = step, Pieces.cut(step.table, *q_lens)
        pieces = self._pieces[1]
        most = 1 << (pieces.table.batch_size - 1).bit_length()
        plan = self._plan(rows, heads, MOST_QUERIES, q.dtype, layer.scaling, most)
        o = latent_decode(pieces.gather(q), rows, pieces.table, plan=plan)
        assert isinstance(o, torch.Tensor)
        return pieces.scatter(o)
