"""narrowkv as an attention backend of vLLM's V1 engine."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVQuantMode

from narrowkv.attn_decode import DecodeShape
from narrowkv.context_parallel import ShardLayout
from narrowkv.engines.ranks import Ranks, RanksStep, attend_over_ranks
from narrowkv.engines.steps import (
    MAX_DECODE_TOKENS,
    SCRATCH_BYTES,
    Step,
    attend,
    divide,
    reserve_decode,
)
from narrowkv.engines.vllm.slots import (
    CACHE_DTYPES,
    INT4,
    INT8,
    OWN_SLOTS,
    PER_TOKEN_HEAD,
    ULTRAQUANT,
    chosen_slots,
    format_of,
    layer_cache,
    own_slots_of,
    randomly_rotated,
    rotation_block,
    scales_of,
    slot_bytes,
    slot_reasons,
)
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope, append
from narrowkv.paged_cache.layouts import HEAD_DIMS
from narrowkv.runtime.errors import UnsupportedError

# The mode of cache dtypes that plugins register; vLLM 0.32 has none.
_CUSTOM = getattr(KVQuantMode, "CUSTOM", None)
# What slots of "fp8" hold in vLLM 0.32, which has no names for narrowkv's own: the layer that was made last
# writes it, because vLLM asks for the size of a slot without its configuration.
_beside_fp8 = ["fp8"]


class NarrowMetadataBuilder(AttentionMetadataBuilder):
    """Turns vLLM's batch into a `Step`; nothing is read from the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size
        sharded = getattr(kv_cache_spec, "dcp_sharded", True)
        self.ranks = vllm_config.parallel_config.decode_context_parallel_size if sharded else 1
        # Adaptive verification shortens requests on the device; the host knows bounds of their lengths.
        speculative = vllm_config.speculative_config
        self.ragged = bool(getattr(speculative, "enable_adaptive_verification", False))
        if self.ragged and self.ranks > 1:
            raise UnsupportedError(
                "narrowkv's backend takes the host's query lengths under decode context parallelism: "
                "turn adaptive verification off"
            )
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """Graphs of decode steps are replayed with any query lengths up to this one."""
        return MAX_DECODE_TOKENS

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """The metadata of a step."""
        batch = common_attn_metadata
        if batch.causal is not True:
            raise UnsupportedError("narrowkv's backend serves causal attention, got causal=False from vLLM")
        requests = batch.num_reqs
        # Under decode context parallelism all ranks have the same page ids, each a page of tokens of its own.
        step = (Step if self.ranks == 1 else RanksStep)(
            batch.num_actual_tokens,
            batch.max_query_len,
            batch.max_seq_len,
            batch.query_start_loc[: requests + 1],
            PageTable.from_block_table(
                batch.block_table_tensor[:requests],
                batch.seq_lens[:requests],
                page_size=self.block_size * self.ranks,
            ),
            self.ragged and batch.max_query_len > 1,
        )
        if self.ranks > 1 or step.decodes or step.ragged:
            return step
        bounds = getattr(batch, "seq_lens_cpu_upper_bound", None)
        return divide(
            step,
            batch.query_start_loc_cpu[: requests + 1].tolist(),
            None if bounds is None else bounds[:requests].tolist(),
            decode_tokens=self.reorder_batch_threshold,
        )


class NarrowAttentionBackend(AttentionBackend):
    """What vLLM asks of a backend before it makes layers."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*CACHE_DTYPES, *OWN_SLOTS]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's log."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[NarrowAttention]:
        """The class of layers."""
        return NarrowAttention

    @staticmethod
    def get_builder_cls() -> type[NarrowMetadataBuilder]:
        """The class that prepares steps."""
        return NarrowMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any multiple of 16."""
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Channels of a head."""
        return list(HEAD_DIMS)

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks are served."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Sliding windows are served."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Where vLLM shortens requests on the device, their lengths are read there."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """With VLLM_BATCH_INVARIANT a token gets the same bits in any step."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """FP8 scales may be per head."""
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Tells vLLM how many bytes a slot has where it holds scales."""
        names = {
            KVQuantMode.ULTRAQUANT_4BIT: ULTRAQUANT,
            KVQuantMode.FP8_PER_TOKEN_HEAD: PER_TOKEN_HEAD,
            KVQuantMode.INT8_PER_TOKEN_HEAD: INT8,
            KVQuantMode.INT4_PER_TOKEN_HEAD: INT4,
        }
        if _CUSTOM is None:
            names[KVQuantMode.FP8_PER_TENSOR] = _beside_fp8[0]
        elif spec.kv_quant_mode == _CUSTOM:
            names[_CUSTOM] = own_slots_of(spec.dtype)
        name = names.get(spec.kv_quant_mode, "auto")
        content = slot_bytes(name, spec.head_size)
        if content is None or spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=content)


