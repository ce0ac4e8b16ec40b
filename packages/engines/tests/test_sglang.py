"""narrowkv as SGLang's attention backend, over its own pools and in its engine; `make test-engines` runs it.

The model runner of the tests over pools is a stand-in with the attributes that the backend reads; everything
else is SGLang's. The last test runs SGLang's engine.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang: make test-engines", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))

from step_costs import MICROSECONDS, VIEWS, least_microseconds, operators

from narrowkv.engines import trial_sglang

# isort: split
from sglang.kernels.ops.kvcache.dsv4_main_kv_store import NopeFp8RopeBf16Pack
from sglang.srt.environ import envs
from sglang.srt.layers.attention import deepseek_v4_backend_hip_radix as hip
from sglang.srt.layers.quantization import kvfp4_tensor
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import get_kv_cache_quant_method
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4SingleKVPool, DeepSeekV4UniformFP8KVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor import forward_context
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.test.kernels.deepseek_v4 import dsv41_kv_quant_reference as reference
from sglang.test.kernels.deepseek_v4.k_cache_reference import set_k_and_s_torch
from transformers import DeepseekV4Config, GptOssConfig, Llama4TextConfig, LlamaConfig

from narrowkv.engines import deepseek, steps
from narrowkv.engines import sglang as narrow
from narrowkv.engines.sglang import backend, deepseek_v4, pools
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.sparse_fp8 import DSV4Rows

HEADS, KV_HEADS, DIM, PAGE, PAGES, CONTEXT = 6, 2, 64, 16, 8, 64
FP8 = torch.float8_e4m3fn
WINDOW = 5  # SGLang's: keys before a token's own


def make_pool(dtype, kind="full", page=PAGE):
    sizes = {"dtype": dtype, "page_size": page, "head_num": KV_HEADS, "head_dim": DIM, "device": "cpu"}
    if kind == "window":
        pool = SWAKVPool(
            size=PAGES * PAGE, size_swa=6 * PAGE, swa_attention_layer_ids=[1], full_attention_layer_ids=[0],
            **sizes,
        )  # fmt: skip
        # The windows' slots are others than the full ones: page p is page (p % 5) + 1 there.
        slots = torch.arange((PAGES + 1) * PAGE)
        pool.register_mapping((slots // PAGE % 5 + 1) * PAGE + slots % PAGE)
        return pool
    made = memory_pool.MHATokenToKVPoolFP4 if kind == "fp4" else memory_pool.MHATokenToKVPool
    given = {"quant_method": get_kv_cache_quant_method("fp4_mx_block16")} if kind == "fp4-method" else {}
    return made(size=PAGES * PAGE, layer_num=2, enable_memory_saver=False, **given, **sizes)


def make_runner(pool, **args):
    return SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=memory_pool.ReqToTokenPool(3, CONTEXT, "cpu", False),
        server_args=SimpleNamespace(**{"speculative_algorithm": None, "dcp_size": 1, **args}),
        is_draft_worker=args.get("speculative_draft", False),
        model_config=SimpleNamespace(
            is_encoder_decoder=False,
            attention_chunk_size=args.get("chunk"),
            head_dim=DIM,
            num_attention_heads=HEADS,
            get_num_kv_heads=lambda ranks: KV_HEADS // ranks,
        ),
        use_mla_backend=False,
        dtype=torch.bfloat16,
    )


def make_backend(pool, **args):
    with get_parallel().override(attn_tp_size=1):
        return backend.NarrowAttentionBackend(make_runner(pool, **args))


CHAIN = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}


def make_layer(index=0, *, scale=None, window=-1, cap=0.0):
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, index, logit_cap=cap, sliding_window_size=window)
    layer.k_scale, layer.v_scale = scale
    return layer


class Batch:
    """Requests in rows of SGLang's slot table, on shuffled pages, and their steps."""

    def __init__(self, made):
        self.backend, self.lens, self.rows, self.topk = made, [0, 0], [2, 1], 1
        pages = torch.tensor([[3, 6, 1, 7], [5, 2, 8, 4]])[:, : CONTEXT // PAGE]
        slots = (pages[..., None] * PAGE + torch.arange(PAGE)).flatten(1)
        made.token_slots[self.rows] = slots.int()
        self.generator = torch.Generator().manual_seed(0)

    def step(self, new, *, verify=False):
        """A forward batch with these new tokens of each request; of guesses, which its lengths leave out."""
        before, self.lens = self.lens, [n + more for n, more in zip(self.lens, new, strict=True)]
        decodes = before[0] > 0 and set(new) == {1}
        slots = [
            self.backend.token_slots[row, start:end]
            for row, start, end in zip(self.rows, before, self.lens, strict=True)
        ]
        if verify:
            guesses = EagleVerifyInput.create_idle_input(self.topk, new[0] - 1, new[0], "cpu")
            return ForwardBatch(
                forward_mode=ForwardMode.TARGET_VERIFY,
                batch_size=2,
                input_ids=torch.zeros(sum(new), dtype=torch.int64),
                req_pool_indices=torch.tensor(self.rows),
                seq_lens=torch.tensor(before),
                seq_lens_cpu=torch.tensor(before),
                out_cache_loc=torch.cat(slots).long(),
                seq_lens_sum=sum(before),
                spec_info=guesses,
            )
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
            batch_size=2,
            input_ids=torch.zeros(sum(new), dtype=torch.int64),
            req_pool_indices=torch.tensor(self.rows),
            seq_lens=torch.tensor(self.lens),
            seq_lens_cpu=torch.tensor(self.lens),
            out_cache_loc=torch.cat(slots).long(),
            seq_lens_sum=sum(self.lens),
            extend_seq_lens=None if decodes else torch.tensor(new, dtype=torch.int32),
            extend_seq_lens_cpu=None if decodes else new,
        )

    def tensors(self, tokens):
        shapes = [(tokens, HEADS * DIM), (tokens, KV_HEADS, DIM), (tokens, KV_HEADS, DIM)]
        return [torch.randn(shape, generator=self.generator).bfloat16() for shape in shapes]


