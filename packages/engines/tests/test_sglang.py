"""narrowkv as SGLang's attention backend, over its own pools and in its engine; `make test-engines` runs it.

The model runner of the tests over pools is a stand-in with the attributes that the backend reads; everything
else is SGLang's. The last test runs SGLang's engine.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang: make test-engines", allow_module_level=True)

from engine_checks import BF16, attention, row_attention, watch
from step_costs import LAYER_IN_VIEWS, VIEWS, in_views, least_seconds, operators

from narrowkv.engines import trial_sglang

# isort: split
from sglang.kernels.ops.kvcache.dsv4_main_kv_store import NopeFp8RopeBf16Pack
from sglang.srt.arg_groups import choices, overrides
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

from narrowkv.engines import deepseek, steps
from narrowkv.engines import sglang as narrow
from narrowkv.engines.sglang import backend, deepseek_v4, pools
from narrowkv.quant import relative_l1
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


SERVER = {
    "speculative_algorithm": None, "dcp_size": 1, "enable_deterministic_inference": False,
    "enable_mixed_chunk": False,
}  # fmt: skip


def make_runner(pool, **args):
    return SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=memory_pool.ReqToTokenPool(3, CONTEXT, "cpu", False),
        server_args=SimpleNamespace(**{**SERVER, **args}),
        is_draft_worker=args.get("speculative_draft", False),
        model_config=SimpleNamespace(
            is_encoder_decoder=False,
            attention_chunk_size=args.get("chunk"),
            head_dim=DIM,
            num_attention_heads=HEADS,
            get_num_kv_heads=lambda ranks: KV_HEADS // ranks,
        ),
        use_mla_backend=args.get("use_mla_backend", False),
        dtype=torch.bfloat16,
    )


def make_backend(pool, **args):
    with get_parallel().override(attn_tp_size=1):
        return narrow._make(make_runner(pool, **args))


CHAIN = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
SCALES = torch.tensor(0.03), torch.tensor(0.02)


def make_layer(index=0, *, scale=(None, None), window=-1, cap=0.0):
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, index, logit_cap=cap, sliding_window_size=window)
    layer.k_scale, layer.v_scale = scale
    return layer


class Batch:
    """Two requests in rows of SGLang's slot table, on shuffled pages, and their steps."""

    def __init__(self, pool, **args):
        self.pool, self.made = pool, make_backend(pool, **args)
        self.lens, self.rows, self.new, self.topk = [0, 0], [2, 1], [], 1
        pages = torch.tensor([[3, 6, 1, 7], [5, 2, 8, 4]])[:, : CONTEXT // PAGE]
        slots = (pages[..., None] * PAGE + torch.arange(PAGE)).flatten(1)
        self.made.token_slots[self.rows] = slots.int()
        self.generator = torch.Generator().manual_seed(0)

    def step(self, new, *, verify=False):
        """A forward batch with these new tokens of each request; of guesses, which its lengths leave out."""
        before, self.lens = self.lens, [n + more for n, more in zip(self.lens, new, strict=True)]
        self.new, lens = new, before if verify else self.lens
        slots = [
            self.made.token_slots[row, start:end]
            for row, start, end in zip(self.rows, before, self.lens, strict=True)
        ]
        if verify:
            guesses = EagleVerifyInput.create_idle_input(self.topk, new[0] - 1, new[0], "cpu")
            kind = {"forward_mode": ForwardMode.TARGET_VERIFY, "spec_info": guesses}
        elif before[0] > 0 and set(new) == {1}:
            kind = {"forward_mode": ForwardMode.DECODE}
        else:
            extends = torch.tensor(new, dtype=torch.int32)
            kind = {"extend_seq_lens": extends, "extend_seq_lens_cpu": new}
            kind["forward_mode"] = ForwardMode.EXTEND
        return ForwardBatch(
            batch_size=2, input_ids=torch.zeros(sum(new), dtype=torch.int64),
            req_pool_indices=torch.tensor(self.rows), seq_lens=torch.tensor(lens),
            seq_lens_cpu=torch.tensor(lens), out_cache_loc=torch.cat(slots).long(), seq_lens_sum=sum(lens),
            **kind,
        )  # fmt: skip

    def prepared(self, new, *, verify=False):
        """A step whose metadata the backend has."""
        forward = self.step(new, verify=verify)
        self.made.init_forward_metadata(forward)
        return forward

    def captured(self, new, tokens, *, verify=False):
        """A step of static tensors, as a graph that is being captured has them."""
        self.made.init_cuda_graph_state(max_bs=4, max_num_tokens=tokens)
        static = self.step(new, verify=verify)
        self.made.init_forward_metadata_out_graph(static, in_capture=True)
        return static

    def follow(self, static, new, *, verify=False):
        """Writes another step into the tensors of a captured one."""
        following = self.step(new, verify=verify)
        for name in ("seq_lens", "out_cache_loc", "req_pool_indices", "seq_lens_cpu"):
            getattr(static, name).copy_(getattr(following, name))

    def tensors(self):
        count = sum(self.new)
        shapes = [(count, HEADS * DIM), (count, KV_HEADS, DIM), (count, KV_HEADS, DIM)]
        return [torch.randn(shape, generator=self.generator).bfloat16() for shape in shapes]

    def run(self, layer, forward, **options):
        """Queries, keys, values and the result of a layer."""
        tensors = self.tensors()
        return *tensors, self.made.forward(*tensors, layer, forward, **options)

    def check(self, layer, forward, *, sinks=None, trees=None):
        """The same compared with attention in fp32 over what the pool holds, slot by slot."""
        q, k, v, found = self.run(layer, forward, **({} if sinks is None else {"sinks": sinks}))
        assert relative_l1(found, self.exact(self.pool, layer, q, sinks, trees)) <= BF16
        return k, v

    def exact(self, pool, layer, q, sinks=None, trees=None):
        """Attention over a pool; `trees` says which new tokens of its request each new token sees."""
        k, v = (
            x.float() * (scale if x.dtype == FP8 else 1)
            for x, scale in zip(
                pool.get_kv_buffer(layer.layer_id), (layer.k_scale, layer.v_scale), strict=True
            )
        )
        out = []
        for index, rows in enumerate(q.view(-1, HEADS, DIM).split(self.new)):
            length, count = self.lens[index], self.new[index]
            slots = self.made.token_slots[self.rows[index], :length].long()
            if pools.has_window(pool, layer.layer_id):
                slots = pool.translate_loc_from_full_to_swa(slots)
            hidden = None
            if trees is not None:
                hidden = torch.cat([torch.zeros(count, length - count).bool(), ~trees[index]], 1)
            options = {"window": layer.sliding_window_size, "soft_cap": layer.logit_cap, "sinks": sinks}
            out.append(attention(rows, k[slots], v[slots], layer.scaling, hidden=hidden, **options)[0])
        return torch.cat(out).flatten(1)


KERNELS = (steps, "paged_decode"), (steps, "batch_prefill")


@pytest.fixture
def calls(monkeypatch):
    return watch(monkeypatch, (backend, "append"), *KERNELS)


BF16_POOL = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("pool", "layers", "has_sinks"),
    [
        pytest.param(BF16_POOL, [{}], False, id="bf16"),
        pytest.param({"dtype": FP8}, [{"scale": (0.03, 0.02)}], False, id="fp8"),
        pytest.param({"dtype": FP8}, [{"scale": SCALES}], False, id="fp8-tensor-scales"),
        pytest.param({**BF16_POOL, "page": 1}, [{}], False, id="bf16-page-of-one-token"),
        pytest.param(BF16_POOL, [{"cap": 4.0}], True, id="sinks-and-soft-cap"),
        pytest.param({**BF16_POOL, "kind": "window"}, [{}, {"window": WINDOW}], False, id="window"),
        pytest.param(
            {"dtype": FP8, "kind": "window"},
            [{"scale": (0.03, 0.02)}, {"scale": (0.03, 0.02), "window": WINDOW}],
            False,
            id="window-fp8",
        ),
    ],
)
def test_steps_over_sglangs_pools_are_attention_over_the_stored_tokens(pool, layers, has_sinks, calls):
    pool = make_pool(**pool)
    batch = Batch(pool)
    layers = [make_layer(index, **options) for index, options in enumerate(layers)]
    sinks = torch.linspace(-1, 2, HEADS).bfloat16() if has_sinks else None
    # A prompt each, more of it (a prefix is cached by then) beside a decode, and two tokens.
    for new in ([9, 20], [3, 1], [1, 1], [1, 1]):
        forward = batch.prepared(new)
        for layer in layers:
            k, _ = batch.check(layer, forward, sinks=sinks)
            stored, slots = pool.get_key_buffer(layer.layer_id), forward.out_cache_loc
            if layer.layer_id == 1:
                slots = pool.translate_loc_from_full_to_swa(slots)
            scale = float(layer.k_scale) if stored.dtype == FP8 else 1
            assert relative_l1(stored[slots].float() * scale, k.float()) < 0.05  # of E4M3
    count = len(layers)
    assert calls.counts == {"append": 4 * count, "batch_prefill": 2 * count, "paged_decode": 3 * count}
    assert calls.memory == {pool.get_key_buffer(layer.layer_id).data_ptr() for layer in layers}