class NarrowAttention(AttentionImpl):
    """Attention of one layer: writes new tokens to vLLM's cache and attends to its pages.

    Raises:
        UnsupportedError: for ALiBi and for attention that is not a decoder's own.
    """

    # Decode context parallelism: partial results are merged by natural logarithms, without sinks, and each
    # speculative token has the keys that it attends to, whatever the interleave.
    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True
    supports_quant_query_input = False
    # The rotary embedding of the step, which its layers share, and what it was made of.
    _rope: ClassVar[tuple[Any, Rope] | None] = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None or attn_type != AttentionType.DECODER:
            what = "ALiBi" if alibi_slopes is not None else f"{attn_type} attention"
            raise UnsupportedError(
                f"narrowkv's backend has no {what}: choose another --attention-backend for this model"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        config = get_current_vllm_config_or_none()
        self.kv_cache_dtype = kv_cache_dtype
        if kv_cache_dtype.startswith("fp8"):  # layers may be left in 16 bits
            additional = None if config is None else config.additional_config
            self.kv_cache_dtype = chosen_slots(kv_cache_dtype, additional, has_names=_CUSTOM is not None)
            _beside_fp8[0] = self.kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.options: dict[str, Any] = {
            "sm_scale": self.scale,
            "logits_soft_cap": logits_soft_cap or 0.0,
            "window_left": -1 if sliding_window is None else sliding_window - 1,
        }
        # UltraQuant's slots have keys rotated, which their cache says, and scales by a rule of their own.
        # INT4 slots have keys and values rotated.
        self.exponent, self.rotates = "mse", self.kv_cache_dtype == INT4
        if self.rotates:
            self.options["sm_scale"] /= rotation_block(head_size)
        elif self.kv_cache_dtype == ULTRAQUANT:
            self.exponent = "ultraquant"
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        if self.batch_invariant and (self.rotates or self.dcp_world_size > 1):
            what = "decode context parallelism" if self.dcp_world_size > 1 else INT4
            raise UnsupportedError(f"narrowkv's backend is not batch-invariant with {what}")
        for reason in slot_reasons(self.kv_cache_dtype, head_size):
            raise UnsupportedError(f"{reason}: choose kv_cache_dtype fp8 for this model")
        self._cache: tuple[weakref.ref[torch.Tensor], PagedKVCache] | None = None
        self._max_batch = 1
        self._ranks: Ranks | None = None
        self._reserve(config)

    def _reserve(self, config: Any) -> None:
        """Allocates the decode workspace while the model is loaded, before vLLM measures its memory."""
        if config is None:
            return
        self._max_batch = config.scheduler_config.max_num_seqs
        if self.dcp_world_size > 1:
            parallel = config.parallel_config
            layout = ShardLayout(
                self.dcp_world_size, self.dcp_rank, interleave=parallel.cp_kv_cache_interleave_size
            )
            if getattr(parallel, "dcp_q_replicate", None):
                raise UnsupportedError(
                    "narrowkv's backend takes each rank's own query heads under decode context parallelism: "
                    "leave dcp_q_replicate off"
                )
            comm = getattr(parallel, "dcp_comm_backend", None) or "ag_rs"
            self._ranks = Ranks(layout, get_dcp_group().device_group, comm)
        device = torch.empty(0).device
        dtype = config.model_config.dtype
        # A decode step has a token of each request and its guesses.
        shape = DecodeShape(
            batch=self._max_batch, q_len=1 + config.num_speculative_tokens,
            num_qo_heads=self.num_heads * self.dcp_world_size,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_size,
            page_size=config.cache_config.block_size or 16,
            capacity=config.model_config.max_model_len, q_dtype=dtype,
        )  # fmt: skip
        form = format_of(self.kv_cache_dtype, dtype, device)
        reserve_decode(shape, form, device, **scales_of(self.kv_cache_dtype))
        if self._ranks is not None:
            self._ranks.reserve(shape, device)

    def cache_of(self, layer: Any, kv_cache: torch.Tensor) -> PagedKVCache:
        """The layer's pages as views, made again only if vLLM has another cache.

        They are dropped with vLLM's tensor: it frees the small cache that it profiles with before it measures
        what is free.
        """
        if self._cache is None or self._cache[0]() is not kv_cache:
            pages = kv_cache.data  # a view of kv_cache itself would keep it
            made = layer_cache(pages, self.kv_cache_dtype, self.head_size, layer._k_scale, layer._v_scale)
            self._cache = (weakref.ref(kv_cache, self._forget), made)
        return self._cache[1]

    def _forget(self, kv_cache: weakref.ref[torch.Tensor]) -> None:
        if self._cache is not None and self._cache[0] is kv_cache:
            self._cache = None

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Stores new tokens `[tokens, num_kv_heads, head_dim]`; slot -1 is padding."""
        k, v, count = key, value, slot_mapping.shape[0]
        if k.shape[0] != count:
            k, v = k[:count], v[:count]
        if self.rotates:
            k, v = randomly_rotated(k), randomly_rotated(v)
        append(self.cache_of(layer, kv_cache), k, v, slot_mapping, exponent=self.exponent)

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether `do_rope_and_kv_cache_update` serves the layer.

        It does unless values are rotated, too (INT4), or attention needs the new keys again (decode context
        parallelism).
        """
        return not self.rotates and self._ranks is None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether attention writes outputs that vLLM would quantise next, so that its fusion leaves that out.

        It does to the device's FP8 with one scale that is known before. INT4 slots rotate outputs back, and
        decode context parallelism merges partial results.
        """
        return quant_key == kFp8StaticTensorSym and not self.rotates and self._ranks is None

    def do_rope_and_kv_cache_update(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        positions: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox: bool, kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:  # fmt: skip
        """Rotates queries in place and stores rotated keys, in one launch; `key` itself is left as it is.

        Args:
            layer: vLLM's layer, for its scales.
            query: `[tokens, num_heads, head_dim]`.
            key, value: `[tokens, num_kv_heads, head_dim]`.
            positions: `[tokens]` int64.
            cos_sin_cache: `[positions, rotary_dim]`, cosines and then sines.
            is_neox: whether the halves of the rotary dims are partners; else neighbours are.
            kv_cache: the layer's.
            layer_slot_mapping: `[tokens]` int64; slot -1 is padding.
        """
        count = layer_slot_mapping.shape[0]
        append(
            self.cache_of(layer, kv_cache), key[:count], value[:count], layer_slot_mapping,
            rope=self._rope_of(positions[:count], cos_sin_cache, is_neox), q=query[:count],
            exponent=self.exponent,
        )  # fmt: skip

    @staticmethod
    def _rope_of(positions: torch.Tensor, table: torch.Tensor, is_neox: bool) -> Rope:
        """The rotary embedding of these tokens, made only if that of the previous layer is another."""
        found = NarrowAttention._rope
        key = (
            positions.data_ptr(), positions.shape, positions.stride(), positions.dtype, table.data_ptr(),
            table.shape, table.dtype, is_neox,
        )  # fmt: skip
        if found is None or found[0] != key:
            half = table.shape[1] // 2
            rope = Rope(table[:, :half], table[:, half:], positions, "neox" if is_neox else "gptj")
            found = NarrowAttention._rope = (key, rope)
        return found[1]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a step's tokens `[tokens, num_heads, head_dim]` into `output`.

        With `output_scale`, one fp32 number, `output` is FP8: see `fused_output_quant_supported`.
        """
        unserved = output_scale is not None and (self.rotates or self._ranks is not None)
        if unserved or output_block_scale is not None:
            raise UnsupportedError(
                "narrowkv's backend has no such quantised output: turn fuse_attn_quant off"
            )
        if attn_metadata is None:  # vLLM measures its memory
            if query.device.type != "cpu":
                torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=query.device)
            return output
        step, cache = attn_metadata, self.cache_of(layer, kv_cache)
        tokens = step.num_tokens
        q, out = query, output
        if q.shape[0] != tokens or out.shape[0] != tokens or q.dim() != 3 or out.dim() != 3:
            q, out = (x[:tokens].view(tokens, self.num_heads, self.head_size) for x in (q, out))
        if self.rotates:
            q = randomly_rotated(q)
        options: dict[str, Any] = {"max_batch": self._max_batch, "sinks": self.sinks, **self.options}
        if output_scale is not None:
            options["out_scale"] = output_scale.view(1)
        if self._ranks is not None and isinstance(step, RanksStep):
            if self.rotates:
                key, value = randomly_rotated(key), randomly_rotated(value)
            k, v = (x[:tokens].view(tokens, self.num_kv_heads, self.head_size) for x in (key, value))
            attend_over_ranks(step, q, k, v, cache, out, ranks=self._ranks, **options)
        else:
            attend(step, q, cache, out, batch_invariant=self.batch_invariant, **options)
        if self.rotates:
            out.copy_(randomly_rotated(out, inverse=True))
        return output