def attention_over_the_pool(pool, layer, batch, new, q, sinks=None, trees=None):
    """Attention in fp32 over what the pool holds, slot by slot; `trees` masks each request's new tokens."""
    k_all, v_all = (
        x.float() * (scale if x.dtype == FP8 else 1)
        for x, scale in zip(pool.get_kv_buffer(layer.layer_id), (layer.k_scale, layer.v_scale), strict=True)
    )
    q = q.float().view(-1, HEADS, DIM)
    out, start = torch.empty_like(q), 0
    for row, length, count in zip(batch.rows, batch.lens, new, strict=True):
        slots = batch.backend.token_slots[row, :length].long()
        if pools.has_window(pool, layer.layer_id):
            slots = pool.translate_loc_from_full_to_swa(slots)
        k, v = (x[slots].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k_all, v_all))
        logits = torch.einsum("thd,shd->hts", q[start : start + count], k) * layer.scaling
        if layer.logit_cap:
            logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
        place, key = torch.arange(length - count, length)[:, None], torch.arange(length)
        hidden = key > place
        if trees is not None:
            hidden = torch.cat([torch.zeros(count, length - count).bool(), ~trees[batch.rows.index(row)]], 1)
        if layer.sliding_window_size > 0:
            hidden = hidden | (key < place - layer.sliding_window_size)
        logits = logits.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            logits = torch.cat([logits, sinks.float()[:, None, None].expand(-1, count, 1)], -1)
        p = logits.softmax(-1)[..., :length]
        out[start : start + count] = torch.einsum("hts,shd->thd", p, v)
        start += count
    return out.flatten(1)


def relative_l1(x, reference):
    return ((x.float() - reference).abs().sum() / reference.abs().sum()).item()