@pytest.mark.parametrize("kind", ["fp4", "fp4-method"])
def test_fp4_pools_are_written_and_read_where_they_are(kind, calls, monkeypatch):
    pool, plain = make_pool(torch.bfloat16, kind), make_pool(torch.bfloat16)
    batch, layer = Batch(pool), make_layer(scale=(1.0, 1.0))
    monkeypatch.setattr(pool, "get_key_buffer", None)  # it would dequantise the whole pool
    util = kvfp4_tensor.FP4MXBlock16KVQuantizeUtil
    for new in ([9, 20], [1, 1]):
        forward = batch.prepared(new)
        q, k, v, found = batch.run(layer, forward)
        slots = forward.out_cache_loc
        for x, codes, scales, side in (
            (k, pool.k_buffer[0], pool.k_scale_buffer[0], plain.k_buffer[0]),
            (v, pool.v_buffer[0], pool.v_scale_buffer[0], plain.v_buffer[0]),
        ):
            # SGLang's own writer, byte for byte.
            with torch.compiler.set_stance("force_eager"):
                own_codes, own_scales = util.batched_quantize(x)
                side[slots] = util.batched_dequantize(own_codes, own_scales)
            assert torch.equal(codes[slots].view(torch.uint8), own_codes)
            assert torch.equal(scales[slots].view(torch.uint8), own_scales)
        assert relative_l1(found, batch.exact(plain, layer, q)) <= BF16
    assert (len(calls), calls.memory) == (4, {pool.k_buffer[0].data_ptr()})


