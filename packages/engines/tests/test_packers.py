"""DeepSeek's pages beside those of the engines' own writers, and the calls of the engines' kernels by probes.

Where SGLang is installed its rows run, else vLLM's: `make test-engines` runs both.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from interpreted import Interpreted, vllm_module_with_triton

from narrowkv.attn_decode import paged_decode_reference
from narrowkv.engines.deepseek import LAYOUTS, RECORDS
from narrowkv.quant import relative_l1
from narrowkv.sparse_fp8 import DSV4Rows
from narrowkv.testing.backends import sglang_call, vllm_call
from narrowkv.testing.cases.decode import DecodeCase

PAGE, TOKENS = 16, 32
if find_spec("sglang"):
    from narrowkv.engines import trial_sglang  # noqa: F401  # first: it declares operators of torchvision
ENGINE = "sglang" if find_spec("sglang") else "vllm" if find_spec("vllm") else None
ENGINES = ("vllm", "sglang")
needs = {
    engine: pytest.mark.skipif(engine != ENGINE, reason=f"needs {engine}: make test-engines")
    for engine in ENGINES
}
Write = Callable[[torch.Tensor, pytest.MonkeyPatch], torch.Tensor]


def spread_rows(columns: int = 512) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, columns, generator=random) * torch.logspace(-1, 2, TOKENS)[:, None]
    return x.bfloat16()


def vllm_writer(model: str, width: int, is_fnuz: bool) -> Write:
    """vLLM's writer of a model's rows."""

    def write(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
        platform = importlib.import_module("vllm.platforms").current_platform
        name = f"vllm.models.{model}.common.ops.cache_utils"
        importlib.import_module(name)
        writer = vllm_module_with_triton(name, monkeypatch)
        for kernel in ("quantize_and_insert_k_kernel", "_quantize_and_insert_k_mxfp8_kernel"):
            if hasattr(writer, kernel):
                monkeypatch.setattr(writer, kernel, Interpreted(getattr(writer, kernel)))
        monkeypatch.setattr(type(platform), "is_fp8_fnuz", classmethod(lambda cls: is_fnuz))
        padded = -(-PAGE * width // 576) * 576 if model == "deepseek_v4" else PAGE * width
        pages = torch.zeros(TOKENS // PAGE, padded, dtype=torch.uint8)
        chosen = {"bytes_per_token": width} if model == "deepseek_v41" else {}
        slots = torch.arange(TOKENS)
        writer.quantize_and_insert_k_cache(x, pages, slots, PAGE, use_fnuz=is_fnuz, **chosen)
        return pages[:, : PAGE * width]

    return write


def sglang_v4(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    place = importlib.import_module("sglang.test.kernels.deepseek_v4.k_cache_reference")
    kernel = Interpreted(place._quant_k_cache_fused_kernel)
    monkeypatch.setattr(place, "_quant_k_cache_fused_kernel", kernel)
    pages = torch.zeros(TOKENS // PAGE, -(-PAGE * 584 // 576) * 576, dtype=torch.uint8)
    pack = place.quant_to_nope_fp8_rope_bf16_pack_triton(x)
    place.set_k_and_s_torch(pages, torch.arange(TOKENS), pack, PAGE)
    return pages[:, : PAGE * 584]


def sglang_v41(width: int, codes: int, is_interleaved: bool) -> Write:
    """SGLang's packer of DeepSeek-V4.1's rows."""

    def write(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
        place = importlib.import_module("sglang.test.kernels.deepseek_v4.dsv41_kv_quant_reference")
        pack = place.quantize_k_cache_v41 if width == 528 else place.quantize_k_cache_v41_fp4
        pages = pack(x.view(-1, PAGE, 512))
        if is_interleaved:
            pages = place.interleave_pages(pages, PAGE, codes, width - codes)
        return pages[:, : PAGE * width]

    return write


@dataclass(frozen=True)
class Pages:
    """How an engine lays out rows of 512 channels in a page.

    Attributes:
        engine: whose.
        layout: narrowkv's layout of the same bytes.
        write: its pages of rows, `[pages, bytes]`.
        width: bytes a token.
        stride, codes: where codes lie: the first `codes` bytes of each `stride`, of as many as tokens.
        format: of the codes; None for FP4.
    """

    engine: str
    layout: str
    write: Write
    width: int
    stride: int
    codes: int
    format: str | None = "fp8_e4m3fn"

    def param(self) -> object:
        name = f"{self.engine}-{self.layout}-{self.format or 'fp4'}"
        return pytest.param(self, id=name, marks=needs[self.engine])


def _vllm(model: str, width: int, stride: int, codes: int, is_fnuz: bool) -> Pages:
    form = "fp8_e4m3fnuz" if is_fnuz else "fp8_e4m3fn"
    write = vllm_writer(model, width, is_fnuz)
    return Pages("vllm", f"packed{width}", write, width, stride, codes, form)


PAGES = [
    *(_vllm("deepseek_v4", 584, 576, 448, is_fnuz) for is_fnuz in (False, True)),
    *(_vllm("deepseek_v41", 528, 512, 512, is_fnuz) for is_fnuz in (False, True)),
    Pages("sglang", "packed584", sglang_v4, 584, 576, 448),
    Pages("sglang", LAYOUTS[528], sglang_v41(528, 512, False), 528, 512, 512),
    Pages("sglang", LAYOUTS[288], sglang_v41(288, 256, False), 288, 256, 256, None),
    Pages("sglang", RECORDS[528], sglang_v41(528, 512, True), 528, 528, 512),
    Pages("sglang", RECORDS[288], sglang_v41(288, 256, True), 288, 288, 256, None),
]


@pytest.mark.parametrize("pages", [pages.param() for pages in PAGES])
def test_deepseek_pages_are_the_engines_byte_for_byte(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    x = spread_rows()
    if pages.format == "fp8_e4m3fnuz":
        # vLLM takes 224 for the largest number of FNUZ, which is 240: no group here lies between them.
        group = 64 if pages.width == 584 else 32
        amax = x.float().view(TOKENS, -1, group).abs().amax(-1, keepdim=True).expand(-1, -1, group).flatten(1)
        is_between = torch.ceil(torch.log2(amax / 224)) != torch.ceil(torch.log2(amax / 240))
        assert is_between.any()
        x = torch.where(is_between, x * 0.8, x.float()).bfloat16()
    mine = DSV4Rows.quantize(x, layout=pages.layout, page_size=PAGE, format=pages.format)
    found = mine.data.view(torch.uint8).flatten(1)[:, : PAGE * pages.width]
    expected = pages.write(x, monkeypatch)
    assert expected.any(1).all()
    # The engines store -0 as 0x80, and 8 in FP4; narrowkv 0.
    byte = torch.arange(expected.shape[1])
    is_code = (byte < PAGE * pages.stride) & (byte % pages.stride < pages.codes)
    if pages.format is None:
        low, high = expected & 15, expected >> 4
        plain = low.masked_fill(low == 8, 0) | (high.masked_fill(high == 8, 0) << 4)
    else:
        plain = expected.masked_fill(expected == 0x80, 0)
    assert torch.equal(found, torch.where(is_code, plain, expected))


@needs["vllm"]
def test_deepseek_v32_records_of_vllm_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """656 bytes; vLLM's writer norms and rotates keys first. Its writer of 352 bytes has code for NVIDIA."""
    name = "vllm.models.deepseek_v32.common.kernels"
    importlib.import_module(name)
    writer = vllm_module_with_triton(name, monkeypatch)
    monkeypatch.setattr(writer, "_fused_norm_rope_kernel", Interpreted(writer._fused_norm_rope_kernel))
    x, rope = spread_rows(), spread_rows(64)
    kv_cache = torch.zeros(TOKENS // PAGE, PAGE, 656, dtype=torch.uint8)
    normed, rotated = torch.empty_like(x), torch.empty_like(rope)
    table = torch.cat([torch.ones(TOKENS, 32), torch.zeros(TOKENS, 32)], 1)  # cosines, sines
    writer.fused_norm_rope(
        torch.arange(TOKENS), x[:, :128].contiguous(), torch.ones(128), 1e-6, x, torch.ones(512), 1e-6, rope,
        table, None, None, None, 1e-6, None, torch.zeros(TOKENS, 8, dtype=torch.int32),
        slot_mapping=torch.arange(TOKENS), mla_kv_cache=kv_cache, mla_kv_cache_dtype="fp8_ds_mla",
        has_indexer=False, kv_c_out=normed, k_pe_out=rotated,
    )  # fmt: skip
    read = DSV4Rows.paged(kv_cache, "record656", page_size=PAGE).dequantize()
    record = kv_cache.flatten(0, 1)
    scales = record[:, 512:528].contiguous().view(torch.float32)
    assert torch.equal(scales, torch.exp2(torch.log2(scales).round()))  # narrowkv's own need no power of two
    codes = record[:, :512].contiguous().view(torch.float8_e4m3fn).float().view(TOKENS, 4, 128)
    assert torch.equal(read[:, :512], (codes * scales[..., None]).flatten(1))
    assert torch.equal(read[:, 512:], rope.float())
    assert (read[:, :512] - normed.float()).norm() / normed.float().norm() < 0.04


@needs["sglang"]
def test_deepseek_v32_rows_are_read_by_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's writer of 656 bytes needs a GPU; its reader gives the numbers that were stored."""
    place = importlib.import_module("sglang.kernels.ops.attention.dsa.dequant_k_cache")
    kernel = Interpreted(place._dequantize_k_cache_fast_kernel)
    monkeypatch.setattr(place, "_dequantize_k_cache_fast_kernel", kernel)
    x = torch.cat([spread_rows(), spread_rows(64)], 1)
    mine = DSV4Rows.quantize(x, layout="record656", page_size=PAGE)
    records = mine.data.view(torch.float8_e4m3fn).view(-1, PAGE, 1, 656)
    read = place.dequantize_k_cache(records).view(TOKENS, 576)
    assert torch.equal(read, mine.dequantize().bfloat16())
    assert (read.float() - x.float()).norm() / x.float().norm() < 0.03


@pytest.mark.parametrize(
    ("engine", "ratio"),
    [
        pytest.param("vllm", 4, marks=needs["vllm"]),
        pytest.param("sglang", 1, marks=needs["sglang"]),
        pytest.param("sglang", 4, marks=needs["sglang"]),
    ],
)
@pytest.mark.parametrize("form", ["bf16", "fp8_e4m3fn"])
def test_the_probes_calls_of_the_engines_kernels_are_attention(
    form: str, engine: str, ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = DecodeCase(lens=(37, 20), num_kv_heads=1, gqa_ratio=ratio, head_dim=64, page_size=16, format=form)
    inputs, bound = case.inputs("cpu"), 0.005
    if engine == "vllm":
        place = vllm_module_with_triton("vllm.v1.attention.ops.triton_unified_attention", monkeypatch)
        place.kernel_unified_attention = Interpreted(place.kernel_unified_attention)
        call = vllm_call(place.unified_attention, inputs)
    else:
        place = importlib.import_module("sglang.kernels.ops.attention.decode_attention")
        for name in ("_fwd_kernel_stage1", "_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2"):
            monkeypatch.setattr(place, name, Interpreted(getattr(place, name)))
        call = sglang_call(place.decode_attention_fwd, inputs)
        if ratio > 1 and form != "bf16":
            bound = 0.05  # its grouped kernel rounds P to the cache's FP8
    exact = paged_decode_reference(inputs.q, inputs.cache, inputs.table, out_dtype=torch.float32)
    assert relative_l1(call(), exact) < bound