@pytest.fixture
def runs(monkeypatch):
    """How often each of narrowkv's operations ran, and the memory of the caches that they read."""
    counts = Counter()

    def watch(module, name, place):
        operation = getattr(module, name)

        def call(*args, **kwargs):
            counts[name] += 1
            counts[args[place].k.data_ptr()] += 1
            return operation(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    watch(backend, "append", 0)
    watch(steps, "paged_decode", 1)
    watch(steps, "batch_prefill", 1)
    return counts


CASES = {
    "bf16": {},
    "fp8": {"dtype": FP8},
    "fp8-tensor-scales": {"dtype": FP8, "scale": (torch.tensor(0.03), torch.tensor(0.02))},
    "bf16-page-of-one-token": {"page": 1},
    "sinks-and-soft-cap": {"cap": 4.0, "sinks": True},
    "window": {"kind": "window", "window": WINDOW},
    "window-fp8": {"kind": "window", "window": WINDOW, "dtype": FP8},
}


@pytest.mark.parametrize("name", CASES)
def test_steps_over_sglangs_pools_are_attention_over_the_stored_tokens(name, runs):
    case = {"dtype": torch.bfloat16, "kind": "full", "page": PAGE, "scale": (0.03, 0.02), **CASES[name]}
    pool = make_pool(case["dtype"], case["kind"], case["page"])
    made = make_backend(pool)
    batch = Batch(made)
    layers = [make_layer(0, scale=case["scale"], cap=case.get("cap", 0.0))]
    if case["kind"] == "window":
        layers.append(make_layer(1, scale=case["scale"], window=case["window"]))
    sinks = torch.linspace(-1, 2, HEADS).bfloat16() if case.get("sinks") else None
    # A prompt each, more of it (a prefix is cached by then), and two tokens.
    for new in ([9, 20], [3, 1], [1, 1], [1, 1]):
        forward = batch.step(new)
        made.init_forward_metadata(forward)
        for layer in layers:
            q, k, v = batch.tensors(sum(new))
            found = made.forward(q, k, v, layer, forward, sinks=sinks)
            expected = attention_over_the_pool(pool, layer, batch, new, q, sinks)
            assert relative_l1(found, expected) <= 0.003  # bf16 outputs
            stored, slots = pool.get_key_buffer(layer.layer_id), forward.out_cache_loc
            if layer.layer_id == 1:
                slots = pool.translate_loc_from_full_to_swa(slots)
            scale = float(layer.k_scale) if stored.dtype == FP8 else 1
            assert relative_l1(stored[slots].float() * scale, k.float()) < 0.05  # of E4M3
    assert runs["append"] == 4 * len(layers)
    assert (runs["batch_prefill"], runs["paged_decode"]) == (2 * len(layers), 2 * len(layers))
    memory = {pool.get_key_buffer(layer.layer_id).data_ptr() for layer in layers}
    assert {address for address in runs if isinstance(address, int)} == memory


@pytest.mark.parametrize("kind", ["fp4", "fp4-method"])
def test_fp4_pools_are_written_and_read_where_they_are(kind, runs, monkeypatch):
    pool = make_pool(torch.bfloat16, kind)
    made = make_backend(pool)
    batch, layer = Batch(made), make_layer(scale=(1.0, 1.0))
    monkeypatch.setattr(pool, "get_key_buffer", None)  # it would dequantise the whole pool
    util = kvfp4_tensor.FP4MXBlock16KVQuantizeUtil
    plain = make_pool(torch.bfloat16)
    for new in ([9, 20], [1, 1]):
        forward = batch.step(new)
        made.init_forward_metadata(forward)
        q, k, v = batch.tensors(sum(new))
        found = made.forward(q, k, v, layer, forward)
        for x, codes, scales, side in (
            (k, pool.k_buffer[0], pool.k_scale_buffer[0], plain.k_buffer[0]),
            (v, pool.v_buffer[0], pool.v_scale_buffer[0], plain.v_buffer[0]),
        ):
            slots = forward.out_cache_loc
            # SGLang's own writer, byte for byte.
            with torch.compiler.set_stance("force_eager"):
                own_codes, own_scales = util.batched_quantize(x)
                side_values = util.batched_dequantize(own_codes, own_scales)
            assert torch.equal(codes[slots].view(torch.uint8), own_codes)
            assert torch.equal(scales[slots].view(torch.uint8), own_scales)
            side[slots] = side_values
        expected = attention_over_the_pool(plain, layer, batch, new, q)
        assert relative_l1(found, expected) <= 0.003
    assert runs[pool.k_buffer[0].data_ptr()] == 4


def test_pools_with_heads_outside_pages_are_read_where_they_are(runs):
    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        pool = make_pool(torch.bfloat16)
    made = make_backend(pool)
    batch, layer = Batch(made), make_layer(scale=(None, None))
    forward = batch.step([9, 20])
    made.init_forward_metadata(forward)
    q, k, v = batch.tensors(29)
    found = made.forward(q, k, v, layer, forward)
    plain = make_pool(torch.bfloat16)
    plain.k_buffer[0][forward.out_cache_loc], plain.v_buffer[0][forward.out_cache_loc] = k, v
    assert relative_l1(found, attention_over_the_pool(plain, layer, batch, [9, 20], q)) <= 0.003
    assert runs[pool.k_buffer[0].data_ptr()] == 2


@pytest.mark.parametrize("kind", ["full", "window"])
def test_a_captured_step_is_replayed_with_other_requests_and_lengths(kind, runs):
    pool = make_pool(torch.bfloat16, kind)
    made = make_backend(pool)
    batch = Batch(made)
    layer = make_layer(int(kind == "window"), scale=(None, None), window=WINDOW)
    forward = batch.step([9, 20])
    made.init_forward_metadata(forward)
    made.forward(*batch.tensors(29), layer, forward)

    made.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    # SGLang's own static tensors: a graph reads them whatever they hold.
    static = batch.step([1, 1])
    made.init_forward_metadata_out_graph(static, in_capture=True)
    captured = made.forward_metadata
    tables = {group.step.table.page_ids.data_ptr() for group in captured.values()}
    made.forward(*batch.tensors(2), layer, static)  # what a graph would hold
    for _ in range(2):
        following = batch.step([1, 1])
        for name in ("seq_lens", "out_cache_loc", "req_pool_indices", "seq_lens_cpu"):
            getattr(static, name).copy_(getattr(following, name))
        made.forward_metadata = None
        made.init_forward_metadata_out_graph(static)
        assert made.forward_metadata is captured
        assert tables == {group.step.table.page_ids.data_ptr() for group in captured.values()}
        q, k, v = batch.tensors(2)
        found = made.forward(q, k, v, layer, static)
        expected = attention_over_the_pool(pool, layer, batch, [1, 1], q)
        assert relative_l1(found, expected) <= 0.003


@pytest.mark.parametrize("guesses", [3, 17], ids=["decode-kernel", "prefill-kernel"])
def test_a_chain_of_guesses_is_verified(guesses, runs):
    pool = make_pool(torch.bfloat16)
    made = make_backend(pool, **{**CHAIN, "speculative_num_draft_tokens": guesses})
    batch, layer = Batch(made), make_layer(scale=(None, None))
    forward = batch.step([9, 20])
    made.init_forward_metadata(forward)
    made.forward(*batch.tensors(29), layer, forward)
    new = [guesses, guesses]
    forward = batch.step(new, verify=True)
    made.init_forward_metadata(forward)
    q, k, v = batch.tensors(sum(new))
    found = made.forward(q, k, v, layer, forward)
    assert relative_l1(found, attention_over_the_pool(pool, layer, batch, new, q)) <= 0.003
    assert (runs["batch_prefill"], runs["paged_decode"]) == ((1, 1) if guesses == 3 else (2, 0))


# What each of four guesses sees: two continuations of a token, one of which goes on; and three of a token.
TREES = torch.tensor(
    [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]],
    ]
).bool()
TREE = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}


