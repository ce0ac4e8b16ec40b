"""narrowkv as an attention backend of SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from narrowkv.attn_decode import DecodeShape
from narrowkv.engines.sglang.layers import NOT_SERVED, Layer, check_options, make_layer
from narrowkv.engines.sglang.pools import layer_buffers, pool_reasons, stored_format
from narrowkv.engines.steps import (
    MAX_DECODE_TOKENS,
    Step,
    attend,
    attend_batch_invariant,
    divide,
    reserve_decode,
)
from narrowkv.paged_cache import (
    PageTable,
    append,
    pack_tree_mask,
    tree_mask_from_custom_mask,
)
from narrowkv.runtime.errors import UnsupportedError

# Algorithms whose guesses are a tree, or a chain if each draft step proposes one token.
_TREES = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
_NGRAM = "NGRAM"  # trees of any shape, whose masks have all keys
_MOST_GUESSES = 64  # tokens of a tree
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

    # Query tokens that a request of a decode step may have.
    _most_guesses: ClassVar[int] = _MOST_GUESSES

    def __init__(self, runner: Any) -> None:
        super().__init__()
        args = runner.server_args
        # SGLang's models ask the backend of a step for its pools by these names.
        self.pool = self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        reasons = self._pool_reasons()
        self.guesses = _verified_tokens(runner, reasons, self._most_guesses)
        if args.dcp_size > 1:
            reasons.append("--dcp-size is more than 1")
        self.deterministic = bool(args.enable_deterministic_inference)
        self._attend = attend_batch_invariant if self.deterministic else attend
        if self.deterministic and args.enable_mixed_chunk:
            reasons.append("--enable-mixed-chunk puts decodes into prefills, so it cannot be deterministic")
        if runner.model_config.is_encoder_decoder:
            reasons.append("it has an encoder")
        if runner.model_config.attention_chunk_size is not None:
            reasons.append("some layers attend within chunks")
        if reasons:
            raise UnsupportedError(
                f"narrowkv cannot serve this model in SGLang: {'; '.join(reasons)}: {NOT_SERVED}"
            )
        self.token_slots = self.req_to_token_pool.req_to_token
        self.page_size, self.device = self.pool.page_size, self.token_slots.device
        self.windows = isinstance(self.pool, SWAKVPool) and self.pool.swa_layer_nums > 0
        self.max_context_len = int(self.token_slots.shape[1])
        algorithm = args.speculative_algorithm
        self.in_trees = algorithm == _NGRAM or (algorithm is not None and args.speculative_eagle_topk != 1)
        if self.in_trees and self.windows:
            raise UnsupportedError(
                "narrowkv verifies trees of guesses in models without sliding windows: set "
                f"--speculative-eagle-topk 1, or {NOT_SERVED}"
            )
        self.forward_metadata: dict[bool, _Group] | None = None
        self._layers: dict[int, Layer] = {}
        self._captured: dict[tuple[int, int], dict[bool, _Group]] = {}
        self._window_slots: torch.Tensor | None = None
        self._verify_mask: VerifyMask | None = None
        self._allocate(self.token_slots.shape[0])
        self._reserve(runner.model_config, runner.dtype)

    def _pool_reasons(self) -> list[str]:
        return pool_reasons(self.pool)

    def _reserve(self, config: Any, dtype: torch.dtype) -> None:
        """Allocates the workspace of decode steps while SGLang is being set up."""
        ranks = get_parallel().attn_tp_size
        shape = DecodeShape(
            batch=self.max_batch, q_len=self.guesses, head_dim=config.head_dim, page_size=self.page_size,
            num_qo_heads=config.num_attention_heads // ranks,
            num_kv_heads=config.get_num_kv_heads(ranks), q_dtype=dtype, v_head_dim=self.pool.get_v_head_dim(),
            capacity=self._tables[False].shape[1] * self.page_size,
        )  # fmt: skip
        name, group = stored_format(self.pool)
        self._exponent = "mse" if group is None else "sglang"  # of FP4's scales: the pool's own rule
        reserve_decode(shape, name, self.device, scale_group=group, batch_invariant=self.deterministic)

    def _allocate(self, max_batch: int) -> None:
        """Page tables for this many requests, one for each pool."""
        self.max_batch = max_batch
        pages = -(-self.token_slots.shape[1] // self.page_size)
        self._tables = {
            window: torch.zeros(max_batch, pages, dtype=torch.int32, device=self.device)
            for window in (False, True)[: 1 + self.windows]
        }
        self._verified_lens = torch.zeros(max_batch, dtype=torch.int64, device=self.device)
        if self.guesses > 1:
            bits = torch.int32 if self.guesses <= 32 else torch.int64
            self._tree_bits = torch.zeros(max_batch * self.guesses, dtype=bits, device=self.device)
            seen = torch.ones(max_batch * self.guesses**2, dtype=torch.bool, device=self.device)
            self._verify_mask = VerifyMask(seen, TreeMaskMode.QLEN_ONLY, max_batch, is_read=self.in_trees)

    @property
    def verify_mask(self) -> Any:
        """SGLang's buffer of masks between the guesses of a request; None without speculative decoding."""
        return self._verify_mask

    def _tree(self, size: int, guesses: int) -> torch.Tensor:
        """Bits of what a batch's guesses see, `[size, guesses]`, in memory that graphs know."""
        return self._tree_bits[: size * guesses].view(size, guesses)

    def _read_tree(self, spec_info: Any, seen: torch.Tensor, lens: torch.Tensor) -> None:
        """Packs the masks of a batch's guesses.

        Args:
            spec_info: of the step.
            seen: the masks one after the other: `[guesses, guesses]` each, or `[guesses, length]` of NGRAM.
            lens: lengths of the requests, their guesses included.
        """
        guesses, size = spec_info.num_tokens_per_req, lens.shape[0]
        if spec_info.tree_topk < 1:
            entries = lens * guesses
            bits = tree_mask_from_custom_mask(seen, torch.cumsum(entries, 0) - entries, lens, guesses)
        else:
            bits = pack_tree_mask(seen[: size * guesses**2].view(size, guesses, guesses))
        self._tree(size, guesses).copy_(bits)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Reads the tree of a step that SGLang has prepared before the draft model made it."""
        if self.in_trees and cuda_graph_bs is None and self.forward_metadata is not None:
            lens = self.forward_metadata[False].step.table.seq_lens
            assert lens is not None
            self._read_tree(spec_info, spec_info.custom_mask, lens)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Reads the tree of the step, whose mask SGLang has written when the graph is replayed."""
        if not (self.in_trees and forward_batch.forward_mode.is_target_verify()):
            return
        if forward_batch.spec_info.tree_topk > 1:
            assert self._verify_mask is not None
            lens = self._verified_lens[: forward_batch.batch_size]
            self._read_tree(forward_batch.spec_info, self._verify_mask.buffer, lens)

    def _fill_tables(self, batch: Any, guesses: int = 0) -> int:
        """Writes the pages of a batch's requests, and returns how many tokens its longest one has at most.

        `guesses` are tokens of each request that SGLang's lengths leave out.
        """
        lens, most = batch.seq_lens_cpu, self.max_context_len
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
        tree: bool = False,
    ) -> dict[bool, _Group]:
        """Steps of a batch: without `tokens` and `starts`, every request has `longest_q` query tokens."""
        groups, size = {}, batch.batch_size
        tokens = size * longest_q if tokens is None else tokens
        lens = batch.seq_lens[:size] if lens is None else lens
        for window, table in self._tables.items():
            pages = PageTable.from_block_table(table[:size], lens, page_size=self.page_size)
            if tree:
                pages = pages.with_tree_mask(self._tree(size, longest_q))
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
            guesses, size = batch.spec_info.num_tokens_per_req, batch.batch_size
            longest = self._fill_tables(batch, guesses)
            starts, lens = None, batch.seq_lens[:size] + guesses
            if self.in_trees:
                self._read_tree(batch.spec_info, batch.spec_info.custom_mask, lens)
            elif guesses > MAX_DECODE_TOKENS:
                ends = (size + 1) * guesses
                starts = torch.arange(0, ends, guesses, dtype=torch.int32, device=self.device)
            self.forward_metadata = self._groups(
                batch, guesses, longest, starts=starts, lens=lens, tree=self.in_trees
            )
            return
        if mode not in _EXTENDS:
            raise UnsupportedError(f"narrowkv has no steps of the kind {mode.name}: {NOT_SERVED}")
        longest = self._fill_tables(batch)
        counts = batch.extend_seq_lens
        starts = torch.zeros(batch.batch_size + 1, dtype=torch.int32, device=self.device)
        torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
        new, host_lens = batch.extend_seq_lens_cpu, batch.seq_lens_cpu
        lens = None if host_lens is None else host_lens.tolist()
        groups = self._groups(batch, max(new), longest, tokens=sum(new), starts=starts)
        for group in groups.values():  # decodes come after prefills
            group.step = divide(group.step, [0, *accumulate(new)], lens)
        self.forward_metadata = groups

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
        most = self._most_guesses if self.in_trees else min(self._most_guesses, MAX_DECODE_TOKENS)
        if not (mode.is_decode() or 0 < guesses <= most):
            raise UnsupportedError(
                f"narrowkv captures steps of at most {most} tokens a request in graphs, not "
                f"{mode.name} steps of {guesses or 'any number'}"
            )
        self._fill_tables(batch, guesses)
        size = batch.batch_size
        lens = None
        if guesses:
            lens = self._verified_lens[:size]
            torch.add(batch.seq_lens[:size], guesses, out=lens)
            if self.in_trees and batch.spec_info.tree_topk < 1:
                self._read_tree(batch.spec_info, batch.spec_info.custom_mask, lens)
        if self._window_slots is not None:
            tokens = batch.out_cache_loc.shape[0]
            self._window_slots[:tokens] = self.pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        if in_capture:
            groups = self._groups(
                batch, max(guesses, 1), self.max_context_len, lens=lens, tree=guesses > 0 and self.in_trees
            )
            if self._window_slots is not None:
                groups[True].slots = self._window_slots[: batch.out_cache_loc.shape[0]]
            self._captured[size, guesses] = groups
        self.forward_metadata = self._captured[size, guesses]

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that fill up a captured batch."""
        return 1

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
            k, v: `[tokens, num_kv_heads, channels]`, the new tokens; None if they are stored already.
            layer: SGLang's `RadixAttention`.
            forward_batch: not read: `init_forward_metadata` has.
            save_kv_cache: whether new tokens are to be stored.
            sinks: `[num_qo_heads]`, a logit per head whose value is 0.
            **kwargs: what other backends take; refused unless None.

        Returns:
            `[tokens, num_qo_heads * v_head_dim]`.

        Raises:
            UnsupportedError: for what narrowkv does not serve.
        """
        if kwargs:
            check_options(kwargs)
        found = self._layers.get(layer.layer_id)
        buffers = layer_buffers(self.pool, layer.layer_id)  # waits for tokens that SGLang is loading
        if found is None or found.layer is not layer or found.address != buffers[0].data_ptr():
            found = self._layers[layer.layer_id] = make_layer(self.pool, layer, buffers)
        assert self.forward_metadata is not None
        group = self.forward_metadata[found.window]
        slots, step = group.slots, group.step
        cache, heads = found.cache, layer.tp_q_head_num
        if save_kv_cache and k is not None:
            if k.dim() == 2:
                k, v = (x.view(x.shape[0], layer.tp_k_head_num, -1) for x in (k, v))
            if slots.shape[0] != k.shape[0]:
                slots = slots[: k.shape[0]]
            append(cache, k, v, slots, exponent=self._exponent)
        rows, tokens = q.reshape(-1, heads, layer.head_dim), step.num_tokens
        shape = rows.shape[0], heads, layer.v_head_dim
        if tokens == rows.shape[0]:
            out = written = rows.new_empty(shape)
        else:
            out = rows.new_zeros(shape)
            rows, written = rows[:tokens], out[:tokens]
        self._attend(step, rows, cache, written, max_batch=self.max_batch, sinks=sinks, **found.options)
        return out.flatten(1)

    forward_decode = forward_extend


def _verified_tokens(runner: Any, reasons: list[str], most: int) -> int:
    """Query tokens of a request in a decode step; adds why guesses cannot be verified to the reasons."""
    args = runner.server_args
    algorithm = args.speculative_algorithm
    if algorithm is None:
        return 1
    if runner.is_draft_worker:
        reasons.append("its draft model takes another backend: set --speculative-draft-attention-backend")
    elif algorithm not in (*_TREES, _NGRAM):
        reasons.append(f"{algorithm} is not among {', '.join((*_TREES, _NGRAM))}")
    elif args.speculative_num_draft_tokens > most:
        reasons.append(f"--speculative-num-draft-tokens is more than {most}")
    return int(args.speculative_num_draft_tokens or 1)
