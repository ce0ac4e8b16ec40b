"""narrowkv as an attention backend of SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from narrowkv.attn_decode import DecodeShape
from narrowkv.engines.sglang.pools import has_window, layer_cache, pool_reasons
from narrowkv.engines.steps import MAX_DECODE_TOKENS, Step, attend, reserve_decode
from narrowkv.paged_cache import PagedKVCache, PageTable, append
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import UnsupportedError

_NOT_SERVED = "use another --attention-backend for this model"
# Algorithms whose guesses are a chain if each draft step proposes one token.
_CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
# Steps with the new tokens of each request, all causal.
_EXTENDS = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)


@dataclass
class _Group:
    """What layers whose tokens lie in one pool share.

    Attributes:
        slots: `[tokens]` int64, where the step's tokens are stored.
        step: the step, with the pages of that pool.
    """

    slots: torch.Tensor
    step: Step


class NarrowAttentionBackend(AttentionBackend):
    """Attention over SGLang's pools: stores new tokens and attends to the pages, nothing is copied.

    A step's page table is made of SGLang's table of token slots, once for all layers, in memory that is
    allocated here; nothing is read from the device.

    Args:
        runner: SGLang's `ModelRunner`.

    Raises:
        UnsupportedError: for pools, models and options that narrowkv does not serve.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        args = runner.server_args
        self.pool = runner.token_to_kv_pool
        reasons = ["it has an MLA cache"] if runner.use_mla_backend else pool_reasons(self.pool)
        guesses = _verified_tokens(runner, reasons)
        if args.dcp_size > 1:
            reasons.append("--dcp-size is more than 1")
        if runner.model_config.is_encoder_decoder:
            reasons.append("it has an encoder")
        if reasons:
            raise UnsupportedError(
                f"narrowkv cannot serve this model in SGLang: {'; '.join(reasons)}: {_NOT_SERVED}"
            )
        self.token_slots = runner.req_to_token_pool.req_to_token
        self.page_size, self.device = self.pool.page_size, self.token_slots.device
        self.windows = isinstance(self.pool, SWAKVPool) and self.pool.swa_layer_nums > 0
        self.forward_metadata: dict[bool, _Group] | None = None
        self._caches: dict[int, tuple[int, PagedKVCache]] = {}
        self._captured: dict[tuple[int, int], dict[bool, _Group]] = {}
        self._window_slots: torch.Tensor | None = None
        self._allocate(self.token_slots.shape[0])
        config, ranks = runner.model_config, get_parallel().attn_tp_size
        shape = DecodeShape(
            batch=self.max_batch, q_len=guesses, head_dim=config.head_dim, page_size=self.page_size,
            num_qo_heads=config.num_attention_heads // ranks,
            num_kv_heads=config.get_num_kv_heads(ranks), q_dtype=runner.dtype,
            capacity=self._tables[False].shape[1] * self.page_size,
        )  # fmt: skip
        reserve_decode(shape, get_format(self.pool.dtype).name, self.device)

    def _allocate(self, max_batch: int) -> None:
        """Page tables for this many requests, one for each pool."""
        self.max_batch = max_batch
        pages = -(-self.token_slots.shape[1] // self.page_size)
        self._tables = {
            window: torch.zeros(max_batch, pages, dtype=torch.int32, device=self.device)
            for window in (False, True)[: 1 + self.windows]
        }
        self._verified_lens = torch.zeros(max_batch, dtype=torch.int64, device=self.device)

    def _fill_tables(self, batch: Any, guesses: int = 0) -> int:
        """Writes the pages of a batch's requests, and returns how many tokens its longest one has at most.

        `guesses` are tokens of each request that SGLang's lengths leave out.
        """
        lens, most = batch.seq_lens_cpu, int(self.token_slots.shape[1])
        longest = most if lens is None else min(int(lens.max()) + guesses, most)
        firsts = self.token_slots[:, : max(longest, 1) : self.page_size]
        slots = firsts.index_select(0, batch.req_pool_indices)
        for window, table in self._tables.items():
            found = self.pool.translate_loc_from_full_to_swa(slots) if window else slots
            part = table[: slots.shape[0], : slots.shape[1]]
            torch.div(found, self.page_size, rounding_mode="floor", out=part)
        return longest

    def _groups(
        self,
        batch: Any,
        longest_q: int,
        longest: int,
        *,
        tokens: int | None = None,
        starts: torch.Tensor | None = None,
        lens: torch.Tensor | None = None,
    ) -> dict[bool, _Group]:
        """Steps of a batch: without `tokens` and `starts`, every request has `longest_q` query tokens."""
        groups, size = {}, batch.batch_size
        tokens = size * longest_q if tokens is None else tokens
        lens = batch.seq_lens[:size] if lens is None else lens
        for window, table in self._tables.items():
            pages = PageTable.from_block_table(table[:size], lens, page_size=self.page_size)
            slots = batch.out_cache_loc
            if window:
                slots = self.pool.translate_loc_from_full_to_swa(slots)
            groups[window] = _Group(slots, Step(tokens, longest_q, longest, starts, pages))
        return groups

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepares a step that runs outside graphs.

        Raises:
            UnsupportedError: for the steps of a draft model, and of models that are not causal.
        """
        mode, batch = forward_batch.forward_mode, forward_batch
        if mode.is_idle():
            return
        if mode.is_decode():
            longest = self._fill_tables(batch)
            self.forward_metadata = self._groups(batch, 1, longest)
            return
        if mode.is_target_verify():
            guesses = batch.spec_info.num_tokens_per_req
            longest = self._fill_tables(batch, guesses)
            starts = None
            if guesses > MAX_DECODE_TOKENS:
                ends = (batch.batch_size + 1) * guesses
                starts = torch.arange(0, ends, guesses, dtype=torch.int32, device=self.device)
            lens = batch.seq_lens[: batch.batch_size] + guesses
            self.forward_metadata = self._groups(batch, guesses, longest, starts=starts, lens=lens)
            return
        if mode not in _EXTENDS:
            raise UnsupportedError(f"narrowkv has no steps of the kind {mode.name}: {_NOT_SERVED}")
        longest = self._fill_tables(batch)
        counts = batch.extend_seq_lens
        starts = torch.zeros(batch.batch_size + 1, dtype=torch.int32, device=self.device)
        torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
        new = batch.extend_seq_lens_cpu
        self.forward_metadata = self._groups(batch, max(new), longest, tokens=sum(new), starts=starts)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates what graphs read, for this many requests and tokens."""
        if max_bs > self.max_batch:
            self._allocate(max_bs)
        if self.windows:
            self._window_slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepares a step that is captured or replayed: fills the tensors that its graph reads.

        Raises:
            UnsupportedError: for steps other than decode steps and those that verify guesses.
        """
        mode, batch = forward_batch.forward_mode, forward_batch
        if mode.is_idle():
            return
        guesses = 0
        if mode.is_target_verify():
            guesses = batch.spec_info.num_tokens_per_req
        if not (mode.is_decode() or 0 < guesses <= MAX_DECODE_TOKENS):
            raise UnsupportedError(
                f"narrowkv captures steps of at most {MAX_DECODE_TOKENS} tokens a request in graphs, not "
                f"{mode.name} steps of {guesses or 'any number'}"
            )
        self._fill_tables(batch, guesses)
        size = batch.batch_size
        lens = None
        if guesses:
            lens = self._verified_lens[:size]
            torch.add(batch.seq_lens[:size], guesses, out=lens)
        if self._window_slots is not None:
            tokens = batch.out_cache_loc.shape[0]
            self._window_slots[:tokens] = self.pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        if in_capture:
            groups = self._groups(batch, max(guesses, 1), self.token_slots.shape[1], lens=lens)
            if self._window_slots is not None:
                groups[True].slots = self._window_slots[: batch.out_cache_loc.shape[0]]
            self._captured[size, guesses] = groups
        self.forward_metadata = self._captured[size, guesses]

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that fill up a captured batch."""
        return 1

    def _cache_of(self, layer: Any) -> PagedKVCache:
        """The layer's pages as views, made again only if SGLang has moved them."""
        index = layer.layer_id
        k, v = self.pool.get_key_buffer(index), self.pool.get_value_buffer(index)
        found = self._caches.get(index)
        if found is None or found[0] != k.data_ptr():
            found = self._caches[index] = (k.data_ptr(), layer_cache(self.pool, layer, k, v))
        return found[1]

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
        """Attention of a layer to its pages, which first take the new tokens.

        Args:
            q: `[tokens, num_qo_heads * head_dim]`.
            k, v: `[tokens, num_kv_heads, head_dim]`, the new tokens; None if they are stored already.
            layer: SGLang's `RadixAttention`.
            forward_batch: not read: `init_forward_metadata` has.
            save_kv_cache: whether new tokens are to be stored.
            sinks: `[num_qo_heads]`, a logit per head whose value is 0.
            **kwargs: what other backends take; refused unless None.

        Returns:
            Like q.

        Raises:
            UnsupportedError: for what narrowkv does not serve.
        """
        _check(layer, kwargs)
        assert self.forward_metadata is not None
        group, cache = self.forward_metadata[has_window(self.pool, layer.layer_id)], self._cache_of(layer)
        if save_kv_cache and k is not None:
            rows = (-1, layer.tp_k_head_num, layer.head_dim)
            append(cache, k.view(rows), v.view(rows), group.slots[: k.shape[0]])
        heads = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        tokens = group.step.num_tokens
        out = torch.empty_like(heads) if tokens == heads.shape[0] else torch.zeros_like(heads)
        window = layer.sliding_window_size
        attend(
            group.step, heads[:tokens], cache, out[:tokens], max_batch=self.max_batch, sinks=sinks,
            sm_scale=layer.scaling, logits_soft_cap=layer.logit_cap or 0.0,
            window_left=-1 if window is None else window,
        )  # fmt: skip
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)

    forward_decode = forward_extend