def test_pools_with_heads_outside_pages_are_read_where_they_are(calls):
    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        pool = make_pool(torch.bfloat16)
    batch, layer, plain = Batch(pool), make_layer(), make_pool(torch.bfloat16)
    forward = batch.prepared([9, 20])
    q, k, v, found = batch.run(layer, forward)
    plain.k_buffer[0][forward.out_cache_loc], plain.v_buffer[0][forward.out_cache_loc] = k, v
    assert relative_l1(found, batch.exact(plain, layer, q)) <= BF16
    assert (len(calls), calls.memory) == (2, {pool.k_buffer[0].data_ptr()})


@pytest.mark.parametrize(
    ("kind", "args", "new", "kept"),
    [
        pytest.param("full", {}, [1, 1], 1, id="full"),
        pytest.param("window", {}, [1, 1], 1, id="window"),
        pytest.param("window", CHAIN, [3, 3], 1, id="guesses"),  # of which none but the first token was right
    ],
)
def test_a_captured_step_is_replayed_with_other_requests_and_lengths(kind, args, new, kept, calls):
    batch = Batch(make_pool(torch.bfloat16, kind), **args)
    made, layer, verify = batch.made, make_layer(int(kind == "window"), window=WINDOW), bool(args)
    batch.run(layer, batch.prepared([9, 20]))
    # SGLang's own static tensors: a graph reads them whatever they hold.
    static = batch.captured(new, 4 * new[0], verify=verify)
    captured = made.forward_metadata

    def held():
        return [
            (g.step.table.page_ids.data_ptr(), g.step.table.seq_lens.data_ptr()) for g in captured.values()
        ]

    addresses = held()
    batch.run(layer, static)  # what a graph would hold
    for _ in range(2):
        batch.lens = [n - new[0] + kept for n in batch.lens]
        batch.follow(static, new, verify=verify)
        made.forward_metadata = None
        made.init_forward_metadata_out_graph(static)
        assert made.forward_metadata is captured
        assert held() == addresses
        batch.check(layer, static)
    assert calls.counts["paged_decode"] == 3


