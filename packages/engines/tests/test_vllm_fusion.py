"""vLLM's own pass that leaves the quantisation of attention's output to attention, over a compiled graph.

Layer, operators and passes are vLLM's. Its manager of passes has this one on GPUs alone, so it is a pass of
torch.compile's here, behind vLLM's removal of reshapes that change nothing, as in that manager.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from engine_checks import BF16, watch
from test_vllm_layers import make_step
from torch._inductor import config as inductor
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, kFp8StaticTensorSym
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from narrowkv.attn_decode import paged_decode_reference
from narrowkv.engines import steps
from narrowkv.engines.tiny import tiny_model
from narrowkv.engines.vllm import register
from narrowkv.engines.vllm.slots import cache_options, slot_bytes
from narrowkv.quant import relative_l1

HEADS, KV_HEADS, DIM, BLOCKS, BLOCK = 12, 2, 64, 8, 16
NAME, SCALE = "model.layers.0.self_attn.attn", 0.02

# On GPUs a compiled operation, of which vLLM's wheel for CPUs has the name alone.
stand_ins = torch.library.Library("narrowkv_stand_ins", "DEF")
stand_ins.define("quantise(Tensor! result, Tensor input, Tensor scale, SymInt[]? group_shape=None) -> ()")
STAND_IN = torch.ops.narrowkv_stand_ins.quantise


def quantise(result, input, scale, group_shape=None):
    limit = torch.finfo(result.dtype).max
    result.copy_((input.float() / scale).clamp(-limit, limit))


stand_ins.impl("quantise", quantise, "CPU")
stand_ins.impl("quantise", lambda *args: None, "Meta")

# Fused kernels whose names the passes' modules look up, and that vLLM's wheel for CPUs does not have. No
# graph here has them.
library = torch.library.Library("_C", "FRAGMENT")
for name in (
    "rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant", "rms_norm_dynamic_per_token_quant"
):  # fmt: skip
    if not hasattr(torch.ops._C, name):
        library.define(f"{name}(Tensor x) -> ()")

from vllm.compilation.passes.fusion.attn_quant_fusion import ATTN_OP, AttnQuantFusionPass  # noqa: E402
from vllm.compilation.passes.fusion.matcher_utils import QUANT_OPS  # noqa: E402
from vllm.compilation.passes.inductor_pass import CallableInductorPass  # noqa: E402
from vllm.compilation.passes.utility.noop_elimination import NoOpEliminationPass  # noqa: E402
from vllm.compilation.passes.utility.post_cleanup import PostCleanupPass  # noqa: E402


class Layer(nn.Module):
    """Attention of a model, and the quantisation that the next product of FP8 numbers begins with."""

    def __init__(self, config):
        super().__init__()
        self.attention = Attention(
            HEADS, DIM, DIM**-0.5, KV_HEADS, cache_config=config.cache_config, prefix=NAME
        )
        self.quantise = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR)
        self.scale = torch.tensor([SCALE])

    def forward(self, q, k, v):
        return self.quantise(self.attention(q, k, v), self.scale)[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama-3-tiny", num_layers=1).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def cpu_slot():
    register(instead_of="CPU_ATTN")
    selector._cached_get_attn_backend.cache_clear()
    yield
    AttentionBackendEnum.CPU_ATTN.clear_override()
    selector._cached_get_attn_backend.cache_clear()


def attention_calls(graph):
    """Calls of attention in a functional graph."""
    return [node for node in graph.nodes if node.args[:1] == (ATTN_OP,)]


@pytest.mark.parametrize(
    ("cache_dtype", "quantised_by"),
    [("auto", "torch"), ("fp8", "operator"), ("narrowkv_k8v4", "torch"), ("int4_per_token_head", "operator")],
)
def test_the_pass_leaves_quantisation_to_attention(cache_dtype, quantised_by, model, cpu_slot, monkeypatch):
    config = EngineArgs(
        model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, block_size=BLOCK,
        compilation_config={"custom_ops": ["none" if quantised_by == "torch" else "+quant_fp8"]},
        **cache_options(cache_dtype),
    ).create_engine_config()  # fmt: skip
    if quantised_by == "operator":
        monkeypatch.setitem(QUANT_OPS, kFp8StaticTensorSym, STAND_IN.default)
        monkeypatch.setattr(torch.ops._C, "static_scaled_fp8_quant", STAND_IN)
    with set_current_vllm_config(config):
        layer = Layer(config)
        passes = [each(config) for each in (NoOpEliminationPass, AttnQuantFusionPass, PostCleanupPass)]
    if quantised_by == "operator":
        monkeypatch.setattr(layer.quantise, "_forward_method", layer.quantise.forward_cuda)
    size = slot_bytes(cache_dtype, DIM) or 2 * DIM
    dtype = torch.bfloat16 if cache_dtype == "auto" else torch.uint8
    layer.attention.kv_cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK, size, dtype=dtype)
    builder, common = make_step()
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, HEADS * DIM, generator=random).bfloat16()
    k, v = torch.randn(2, 2, KV_HEADS * DIM, generator=random).bfloat16()
    fusions = []

    def fuse(graph):
        for each in passes:
            each(graph)
        fusions.extend(node.kwargs["output_scale"] is not None for node in attention_calls(graph))

    compiled = inductor.patch(
        post_grad_custom_post_pass=CallableInductorPass(fuse, uuid="fuse"), force_disable_caches=True,
        enable_auto_functionalized_v2=False,
    )  # fmt: skip
    torch._dynamo.reset()
    calls = watch(monkeypatch, (steps, "paged_decode"))
    context = set_forward_context(
        {NAME: builder.build(0, common)}, config, slot_mapping={NAME: common.slot_mapping}
    )
    with set_current_vllm_config(config), context, compiled:
        apart = layer(q, k, v)
        fused = torch.compile(layer, fullgraph=True)(q, k, v)

    serves = layer.attention.impl.fused_output_quant_supported(kFp8StaticTensorSym)
    assert serves == (cache_dtype != "int4_per_token_head")
    assert passes[1].matched_count == serves
    assert fusions == [serves]
    first, second = calls
    assert "out_scale" not in first.options
    assert fused.dtype == apart.dtype == current_platform.fp8_dtype()
    if not serves:
        assert "out_scale" not in second.options
        assert torch.equal(fused.view(torch.uint8), apart.view(torch.uint8))
        return
    assert second.options["out_scale"].item() == pytest.approx(SCALE)
    plain = {key: value for key, value in second.options.items() if key not in ("out", "plan")}
    exact = paged_decode_reference(*second.args, **plain).to(fused.dtype).view_as(fused)
    differing = fused.view(torch.uint8) != exact.view(torch.uint8)
    assert differing.float().mean() < 0.03  # the kernel's probabilities are in bf16
    assert relative_l1(fused.float(), exact.float()) < BF16
    assert relative_l1(apart.float(), exact.float()) < 2 * BF16  # was rounded to bf16 before