def full_masks(trees, lens):
    """NGRAM's masks: every key of a request, of each guess."""
    seen = [torch.cat([torch.ones(4, n - 4).bool(), tree], 1) for tree, n in zip(trees, lens, strict=True)]
    return torch.cat([mask.flatten() for mask in seen])


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
def test_a_tree_of_guesses_is_verified_and_replayed(algorithm, runs):
    pool = make_pool(torch.bfloat16)
    made = make_backend(pool, **{**CHAIN, **TREE, "speculative_algorithm": algorithm})
    batch, layer = Batch(made), make_layer(scale=(None, None))
    forward = batch.step([9, 20])
    made.init_forward_metadata(forward)
    made.forward(*batch.tensors(29), layer, forward)

    def tree(forward, trees):
        """Gives a step its masks, as SGLang's workers do."""
        if algorithm == "NGRAM":
            mask = full_masks(trees, batch.lens)
            forward.spec_info = NgramVerifyInput(custom_mask=mask, draft_token_num=4)
        else:
            assert made.verify_mask.fits(2)
            made.verify_mask.buffer[: trees.numel()] = trees.flatten()
            forward.spec_info.custom_mask = made.verify_mask.buffer

    def check(forward, trees):
        q, k, v = batch.tensors(8)
        found = made.forward(q, k, v, layer, forward)
        expected = attention_over_the_pool(pool, layer, batch, [4, 4], q, trees=trees)
        assert relative_l1(found, expected) <= 0.003

    batch.topk = 2
    forward = batch.step([4, 4], verify=True)
    if algorithm == "EAGLE3":  # a step may be prepared before the draft model has made its tree
        tree(forward, torch.ones_like(TREES))
        made.init_forward_metadata(forward)
        tree(forward, TREES)
        made.update_verify_buffers_to_fill_after_draft(forward.spec_info, None)
    else:
        tree(forward, TREES)
        made.init_forward_metadata(forward)
    check(forward, TREES)

    made.init_cuda_graph_state(max_bs=4, max_num_tokens=16)
    batch.lens = [n - 2 for n in batch.lens]
    static = batch.step([4, 4], verify=True)
    tree(static, TREES)
    made.init_forward_metadata_out_graph(static, in_capture=True)
    made.init_forward_metadata_in_graph(static)
    held = made.forward_metadata[False].step.table.tree_mask.data_ptr()
    check(static, TREES)
    batch.lens = [n - 3 for n in batch.lens]
    following = batch.step([4, 4], verify=True)
    for name in ("seq_lens", "out_cache_loc", "seq_lens_cpu"):
        getattr(static, name).copy_(getattr(following, name))
    turned = TREES.flip(0)
    if algorithm == "NGRAM":
        tree(static, turned)
    made.init_forward_metadata_out_graph(static)
    tree(static, turned)  # EAGLE's is written when the step has been prepared
    made.init_forward_metadata_in_graph(static)  # the graph
    assert held == made.forward_metadata[False].step.table.tree_mask.data_ptr()
    check(static, turned)
    assert runs["paged_decode"] == 3