@pytest.mark.parametrize("guesses", [3, 17], ids=["decode-kernel", "prefill-kernel"])
def test_a_chain_of_guesses_is_verified(guesses, calls):
    batch = Batch(make_pool(torch.bfloat16), **{**CHAIN, "speculative_num_draft_tokens": guesses})
    layer = make_layer()
    batch.run(layer, batch.prepared([9, 20]))
    batch.check(layer, batch.prepared([guesses, guesses], verify=True))
    assert calls.counts["paged_decode"] == (1 if guesses == 3 else 0)
    assert calls.counts["batch_prefill"] == (1 if guesses == 3 else 2)


DETERMINISTIC = {"enable_deterministic_inference": True}


@pytest.mark.parametrize(
    ("pool", "layer"),
    [
        ({**BF16_POOL}, {}),
        ({"dtype": FP8}, {"scale": (0.03, 0.02)}),
        ({"dtype": FP8, "kind": "window"}, {"scale": (0.03, 0.02), "index": 1, "window": WINDOW}),
        ({**BF16_POOL, "kind": "fp4"}, {}),
    ],
    ids=["bf16", "fp8", "fp8-window", "fp4"],
)
def test_deterministic_steps_give_a_request_the_same_bits_alone_in_chunks_and_in_a_batch(pool, layer, calls):
    prompt, steps_of_one = 29, 3
    generator = torch.Generator().manual_seed(3)
    shapes = [(prompt + steps_of_one, HEADS * DIM)] + 2 * [(prompt + steps_of_one, KV_HEADS, DIM)]
    own = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]

    def outputs(chunks, other):
        """Results of the second request, whose tokens come in these chunks; others of the first beside it."""
        batch = Batch(make_pool(**pool), **DETERMINISTIC)
        made, begin, found = batch.made, 0, []
        for count, beside in zip([*chunks, *[1] * steps_of_one], other, strict=True):
            forward = batch.prepared([beside, count])
            given = [
                torch.cat([theirs[:beside], mine[begin : begin + count]])
                for theirs, mine in zip(batch.tensors(), own, strict=True)
            ]
            found.append(made.forward(*given, make_layer(**layer), forward)[beside:])
            begin += count
        return torch.cat(found)

    whole = outputs([prompt], [1, 1, 1, 1])
    assert torch.equal(outputs([prompt], [24, 1, 1, 1]), whole)
    # The last chunk as behind a prefix that the radix cache holds.
    assert torch.equal(outputs([8, 16, 5], [20, 3, 1, 1, 1, 1]), whole)
    # A chunk as short as another request's, which `attend` takes for decodes.
    assert torch.equal(outputs([9, 20], [9, 3, 1, 1, 1]), whole)
    assert calls.counts == {"append": 19, "batch_prefill": 7, "paged_decode": 12}


def test_a_deterministic_step_does_not_depend_on_the_width_of_its_batch():
    def decoded(rows):
        batch = Batch(make_pool(FP8), **DETERMINISTIC)
        layer = make_layer(scale=SCALES)
        batch.run(layer, batch.prepared([9, 20]))
        forward = batch.step([1, 1])
        batch.generator.manual_seed(7)
        given = batch.tensors()
        if rows == 1:
            forward.batch_size = 1
            for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
                setattr(forward, name, getattr(forward, name)[1:])
            given = [x[1:] for x in given]
        batch.made.init_forward_metadata(forward)
        return batch.made.forward(*given, layer, forward)[-1]

    assert torch.equal(decoded(1), decoded(2))


