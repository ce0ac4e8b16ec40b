"""The launch path: interpreting repaired and reversible, compiling in the same process."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import LaunchOptions, compile_for, launch, run_as
from narrowkv.runtime.launch.artifact import CompiledArtifact, hot_loop, spills_in_loops
from narrowkv.runtime.targets import get_target

# What the interpreter needs mended differs between Tritons.
pytestmark = pytest.mark.codegen_all

ONE = LaunchOptions(num_warps=1, num_stages=1)


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    grid = i[:, None] * N + i[None, :]
    tl.store(c_ptr + grid, tl.dot(tl.load(a_ptr + grid), tl.load(b_ptr + grid)))


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(o_ptr + i, x * y + x)


@triton.jit
def _select_kernel(x_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(o_ptr + i, tl.where(i % 2 == 0, x, 1.5))


@triton.jit
def _cast_kernel(x_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o_ptr + i, tl.load(x_ptr + i).to(o_ptr.dtype.element_ty))


@triton.jit
def _count_kernel(o_ptr):
    tl.atomic_add(o_ptr, 1)


_STEP = 3


@triton.jit
def _stepping_kernel(o_ptr, STEP: tl.constexpr = _STEP):
    tl.store(o_ptr, STEP)


@triton.jit
def _broken_kernel(o_ptr, N: tl.constexpr):
    tl.store(o_ptr + tl.arange(0, N), tl.arange(0, 2 * N))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_a_dot_multiplies_values_and_not_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(16, 16).to(dtype) for _ in range(2))
    c = torch.zeros(16, 16)
    launch(_dot_kernel, (1,), (a, b, c), {"N": 16}, ONE)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-6, atol=1e-5)


def test_bf16_arithmetic_is_bf16_arithmetic() -> None:
    torch.manual_seed(1)
    x, y = (torch.randn(128).bfloat16() for _ in range(2))
    o = torch.zeros(128, dtype=torch.bfloat16)
    launch(_arithmetic_kernel, (1,), (x, y, o), {"N": 128}, ONE)
    torch.testing.assert_close(o, x * y + x, rtol=2**-7, atol=1e-3)


def test_a_constant_becomes_bf16_beside_bf16() -> None:
    x = torch.randn(16).bfloat16()
    o = torch.zeros(16, dtype=torch.bfloat16)
    launch(_select_kernel, (1,), (x, o), {"N": 16}, ONE)
    torch.testing.assert_close(o[::2], x[::2], rtol=0, atol=0)
    assert (o[1::2] == 1.5).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2])
def test_every_fp8_code_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    wide = torch.zeros(256)
    launch(_cast_kernel, (1,), (codes, wide), {"N": 256}, ONE)
    np.testing.assert_array_equal(wide.numpy(), codes.float().numpy())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2])
def test_casts_to_fp8_round_to_nearest_even_and_saturate(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = codes[codes.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([ties, torch.randn(500) * 100, torch.tensor([1e9, -1e9])])
    x = torch.cat([x, torch.zeros(1024 - x.numel())])
    stored = torch.zeros(1024, dtype=torch.uint8).view(dtype)
    launch(_cast_kernel, (1,), (x, stored), {"N": 1024}, ONE)
    top = torch.finfo(dtype).max
    assert torch.equal(stored.float(), x.clamp(-top, top).to(dtype).float())


def test_every_program_of_the_grid_runs_and_an_empty_grid_does_nothing() -> None:
    o = torch.zeros(1, dtype=torch.int32)
    launch(_count_kernel, (3, 4, 5), (o,), {}, ONE)
    assert int(o) == 60
    launch(_count_kernel, (3, 0), (o,), {}, ONE)
    assert int(o) == 60


def test_one_process_interprets_and_compiles_in_any_order() -> None:
    a = torch.eye(16).bfloat16()
    for target in ("gfx942", "gfx950"):
        c = torch.zeros(16, 16)
        with compile_for(target) as artifacts:
            launch(_dot_kernel, (1,), (a, a, c), {"N": 16}, ONE)
        assert not bool(c.any()), "compiling does not run"
        (code,) = artifacts
        assert code.target.name == target
        assert target in code.assembly.split("\n", 1)[0], "the assembly names its target first"
        assert code.code_object[:4] == b"\x7fELF"
        assert code.whole.mfma > 0
        assert code.registers.vgprs > 0
        assert [tuple(arg.shape) for arg in code.args] == [(16, 16)] * 3
        launch(_dot_kernel, (1,), (a, a, c), {"N": 16}, ONE)
        assert torch.equal(c, torch.eye(16))


def _what_the_process_shares() -> list[Any]:
    language = {name: vars(tl)[name] for name in sorted(vars(tl))}
    tensor = {name: vars(tl.tensor)[name] for name in sorted(vars(tl.tensor))}
    return [
        language,
        tensor,
        JITFunction.__call__,
        tl.dtype.to_ir,
        triton.knobs.runtime.interpret,
        dict(os.environ),
    ]


def test_a_launch_changes_nothing_that_others_import() -> None:
    before = _what_the_process_shares()
    seen = []

    class Watch(torch.Tensor):
        def data_ptr(self) -> int:
            seen.append(_what_the_process_shares())
            return super().data_ptr()

    launch(_count_kernel, (1,), (torch.zeros(1, dtype=torch.int32).as_subclass(Watch),), {}, ONE)
    with pytest.raises(Exception):  # noqa: B017, PT011  # which one is the interpreter's business
        launch(_broken_kernel, (1,), (torch.zeros(16),), {"N": 16}, ONE)
    assert len(seen) > 1, "asked before the launch, and by the interpreter"
    assert all(during == before for during in [*seen, _what_the_process_shares()])
    assert "interpreter_builder" not in _count_kernel.fn.__globals__


def test_targets_that_cannot_be_compiled_for_are_refused_with_what_can() -> None:
    for name, words in (("sm90", "AMD"), ("gfx1100", "RDNA"), ("gfx1036", "RDNA"), ("gfx906", "not known")):
        with pytest.raises(UnsupportedError, match=f"{words}.*gfx942, gfx950"), compile_for(name):
            pass
    with pytest.raises(ValueError, match="gfx950"), compile_for("no target"):
        pass


@pytest.mark.parametrize(
    ("target", "instruction"), [("gfx90a", "v_mfma"), ("gfx1201", "v_wmma"), ("gfx1250", "v_wmma")]
)
def test_targets_without_hardware_figures(target: str, instruction: str) -> None:
    if target == "gfx1250" and triton.__version__ < "3.8":
        pytest.skip(f"Triton {triton.__version__} has no {target}")
    a = torch.eye(16).bfloat16()
    with compile_for(target) as artifacts:
        launch(_dot_kernel, (1,), (a, a, torch.zeros(16, 16)), {"N": 16}, ONE)
    assert artifacts[0].whole.total(instruction) == artifacts[0].whole.mfma > 0
    with pytest.raises(UnsupportedError, match="no hardware figures"):
        _ = artifacts[0].waves_per_simd


SPILLING = """
	; implicit-def: $vgpr9 : SGPR spill to VGPR lane
	v_writelane_b32 v9, s1, 0
	scratch_store_dword off, v7, off ; 4-byte Folded Spill