def test_a_captured_chain_of_guesses_is_replayed(runs):
    pool = make_pool(torch.bfloat16, "window")
    made = make_backend(pool, **CHAIN)
    batch, layer = Batch(made), make_layer(1, scale=(None, None), window=WINDOW)
    forward = batch.step([9, 20])
    made.init_forward_metadata(forward)
    made.forward(*batch.tensors(29), layer, forward)
    made.init_cuda_graph_state(max_bs=4, max_num_tokens=12)
    static = batch.step([3, 3], verify=True)
    made.init_forward_metadata_out_graph(static, in_capture=True)
    captured = made.forward_metadata
    held = [(g.slots.data_ptr(), g.step.table.seq_lens.data_ptr()) for g in captured.values()][1:]
    made.forward(*batch.tensors(6), layer, static)
    batch.lens = [n - 2 for n in batch.lens]  # one guess was right
    following = batch.step([3, 3], verify=True)
    for name in ("seq_lens", "out_cache_loc", "seq_lens_cpu"):
        getattr(static, name).copy_(getattr(following, name))
    made.init_forward_metadata_out_graph(static)
    assert made.forward_metadata is captured
    assert held == [(g.slots.data_ptr(), g.step.table.seq_lens.data_ptr()) for g in captured.values()][1:]
    q, k, v = batch.tensors(6)
    found = made.forward(q, k, v, layer, static)
    assert relative_l1(found, attention_over_the_pool(pool, layer, batch, [3, 3], q)) <= 0.003
    assert runs["paged_decode"] == 2