def test_narrowkv_is_on_sglangs_lists_of_deterministic_backends():
    narrow.register()
    narrow.register()
    view = SimpleNamespace(enable_deterministic_inference=True, attention_backend=narrow.NAME)
    assert overrides._deterministic_attention_backend(view) == {}  # other names are refused
    for names in (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        assert names.count(narrow.NAME) == 1
    assert narrow.NAME not in choices.DRAFT_ATTENTION_BACKEND_CHOICES


# What each of four guesses sees: two continuations of a token, one of which goes on; and three of a token.
TREES = torch.tensor(
    [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]],
    ]
).bool()
TREE = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
def test_a_tree_of_guesses_is_verified_and_replayed(algorithm, calls):
    batch = Batch(make_pool(torch.bfloat16), **{**CHAIN, **TREE, "speculative_algorithm": algorithm})
    made, layer, new = batch.made, make_layer(), [4, 4]
    batch.run(layer, batch.prepared([9, 20]))

    def tree(forward, trees):
        """Gives a step its masks, as SGLang's workers do; NGRAM's have every key of a request."""
        if algorithm == "NGRAM":
            seen = [
                torch.cat([torch.ones(4, n - 4).bool(), tree], 1)
                for tree, n in zip(trees, batch.lens, strict=True)
            ]
            mask = torch.cat([rows.flatten() for rows in seen])
            forward.spec_info = NgramVerifyInput(custom_mask=mask, draft_token_num=4)
        else:
            assert made.verify_mask.fits(2)
            made.verify_mask.buffer[: trees.numel()] = trees.flatten()
            forward.spec_info.custom_mask = made.verify_mask.buffer

    batch.topk = 2
    forward = batch.step(new, verify=True)
    if algorithm == "EAGLE3":  # a step may be prepared before the draft model has made its tree
        tree(forward, torch.ones_like(TREES))
        made.init_forward_metadata(forward)
        tree(forward, TREES)
        made.update_verify_buffers_to_fill_after_draft(forward.spec_info, None)
    else:
        tree(forward, TREES)
        made.init_forward_metadata(forward)
    batch.check(layer, forward, trees=TREES)

    made.init_cuda_graph_state(max_bs=4, max_num_tokens=16)
    batch.lens = [n - 2 for n in batch.lens]
    static = batch.step(new, verify=True)
    tree(static, TREES)
    made.init_forward_metadata_out_graph(static, in_capture=True)
    made.init_forward_metadata_in_graph(static)
    held = made.forward_metadata[False].step.table.tree_mask.data_ptr()
    batch.check(layer, static, trees=TREES)
    batch.lens = [n - 3 for n in batch.lens]
    batch.follow(static, new, verify=True)
    turned = TREES.flip(0)
    if algorithm == "NGRAM":
        tree(static, turned)
    made.init_forward_metadata_out_graph(static)
    tree(static, turned)  # EAGLE's is written when the step has been prepared
    made.init_forward_metadata_in_graph(static)  # the graph
    assert held == made.forward_metadata[False].step.table.tree_mask.data_ptr()
    batch.check(layer, static, trees=turned)
    assert calls.counts["paged_decode"] == 3


@pytest.mark.parametrize("kind", ["full", "window", "fp4"])
def test_no_step_copies_a_cache_or_reads_from_the_device(kind):
    batch = Batch(make_pool(torch.bfloat16 if kind == "fp4" else FP8, kind))
    made, layer = batch.made, make_layer(scale=SCALES)
    for new in ([9, 20], [1, 1]):
        forward = batch.prepared(new)
        tensors = batch.tensors()
        made.forward(*tensors, layer, forward)  # plans
        with operators((backend, "append"), *KERNELS) as seen:
            made.init_forward_metadata(forward)
            # Lengths are SGLang's own, on the host.
            assert seen.count("__int__") <= 1
            assert seen.count("tolist") <= 1
            assert {"item", "cpu", "numpy", "nonzero", "__bool__", "__float__"}.isdisjoint(seen)
            seen.clear()
            made.forward(*tensors, layer, forward)
            assert set(seen) <= VIEWS | {"new_empty", "reshape"}


def test_a_layer_adds_little_time_to_its_planned_calls(monkeypatch):
    batch, layer = Batch(make_pool(FP8)), make_layer(scale=SCALES)
    batch.run(layer, batch.prepared([9, 20]))
    forward = batch.prepared([1, 1])
    *tensors, _ = batch.run(layer, forward)
    for module, name in ((backend, "append"), *KERNELS[:1]):
        monkeypatch.setattr(module, name, lambda *args, **kwargs: None)
    seconds = least_seconds(lambda: batch.made.forward(*tensors, layer, forward))
    assert in_views(seconds) <= LAYER_IN_VIEWS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({**CHAIN, "speculative_eagle_topk": 2, "kind": "window"}, "without sliding windows"),
        ({**CHAIN, "speculative_algorithm": "DFLASH"}, "DFLASH is not among"),
        ({**CHAIN, "speculative_num_draft_tokens": 65}, "more than 64"),
        ({**CHAIN, "speculative_draft": True}, "--speculative-draft-attention-backend"),
        ({"dcp_size": 2}, "--dcp-size"),
        ({"chunk": 64}, "within chunks"),
        ({**DETERMINISTIC, "enable_mixed_chunk": True}, "--enable-mixed-chunk"),
    ],
    ids=["trees-and-windows", "dflash", "many-guesses", "draft-model", "context-parallel", "chunks", "mixed"],
)
def test_what_is_not_served_is_refused_with_the_reason(change, message):
    args = dict(change)
    kind = args.pop("kind", "full")
    pool = make_pool(torch.bfloat16, kind)
    with get_parallel().override(attn_tp_size=1), pytest.raises(UnsupportedError, match=message):
        backend.NarrowAttentionBackend(make_runner(pool, **args))


