"""`backend="auto"`: which calls torch's attention in 16 bits serves, and that it serves them right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowkv.runtime.launch import run_as
from narrowkv.sage import SageShape, plan_sage, sage_attention, sage_attention_reference
from narrowkv.testing.cases.sage import SageCase
from narrowkv.testing.checking import assert_agrees

# Of rounding P, V and the output to bf16; int8 scores and FP8 values are four times as far off.
BOUND_16_BITS = 0.004


@pytest.fixture
def hopper():
    """Calls are planned for Hopper, whose times are known."""
    with run_as("sm90"):
        yield


def _shape(tokens, ragged=False):
    return SageShape(2, tokens, tokens, 8, 8, 128, ragged)


@pytest.mark.parametrize(
    ("tokens", "options", "why"),
    [
        (2048, {}, ""),
        (2048, {"causal": "bottom_right"}, ""),
        (2048, {"causal": "top_left"}, ""),
        (16384, {}, "from 8192 keys on"),
        (16384, {"causal": "bottom_right"}, "from 8192 keys on"),
        (2048, {"window": (100, 0)}, "no mask but the causal one"),
        (2048, {"window": (-1, 5)}, "no mask but the causal one"),
    ],
)
def test_torch_serves_what_it_is_faster_at(tokens, options, why, hopper):
    plan = plan_sage(_shape(tokens), device="cpu", **options)
    found = plan.why_quantised()
    assert (found == "") == (why == "")
    assert why in found
    assert (f"quantises, because {found}" if why else "takes torch's 16-bit attention") in plan.explain()


def test_what_torch_lacks_is_quantised(hopper):
    plan = plan_sage(_shape(2048), device="cpu")
    assert "log-sum-exp" in plan.why_quantised(lse=True)
    assert "one dtype" in plan.why_quantised(one_dtype=False)
    assert "cu_seqlens" in plan_sage(_shape(2048, ragged=True), device="cpu").why_quantised()
    longer = plan_sage(replace(_shape(2048), k_tokens=4096), device="cpu", causal="bottom_right")
    assert "as many queries as keys" in longer.why_quantised()
    assert "nothing to attend to" in plan_sage(_shape(0), device="cpu").why_quantised()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("causal", [None, "top_left"])
def test_auto_without_quantisation(layout, causal, given, hopper):
    case = SageCase.small(q_lens=(70, 70), k_lens=(70, 70), num_kv_heads=2, gqa_ratio=3, data="offset")
    q, k, v, *_ = case.build()
    expected = sage_attention_reference(q, k, v, qk_dtype=None, causal=causal)
    if layout == "BHSD":
        q, k, v, expected = (x.transpose(1, 2).contiguous() for x in (q, k, v, expected))
    out = torch.full_like(q, float("nan")) if given else None
    o = sage_attention(q, k, v, causal=causal, layout=layout, backend="auto", out=out)
    assert out is None or o is out
    assert o.is_contiguous()
    assert_agrees(o, expected, bound=BOUND_16_BITS)


def test_auto_where_no_times_are_known_has_the_bits_of_sage():
    q, k, v, *_ = SageCase.small(q_lens=(70,), k_lens=(70,)).build()
    assert "not measured" in plan_sage(q, k).explain()
    expected = sage_attention(q, k, v)
    assert torch.equal(sage_attention(q, k, v, backend="auto"), expected)
    with pytest.raises(ValueError, match="backend must be one of sage, auto; got 'torch'"):
        sage_attention(q, k, v, backend="torch")


def test_a_compiled_call_takes_what_a_direct_one_takes(hopper):
    q, k, v, *_ = SageCase.small(q_lens=(70,), k_lens=(70,), data="offset").build()
    exact = sage_attention_reference(q, k, v, qk_dtype=None)

    def step(q):
        return sage_attention(q, k, v, backend="auto")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(compiled, step(q))
    assert_agrees(compiled, exact, bound=BOUND_16_BITS)


def test_auto_refuses_what_sage_refuses(hopper):
    q, k, v, *_ = SageCase.small(q_lens=(70,), k_lens=(70,)).build()
    with pytest.raises(ValueError, match="out must not share memory"):
        sage_attention(q, k, v, backend="auto", out=q)
    with pytest.raises(ValueError, match="v must have shape"):
        sage_attention(q, k, v[:, :5], backend="auto")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_auto_on_a_gpu(causal):
    plain = SageCase.small(q_lens=(1024,), k_lens=(1024,), num_kv_heads=2, head_dim=128, data="offset")
    q, k, v, *_ = plain.build("cuda")
    if plan_sage(q, k, causal=causal).why_quantised():
        pytest.skip("times of this GPU are not known")
    exact = sage_attention_reference(q, k, v, qk_dtype=None, causal=causal)
    o = sage_attention(q, k, v, causal=causal, backend="auto")
    assert_agrees(o, exact, bound=BOUND_16_BITS)