def _verified_tokens(runner: Any, reasons: list[str]) -> int:
    """Query tokens of a request in a decode step; adds why guesses cannot be verified to the reasons."""
    args = runner.server_args
    algorithm = args.speculative_algorithm
    if algorithm is None:
        return 1
    if runner.is_draft_worker:
        reasons.append("its draft model takes another backend: set --speculative-draft-attention-backend")
    elif algorithm not in _CHAINS or args.speculative_eagle_topk != 1:
        reasons.append(
            f"{algorithm} with --speculative-eagle-topk {args.speculative_eagle_topk} verifies trees, and "
            f"narrowkv verifies chains ({', '.join(_CHAINS)} with 1)"
        )
    return int(args.speculative_num_draft_tokens or 1)


def _check(layer: Any, options: dict[str, Any]) -> None:
    """Refuses what a layer asks for beyond causal attention of a decoder.

    Raises:
        UnsupportedError: naming it.
    """
    wanted = [name for name, value in options.items() if value is not None]
    if layer.attn_type != AttentionType.DECODER or layer.is_cross_attention:
        wanted.append("attention that is not a decoder's own")
    if layer.xai_temperature_len > 0:
        wanted.append("xai_temperature_len")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        wanted.append(f"logit_capping_method {layer.logit_capping_method}")
    if wanted:
        raise UnsupportedError(f"narrowkv's backend has no {', '.join(wanted)}: {_NOT_SERVED}")