def test_layers_and_steps_that_are_not_served_are_refused():
    batch, layer = Batch(make_pool(torch.bfloat16)), make_layer()
    forward = batch.prepared([2, 2])
    with pytest.raises(UnsupportedError, match="k_rope"):
        batch.run(layer, forward, k_rope=torch.zeros(1))
    layer.attn_type = AttentionType.ENCODER_ONLY
    with pytest.raises(UnsupportedError, match="not a decoder's own"):
        batch.run(layer, forward)
    for mode in (ForwardMode.DRAFT_EXTEND_V2, ForwardMode.DLLM_EXTEND):
        forward.forward_mode = mode
        for prepare in (batch.made.init_forward_metadata, batch.made.init_forward_metadata_out_graph):
            with pytest.raises(UnsupportedError, match=mode.name):
                prepare(forward)


def test_only_the_two_names_of_backends_are_taken():
    with pytest.raises(ValueError, match="instead_of must be one of"):
        narrow.register(instead_of="tryton")


def test_sglangs_models_find_the_pools_of_a_step():
    pool = make_pool(torch.bfloat16)
    made = make_backend(pool)
    with forward_context.forward_context(forward_context.ForwardContext(made)):
        assert forward_context.get_token_to_kv_pool() is pool
        assert forward_context.get_req_to_token_pool().req_to_token is made.token_slots


LATENT_HEADS, ROW, SCALE = 3, 576, 192**-0.5


class LatentBatch(Batch):
    """The same with latent rows: a layer for absorbed queries, and one for prompts that are expanded."""

    def __init__(self, dtype, **args):
        pool = memory_pool.MLATokenToKVPool(
            size=PAGES * PAGE, page_size=PAGE, dtype=dtype, kv_lora_rank=512, qk_rope_head_dim=64,
            layer_num=1, device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        super().__init__(pool, use_mla_backend=True, **args)
        self.mqa = RadixAttention(LATENT_HEADS, ROW, SCALE, 1, 0, v_head_dim=512)
        self.mha = RadixAttention(LATENT_HEADS, 192, SCALE, LATENT_HEADS, 0, v_head_dim=128)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator).bfloat16()

    def tensors(self):
        count, new = sum(self.new), self.random(sum(self.new), 1, ROW)
        return [self.random(count, LATENT_HEADS * ROW), new, new[..., :512]]

    def run(self, layer, forward, **options):
        with get_parallel().override(dcp_enabled=False):  # the pool asks before it stores rows
            return super().run(layer, forward, **options)

    def check(self, forward):
        """A step of absorbed queries compared with attention in fp32 to the pool's rows."""
        q, new, _, found = self.run(self.mqa, forward)
        rows = self.pool.get_key_buffer(0)
        assert torch.equal(rows[forward.out_cache_loc], new.to(rows.dtype))
        out = []
        for index, queries in enumerate(q.view(-1, LATENT_HEADS, ROW).split(self.new)):
            held = rows[self.made.token_slots[self.rows[index], : self.lens[index]].long()].float()
            out.append(attention(queries, held, held[..., :512], SCALE)[0])
        assert relative_l1(found, torch.cat(out).flatten(1)) <= (BF16 if rows.dtype == BF16_DTYPE else 0.006)
        return found