.LBB0_1:
	v_readlane_b32 s4, v8, 3
	{inside}
	s_cbranch_scc1 .LBB0_1
	v_readlane_b32 s1, v9, 0
	s_endpgm
"""


@pytest.mark.parametrize(
    ("inside", "count"),
    [
        ("s_nop 0", 0),
        # A loop without matrix instructions is not the hot loop, in which moves of scalars count.
        ("v_readlane_b32 s1, v9, 0", 0),
        ("v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3]\nv_readlane_b32 s1, v9, 0", 1),
        ("v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3]\nv_writelane_b32 v9, s1, 0", 1),
        ("scratch_load_dword v7, off, off ; 4-byte Folded Reload", 1),
        ("v_accvgpr_write_b32 a3, v7 ;  Reload Reuse", 1),
        ("v_accvgpr_write_b32 a3, v7", 0),
    ],
)
def test_spills_are_counted_inside_loops_alone(inside: str, count: int) -> None:
    assert spills_in_loops(SPILLING.format(inside=inside)) == count


# Two loops that follow each other, and a jump back from behind both, as the compiler may place blocks.
SPANNED = """
.LBB0_1:
	v_add_u32_e32 v1, v2, v3
.LBB0_2:
	v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3]
	s_cbranch_scc1 .LBB0_2
	v_readlane_b32 s1, v9, 0
.LBB0_3:
	v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3]
	v_exp_f32_e32 v1, v2
	s_cbranch_scc1 .LBB0_3
	s_cbranch_scc1 .LBB0_1
	; implicit-def: $vgpr9 : SGPR spill to VGPR lane
	s_endpgm
"""


def test_the_hot_loop_holds_no_other_loop_with_matrix_instructions() -> None:
    loop = hot_loop(SPANNED)
    assert (loop.mfma, loop.valu, loop.transcendental) == (1, 0, 0)
    assert spills_in_loops(SPANNED) == 0


def test_options_go_where_the_backend_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledArtifact, "from_triton", lambda compiled, **_: compiled)
    options = LaunchOptions(
        kpack=2, llvm_fn_attrs="amdgpu-sched-strategy=iterative-ilp", launch_pdl=True, maxnreg=64
    )
    gfx942, gfx950, sm90 = (options.for_target(get_target(name)) for name in ("gfx942", "gfx950", "sm90"))
    assert gfx942["kpack"] == 2
    assert "kpack" not in gfx950
    assert sm90.keys() == {"num_warps", "num_stages", "enable_fp_fusion", "launch_pdl", "maxnreg"}
    assert not {"launch_pdl", "maxnreg"} & gfx942.keys()
    assert LaunchOptions().for_target(get_target("gfx942")).keys() == {
        "num_warps",
        "num_stages",
        "enable_fp_fusion",
    }
    a = torch.eye(16).bfloat16()
    for attributes, set_there in ((options, True), (ONE, False)):
        with compile_for("gfx942") as artifacts:
            launch(_dot_kernel, (1,), (a, a, torch.zeros(16, 16)), {"N": 16}, attributes)
        assert ("iterative-ilp" in artifacts[0].asm["llir"]) == set_there


def test_a_default_may_be_a_variable_of_the_module() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    launch(_stepping_kernel, (1,), (out,), {}, ONE)
    assert int(out) == 3


def test_run_as_interprets() -> None:
    o = torch.zeros(1, dtype=torch.int32)
    with run_as("gfx942"):
        launch(_count_kernel, (2,), (o,), {}, ONE)
    assert int(o) == 2


def test_a_launch_needs_a_tensor() -> None:
    with pytest.raises(TypeError, match="at least one tensor"):
        launch(_count_kernel, (1,), (1,), {}, ONE)
