"""The adapters of outside suites, by a small suite of the same form that is written here.

It imports narrowkv under AITER's and vLLM's names, makes its tensors on "cuda", and has large shapes and a
test of what narrowkv does not do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

SUITE = """
import pytest
import torch

from aiter.ops.pa_sparse_prefill_opus import pa_sparse_prefill_opus
from aiter.ops.triton.utils._triton import arch_info


@pytest.mark.parametrize("n", [512, 1024])
@pytest.mark.parametrize("total_pages", [4096])
def test_pa_sparse_prefill_opus(n, total_pages):
    assert torch.cuda.is_available() and arch_info.get_arch() == "gfx950"
    torch.set_default_device("cuda:0")
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cuda")
    q = torch.randn(n, 16, 512, generator=generator).to(torch.bfloat16).to("cuda")
    pool = torch.randn(total_pages, 512, generator=generator).to(device, torch.bfloat16)
    indptr = torch.arange(n + 1, dtype=torch.int32, device=device)
    indices = torch.zeros(n, dtype=torch.int32, device="cuda:0")
    sink = torch.full((16,), float("-inf")).cuda()
    out = pa_sparse_prefill_opus(q, pool, indices, indptr, pool, indices[:0], indptr * 0, sink, 0.1)
    torch.cuda.synchronize()
    assert (n, total_pages) == (9, 70)
    torch.testing.assert_close(out, pool[0].expand_as(out))  # one row each: the row itself


def test_wrong():
    assert not WRONG


def test_skipped():
    pytest.skip("by itself")
"""


def _run(folder: Path, *options: str, wrong: bool) -> tuple[subprocess.CompletedProcess[str], str]:
    file = folder / "aiter/op_tests/test_pa_sparse_prefill_opus.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(SUITE.replace("WRONG", str(wrong)))
    command = [sys.executable, str(HERE / "run.py"), str(folder), "--only", "(opus)", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| AITER sparse prefill (opus)")]
    return done, rows[0]


def test_a_suite_runs_with_cut_shapes_and_its_failures_are_counted(tmp_path: Path) -> None:
    done, row = _run(tmp_path, wrong=False)
    assert done.returncode == 0, done.stdout
    # Both numbers of tokens are cut to 9: one case is left.
    assert re.search(r"\| 2 \| 0 \| 1 \| \d+ \| 1: equal to another case", row)
    done, row = _run(tmp_path, "-k", "wrong or skipped", wrong=True)
    assert done.returncode == 1
    assert "| 0 | 1 | 1 |" in row


def test_without_a_folder_it_says_what_to_fetch_and_runs_nothing(tmp_path: Path) -> None:
    for arguments in ([], [str(tmp_path)]):
        command = [sys.executable, str(HERE / "run.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        assert "Nothing was run" in done.stdout
        assert all(name in done.stdout for name in ("ROCm/aiter", "FlashMLA", "vLLM", "einops pandas"))


TUTORIAL = """
import torch
import triton
import triton.language as tl


@triton.jit
def add_one(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1)


x = torch.zeros(64, device="cuda")
add_one[(1,)](x, BLOCK=64)
assert torch.cuda.get_device_properties(0).gcnArchName.startswith("gfx942")
assert bool((x == WANT).all())


@triton.testing.perf_report(triton.testing.Benchmark(["n"], [1], "p", ["a"], ["a"], "times", {}))
def benchmark(n, p):
    raise AssertionError("it must not run")


benchmark.run(print_data=True)
"""
TEST_CORE = """
import pytest
import torch


@pytest.mark.parametrize("n", range(8))
def test_many(n, device):
    assert n in (2, 5, 7) and torch.zeros(n, device=device).is_cuda


def test_one(device):
    pass
"""
CONFTEST = """
import pytest


@pytest.fixture
def device():
    return "cuda"
"""


def test_triton_s_programs_and_tests_run_on_the_virtual_gpu(tmp_path: Path) -> None:
    test = tmp_path / "triton/python/test"
    (test / "unit/language").mkdir(parents=True)
    (test / "unit/language/test_core.py").write_text(TEST_CORE)
    (test / "conftest.py").write_text(CONFTEST)
    (tmp_path / "triton/python/tutorials").mkdir()
    for name, want in (("01-vector-add", "1"), ("02-fused-softmax", "2")):
        (tmp_path / f"triton/python/tutorials/{name}.py").write_text(TUTORIAL.replace("WANT", want))
    command = [sys.executable, str(HERE / "run.py"), str(tmp_path), "-n0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 1, "tutorial 02 fails"
    rows = [line for line in done.stdout.splitlines() if line.startswith("| Triton")]
    assert re.match(r"\| Triton tutorial 01 .* \| 1 \| 0 \| 0 \| [1-9]\d* \|", rows[0]), done.stdout
    assert re.match(r"\| Triton tutorial 02 .* \| 0 \| 1 \| 0 \| [1-9]\d* \|", rows[1]), done.stdout
    assert re.match(r"\| Triton test_core .* \| 4 \| 0 \| 0 \| \d+ \| 5: not sampled", rows[2]), done.stdout


STAND_INS = """
import json, sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, sys.argv[1])
for name in ("aiter_names", "flash_mla_names", "vllm_names"):
    __import__(f"stand_ins.{name}")
    sys.modules[f"stand_ins.{name}"].install(Path(sys.argv[2]), SimpleNamespace(arch="gfx950"))

