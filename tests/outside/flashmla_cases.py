"""FlashMLA's tests are scripts: their functions are called here, on cases like theirs with cut shapes."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

FILE = Path(os.environ.get("OUTSIDE_FILE", "test_flash_mla_sparse_decoding.py")).stem

DECODE = {
    "V3.2": {"d_qk": 576},
    "V3.2, pages of 61, all invalid": {"d_qk": 576, "block_size": 61, "is_all_indices_invalid": True},
    "V4": {},
    "V4, lengths": {"have_topk_length": True, "have_zero_seqlen_k": True},
    "V4, two caches": {"extra_s_k": 40, "extra_topk": 24, "block_size": 61, "extra_block_size": 2},
    "V4, two caches and lengths": {
        "extra_s_k": 40, "extra_topk": 24, "extra_block_size": 64, "have_topk_length": True,
        "have_extra_topk_length": True,
    },
    "V4, 128 heads": {"h_q": 128, "block_size": 2},
}  # fmt: skip
PREFILL = {
    "V4": {},
    "V4, sink": {"have_attn_sink": True},
    "V4, lengths": {"have_attn_sink": True, "have_topk_length": True},
    "V4, more indices than rows": {"s_kv": 40, "topk": 96},
    "V4, 128 heads": {"h_q": 128},
    "V3.2": {"d_qk": 576, "have_attn_sink": True},
    "V3.2, all invalid": {
        "d_qk": 576, "is_all_indices_invalid": True, "have_attn_sink": True, "have_topk_length": True,
    },
}  # fmt: skip


@pytest.fixture
def bf16_by_default() -> Any:
    """The scripts' main sets the same default."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize("name", DECODE)
def test_decode(name: str, bf16_by_default: None) -> None:
    script, lib = importlib.import_module(FILE), importlib.import_module("lib")
    case = {
        "b": 2, "h_q": 64, "s_q": 2, "h_kv": 1, "s_kv": 96, "is_varlen": True, "topk": 40, "d_qk": 512,
        "num_runs": 0, **DECODE[name],
    }  # fmt: skip
    param = lib.RawTestParamForDecode(**case).to_test_param()
    assert script.test_flash_mla(param).is_correct


@pytest.mark.parametrize("name", PREFILL)
def test_prefill(name: str, bf16_by_default: None) -> None:
    script, lib = importlib.import_module(FILE), importlib.import_module("lib")
    case = {"s_q": 3, "s_kv": 95, "topk": 64, "h_q": 64, "num_runs": 0, **PREFILL[name]}
    assert script.run_test(lib.TestParam(**case))


if "decoding" in FILE:
    del test_prefill
else:
    del test_decode