@pytest.mark.parametrize("kind", ["full", "window", "fp4"])
def test_no_step_copies_a_cache_or_reads_from_the_device(kind):
    pool = make_pool(torch.bfloat16 if kind == "fp4" else FP8, kind)
    made = make_backend(pool)
    batch, layer = Batch(made), make_layer(scale=(torch.tensor(0.03), torch.tensor(0.02)))
    kernels = (backend, "append"), (steps, "paged_decode"), (steps, "batch_prefill"), (steps, "plan_prefill")
    for new in ([9, 20], [1, 1]):
        forward = batch.step(new)
        made.init_forward_metadata(forward)
        tensors = batch.tensors(sum(new))
        made.forward(*tensors, layer, forward)  # plans
        with operators(*kernels) as seen:
            made.init_forward_metadata(forward)
            # Lengths are SGLang's own, on the host.
            assert seen.count("__int__") <= 1
            assert {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__"}.isdisjoint(seen)
            seen.clear()
            made.forward(*tensors, layer, forward)
            assert set(seen) <= VIEWS | {"empty_like", "reshape"}


def test_a_layer_adds_little_time_to_its_planned_calls(monkeypatch):
    made = make_backend(make_pool(FP8))
    batch, layer = Batch(made), make_layer(scale=(torch.tensor(0.03), torch.tensor(0.02)))
    forward = batch.step([9, 20])
    made.init_forward_metadata(forward)
    made.forward(*batch.tensors(29), layer, forward)
    forward = batch.step([1, 1])
    made.init_forward_metadata(forward)
    tensors = batch.tensors(2)
    made.forward(*tensors, layer, forward)
    monkeypatch.setattr(backend, "append", lambda *args, **kwargs: None)
    monkeypatch.setattr(steps, "paged_decode", lambda *args, **kwargs: None)
    assert least_microseconds(lambda: made.forward(*tensors, layer, forward)) <= MICROSECONDS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({**CHAIN, "speculative_eagle_topk": 2, "kind": "window"}, "without sliding windows"),
        ({**CHAIN, "speculative_algorithm": "DFLASH"}, "DFLASH is not among"),
        ({**CHAIN, "speculative_num_draft_tokens": 65}, "more than 64"),
        ({**CHAIN, "speculative_draft": True}, "--speculative-draft-attention-backend"),
        ({"dcp_size": 2}, "--dcp-size"),
        ({"chunk": 64}, "within chunks"),
    ],
    ids=["trees-and-windows", "dflash", "many-guesses", "draft-model", "context-parallel", "chunks"],
)
def test_what_is_not_served_is_refused_with_the_reason(change, message):
    args = dict(change)
    kind = args.pop("kind", "full")
    pool = make_pool(torch.bfloat16, kind)
    with get_parallel().override(attn_tp_size=1), pytest.raises(UnsupportedError, match=message):
        backend.NarrowAttentionBackend(make_runner(pool, **args))


def test_layers_and_steps_that_are_not_served_are_refused():
    made = make_backend(make_pool(torch.bfloat16))
    batch = Batch(made)
    forward = batch.step([2, 2])
    made.init_forward_metadata(forward)
    layer = make_layer(scale=(None, None))
    with pytest.raises(UnsupportedError, match="k_rope"):
        made.forward(*batch.tensors(4), layer, forward, k_rope=torch.zeros(1))
    layer.attn_type = AttentionType.ENCODER_ONLY
    with pytest.raises(UnsupportedError, match="not a decoder's own"):
        made.forward(*batch.tensors(4), layer, forward)
    for mode in (ForwardMode.DRAFT_EXTEND_V2, ForwardMode.DLLM_EXTEND):
        forward.forward_mode = mode
        with pytest.raises(UnsupportedError, match=mode.name):
            made.init_forward_metadata(forward)
        with pytest.raises(UnsupportedError, match=mode.name):
            made.init_forward_metadata_out_graph(forward)