import flash_mla
from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd
from aiter.ops.triton.attention.fav3_sage import fav3_sage_wrapper_func
from aiter.ops.triton.attention.utils import block_attn_mask_to_ragged_lut

torch.manual_seed(0)
found = {}
q, kv = torch.randn(3, 8, 512).bfloat16(), torch.randn(20, 1, 512).bfloat16()
indices = torch.randint(0, 20, (3, 1, 6), dtype=torch.int32)
indices[2] = 99  # no row
o, largest, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05)
logits = q[:2].float() @ kv[indices[:2, 0].long(), 0].float().mT * 0.05
expected = logits.softmax(-1) @ kv[indices[:2, 0].long(), 0].float()
found["prefill"] = float((o[:2] - expected).abs().max())
found["largest"] = float((largest[:2] - logits.amax(-1)).abs().max())
found["lse"] = float((lse[:2] - logits.logsumexp(-1)).abs().max())
found["nothing"] = [bool((o[2] == 0).all()), bool((lse[2] == torch.inf).all())]

q, (k, v) = torch.randn(2, 4, 64).bfloat16(), torch.randn(2, 32, 2, 64).bfloat16()
slots = torch.randperm(32).view(2, 16)
o, lse = torch.zeros(2, 4, 64).bfloat16(), torch.zeros(2, 4)
decode_attention_fwd(q, k, v, o, lse, slots, torch.full((2,), 16), None, 4, 0.125)
keys, values = (x[slots].float().repeat_interleave(2, 2) for x in (k, v))
logits = torch.einsum("bhd,bshd->bhs", q.float(), keys) * 0.125
found["decode"] = float((o - torch.einsum("bhs,bshd->bhd", logits.softmax(-1), values)).abs().max())
found["sums"] = float((lse - logits.logsumexp(-1)).abs().max())

q, k, v = (torch.randn(1, 2, 32, 128).bfloat16() for _ in range(3))
o, lse = fav3_sage_wrapper_func(q, k, v, 0.1, return_lse=True, layout="bhsd", hadamard_rotation=True)
logits = q.float() @ k.float().mT * 0.1
found["sage"] = float((o - logits.softmax(-1) @ v.float()).abs().mean())
found["sage lse"] = float((lse - logits.logsumexp(-1)).abs().max())
mask = torch.tensor([[[True, False]]])
q, k, v = (torch.randn(1, 128, 2, 128).bfloat16() for _ in range(3))
o = fav3_sage_wrapper_func(q, k, v, 0.1, block_lut=block_attn_mask_to_ragged_lut(mask, num_heads=2))
logits = torch.einsum("bqhd,bkhd->bhqk", q.float(), k[:, :64].float()) * 0.1
expected = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v[:, :64].float())
found["sage blocks"] = float((o - expected).abs().mean())
print(json.dumps(found))
"""


def test_narrowkv_under_the_other_names(tmp_path: Path) -> None:
    """In a process of its own, since the names of other projects are taken."""
    done = subprocess.run(
        [sys.executable, "-c", STAND_INS, str(HERE), str(tmp_path)], capture_output=True, text=True,
        timeout=300, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("nothing") == [True, True]
    bounds = {"prefill": 0.02, "decode": 0.02, "sage": 0.05, "sage blocks": 0.05, "sage lse": 0.2}
    for name, error in found.items():
        assert error <= bounds.get(name, 1e-3), (name, error)


@pytest.mark.parametrize("name", ["test_sage_mxfp4", "test_sage_mxfp4_block_sparse_none"])
def test_a_name_that_ends_with_a_star_leaves_out_what_begins_so(name: str) -> None:
    sys.path.insert(0, str(HERE))
    try:
        from suites import LeftOut
    finally:
        sys.path.remove(str(HERE))
    row = LeftOut(("test_sage_mxfp4*", "test_sage"), "MXFP4", lambda values: values.get("d", 1) == 1)
    assert row.holds(name, {})
    assert not row.holds(name, {"d": 2})
    assert row.holds("test_sage", {})
    assert not row.holds("test_sage_int8", {})