BF16_DTYPE = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_latent_rows_are_attended_to_where_sglangs_pool_has_them(dtype, calls):
    batch = LatentBatch(dtype)
    # A prompt without a prefix is expanded by SGLang, which has stored its rows.
    forward = batch.prepared([9, 20])
    q, k = batch.random(29, LATENT_HEADS, 192), batch.random(29, LATENT_HEADS, 192)
    v = batch.random(29, LATENT_HEADS, 256)[..., 128:]  # of what expands both, as SGLang hands it over
    found = batch.made.forward(q, k, v, batch.mha, forward, save_kv_cache=False)
    exact = [
        attention(*(x[part] for x in (q, k, v)), SCALE)[0] for part in (slice(0, 9), slice(9, 29))
    ]  # fmt: skip
    assert relative_l1(found, torch.cat(exact).flatten(1)) <= BF16
    batch.pool.kv_buffer[0].copy_(
        torch.randn(batch.pool.kv_buffer[0].shape).to(dtype).view(batch.pool.store_dtype)
    )
    for new in ([3, 17], [8, 1], [1, 1]):  # behind a prefix, in pieces; then a decode
        batch.check(batch.prepared(new))
    assert calls.counts == {"batch_prefill": 1}


def test_chains_of_guesses_over_latent_rows_are_verified_and_replayed():
    batch = LatentBatch(torch.bfloat16, **CHAIN)
    batch.run(batch.mqa, batch.prepared([9, 20]))
    batch.check(batch.prepared([3, 3], verify=True))
    static = batch.captured([3, 3], 12, verify=True)
    batch.check(static)
    batch.follow(static, [3, 3], verify=True)
    batch.made.init_forward_metadata_out_graph(static)
    batch.check(static)


def test_deterministic_latent_steps_have_the_same_bits_in_any_chunks():
    found = []
    for chunks in ([[9, 20], [4, 4]], [[9, 13], [4, 11]]):
        batch = LatentBatch(torch.bfloat16, **DETERMINISTIC)
        random = torch.Generator().manual_seed(1)
        q, new = (torch.randn(2, 24, x, generator=random).bfloat16() for x in (LATENT_HEADS * ROW, ROW))
        outs, done = [[], []], [0, 0]
        for counts in chunks:
            forward = batch.prepared(counts)
            spans = [(r, slice(done[r], done[r] + counts[r])) for r in (0, 1)]
            queries, rows = (torch.cat([x[r, span] for r, span in spans]) for x in (q, new))
            with get_parallel().override(dcp_enabled=False):
                o = batch.made.forward(queries, rows[:, None], rows[:, None, :512], batch.mqa, forward)
            for each, part in zip(outs, o.split(counts), strict=True):
                each.append(part)
            done = [a + b for a, b in zip(done, counts, strict=True)]
        found.append([torch.cat(each) for each in outs])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_latent_models_that_are_not_served_are_refused():
    with pytest.raises(UnsupportedError, match="--speculative-num-draft-tokens is more than 8"):
        LatentBatch(torch.bfloat16, **{**CHAIN, "speculative_num_draft_tokens": 9})
    with pytest.raises(UnsupportedError, match="pool is a MHATokenToKVPool"):
        make_backend(make_pool(torch.bfloat16), use_mla_backend=True)
    batch = LatentBatch(torch.bfloat16)
    with pytest.raises(UnsupportedError, match="topk_indices"):
        batch.run(batch.mqa, batch.prepared([2, 2]), topk_indices=torch.zeros(1))
    batch.mqa.sliding_window_size = 4
    with pytest.raises(UnsupportedError, match="sliding window over latent rows"):
        batch.run(batch.mqa, batch.prepared([2, 2]))


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
    calls = watch(monkeypatch, (deepseek, "sparse_decode"), (deepseek, "sparse_prefill_fp8"))
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
    (call,) = calls
    assert call.name == ("sparse_decode" if tokens == 3 else "sparse_prefill_fp8")
    assert call.args[1].rows.data.data_ptr() == near.data_ptr()
    expected = []
    for t in range(tokens):
        named = [
            rows[ids[t, 0, :n][ids[t, 0, :n] >= 0].long()]
            for rows, ids, n in zip((near_rows, far_rows), lists, (x[t] for x in lengths), strict=True)
        ]
        expected.append(row_attention(q[t, 0], torch.cat(named), 512**-0.5, sink))
    assert relative_l1(found[:, 0], torch.stack(expected)) <= 0.004  # bf16 outputs and probabilities


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