def test_models_and_caches_are_answered():
    assert narrow.supports(LlamaConfig(head_dim=128), kv_cache_dtype="fp8_e4m3") == []
    assert "head_dim is 72" in narrow.supports(LlamaConfig(head_dim=72))[0]
    assert narrow.supports(LlamaConfig(head_dim=64), kv_cache_dtype="fp4_mx_block16") == []
    assert "kv_cache_dtype is nvfp4" in narrow.supports(LlamaConfig(), kv_cache_dtype="nvfp4")[0]
    assert "deepseek_v4.patch()" in narrow.supports(DeepseekV4Config())[0]
    assert 'register(instead_of="triton")' in narrow.supports(GptOssConfig())[0]
    assert "within chunks" in narrow.supports(Llama4TextConfig(head_dim=128))[0]
    with pytest.raises(ValueError, match="instead_of must be one of"):
        narrow.register(instead_of="tryton")


def test_sglangs_models_find_the_pools_of_a_step():
    pool = make_pool(torch.bfloat16)
    made = make_backend(pool)
    with forward_context.forward_context(forward_context.ForwardContext(made)):
        assert forward_context.get_token_to_kv_pool() is pool
        assert forward_context.get_req_to_token_pool().req_to_token is made.token_slots


PACKERS = {"v41": reference.quantize_k_cache_v41, "v41_fp4": reference.quantize_k_cache_v41_fp4}
UNPACKERS = {"v41": reference.dequantize_k_cache_v41, "v41_fp4": reference.dequantize_k_cache_v41_fp4}


def deepseek_pool(layout, rows, page_size, generator):
    """SGLang's pool of DeepSeek rows, written by SGLang's packers, and the rows in fp32."""
    pool = DeepSeekV4SingleKVPool(rows, page_size, FP8, 448, 64, 1, "cpu", False, kv_layout=layout)
    buffer = pool.kv_buffer[0]
    if layout == "v4":
        x = torch.randn(rows, 512, generator=generator).bfloat16()
        split = DSV4Rows.quantize(x)
        exponents = (torch.log2(split.scale) + 127).to(torch.uint8)
        pack = NopeFp8RopeBf16Pack(split.data, split.rope, exponents)
        slots = torch.randperm(rows, generator=generator)
        set_k_and_s_torch(buffer, slots, pack, page_size)
        exact = torch.empty(rows, 512)
        values = split.data.float().view(rows, 7, 64) * split.scale[..., None]
        exact[slots] = torch.cat([values.flatten(1), split.rope.float()], 1)
    else:
        x = torch.randn(buffer.shape[0], page_size, 512, generator=generator).bfloat16()
        encoding = pool.kv_layout.encoding
        pages = PACKERS[encoding.value](x)
        exact = UNPACKERS[encoding.value](pages, page_size).float().flatten(0, 1)
        if pool.kv_layout.is_interleaved:
            pages = reference.interleave_pages(pages, page_size, encoding.data_bytes, encoding.scale_bytes)
        assert pages.shape[1] <= buffer.shape[1]
        buffer[:, : pages.shape[1]] = pages
    assert deepseek_v4.pool_reasons(pool) == []
    read = deepseek_v4.pool_rows(pool, 0)
    assert read.data.data_ptr() == buffer.data_ptr()
    assert torch.equal(read.dequantize()[:rows], exact[:rows])
    width = pool.kv_cache_total_dim
    # As SGLang's backend hands it over.
    cache = buffer[:, : page_size * width].view(buffer.shape[0], page_size, 1, width)
    return cache, exact[:rows]


@pytest.mark.parametrize(
    ("tokens", "layouts"),
    [(3, ("v4", "v4")), (16, ("v4", "v4")), (3, ("v41", "v41_fp4")), (3, ("v41_new", "v41_fp4_new"))],
    ids=["decode", "prefill", "v4.1", "v4.1-interleaved"],
)
def test_deepseek_pages_of_sglang_are_read_where_they_are(tokens, layouts, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    near, near_rows = deepseek_pool(layouts[0], 192, 64, generator)
    far, far_rows = deepseek_pool(layouts[1], 96, 16, generator)
    heads, width = 16, 64 if tokens == 3 else 8
    q = torch.randn(tokens, 1, heads, 512, generator=generator).bfloat16()
    sink = torch.linspace(-1, 1, heads)
    lists, lengths = [], []
    for rows in (near_rows, far_rows):
        lists.append(torch.randint(0, len(rows), (tokens, 1, width), generator=generator, dtype=torch.int32))
        lists[-1][:, :, 5] = -1
        lengths.append(torch.randint(1, width + 1, (tokens,), generator=generator, dtype=torch.int32))
    calls = Counter()
    for name in ("sparse_decode", "sparse_prefill_fp8"):
        operation = getattr(deepseek, name)

        def call(*args, name=name, operation=operation, **kwargs):
            calls[name, args[1].rows.data.data_ptr()] += 1
            return operation(*args, **kwargs)

        monkeypatch.setattr(deepseek, name, call)
    monkeypatch.setattr(deepseek, "_PREFILL_TOKENS", 16)  # few, for the interpreter
    arguments = {
        "q": q, "k_cache": near, "head_dim_v": 512, "block_table": None, "cache_seqlens": None,
        "tile_scheduler_metadata": None, "softmax_scale": 512**-0.5, "is_fp8_kvcache": True,
        "indices": lists[0], "topk_length": lengths[0], "attn_sink": sink, "extra_k_cache": far,
        "extra_indices_in_kvcache": lists[1], "extra_topk_length": lengths[1],
    }  # fmt: skip
    if layouts[0].endswith("new"):  # SGLang's function for ROCm is never called over these
        found, _ = deepseek_v4.flash_mla_with_kvcache(**arguments, interleaved=True)
    else:
        undo = deepseek_v4.patch()
        try:
            found, _ = hip.flash_mla_with_kvcache_entrypoint("triton", **arguments)
        finally:
            undo()
    assert calls == {("sparse_decode" if tokens == 3 else "sparse_prefill_fp8", near.data_ptr()): 1}
    expected = torch.empty(tokens, heads, 512)
    for t in range(tokens):
        named = [
            rows[ids[t, 0, :n][ids[t, 0, :n] >= 0].long()]
            for rows, ids, n in zip((near_rows, far_rows), lists, (x[t] for x in lengths), strict=True)
        ]
        k = torch.cat(named)
        logits = torch.cat([q[t, 0].float() @ k.T * 512**-0.5, sink[:, None]], 1)
        expected[t] = logits.softmax(-1)[:, :-1] @ k
    assert relative_l1(found[:, 0], expected) <= 0.004  # bf16 outputs and probabilities


def test_pages_of_other_layouts_stay_with_sglang(monkeypatch):
    asked = []
    monkeypatch.setattr(hip, "flash_mla_with_kvcache_entrypoint", lambda **kwargs: asked.append(kwargs))
    undo = deepseek_v4.patch()
    uniform = DeepSeekV4UniformFP8KVPool(64, 64, FP8, 448, 64, 1, "cpu", False)
    assert "uniform FP8" in deepseek_v4.pool_reasons(uniform)[0]
    with pytest.raises(ValueError, match="uniform FP8"):
        deepseek_v4.pool_rows(uniform, 0)
    cache = uniform.kv_buffer[0].view(-1, 64, 1, 512)
    with pytest.warns(UserWarning, match="512 bytes a token"):
        hip.flash_mla_with_kvcache_entrypoint(backend="triton", k_cache=cache)
    undo()
    assert [kwargs["backend"] for kwargs in asked] == ["triton"]
    with pytest.raises(ValueError, match="584, 528, 288 bytes a token, got 512"):
        deepseek_v4.flash_mla_with_kvcache(torch.zeros(1, 1, 16, 512), cache, indices=torch.zeros(1, 1, 8))


@pytest.mark.parametrize("model", ["llama-3-tiny", "gpt-oss-tiny"])  # the second in the place of "triton"
def test_sglang_generates_through_narrowkvs_backend(model):
    own, sixteen, eight = trial_sglang.trials(model, ["auto", "fp8_e4m3"], 3)
    assert own.calls == {}
    for found, bound in ((sixteen, 0.1), (eight, 0.5)):
        # Three steps of two layers; the prompt of one request is short enough for the decode kernel.
        assert found.calls == {"append": 6, "paged_decode": 6}
        assert found.difference < bound
    assert sixteen.tokens == own.tokens
