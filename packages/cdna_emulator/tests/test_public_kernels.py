"""Kernels that the emulator was not written with: Triton's tutorials and Liger-Kernel.

They are not in this repository. ``NARROWKV_PUBLIC_KERNELS`` names a folder with checkouts ``triton`` (its
``python/tutorials``) and ``Liger-Kernel``; without it the tests skip. Only functions under ``@triton.jit``
are taken from a file, so that nothing else of it runs.
"""

import ast
import importlib.util
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from emulator_support import TARGETS, emulate  # noqa: E402

FOLDER = os.environ.get("NARROWKV_PUBLIC_KERNELS")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="NARROWKV_PUBLIC_KERNELS names no folder with the checkouts"
)
PRELUDE = (
    "import triton\nimport triton.language as tl\nfrom triton.language.extra.libdevice import rsqrt, tanh\n"
)
TUTORIALS, LIGER = "triton/python/tutorials", "Liger-Kernel/src/liger_kernel/ops"


@pytest.fixture
def jit_functions(tmp_path):
    """Loads the jit functions of a file as a module of their own."""

    def load(path):
        tree = ast.parse((Path(FOLDER) / path).read_text())
        kept = []
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(d) for d in node.decorator_list
            ):
                node.decorator_list = [ast.parse("triton.jit").body[0].value]
                kept.append(ast.unparse(node))
            elif isinstance(node, ast.AnnAssign) and "constexpr" in ast.unparse(node.annotation):
                kept.append(ast.unparse(node))
        file = tmp_path / "extracted.py"
        file.write_text(PRELUDE + "\n\n".join(kept) + "\n")
        spec = importlib.util.spec_from_file_location(f"extracted_{abs(hash(path))}", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(params=TARGETS)
def target(request):
    torch.manual_seed(0)
    return request.param


def nans(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


def close(got, want, tolerance=2e-6):
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def test_tutorial_vector_add(jit_functions, target):
    fn = jit_functions(f"{TUTORIALS}/01-vector-add.py").add_kernel
    x, y, o = torch.randn(3000), torch.randn(3000), nans(3000)
    emulate(
        fn, target, (3,), {"x_ptr": x, "y_ptr": y, "output_ptr": o, "n_elements": 3000}, {"BLOCK_SIZE": 1024}
    )
    assert torch.equal(o, x + y)


def test_tutorial_softmax(jit_functions, target):
    fn = jit_functions(f"{TUTORIALS}/02-fused-softmax.py").softmax_kernel
    x, o = torch.randn(4, 781), nans(4, 781)
    arguments = {
        "output_ptr": o,
        "input_ptr": x,
        "input_row_stride": 781,
        "output_row_stride": 781,
        "n_cols": 781,
    }
    emulate(fn, target, (4,), arguments, {"BLOCK_SIZE": 1024})
    close(o, x.double().softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tutorial_matmul(jit_functions, target, dtype):
    fn = jit_functions(f"{TUTORIALS}/03-matrix-multiplication.py").matmul_kernel
    m, n, k = 128, 128, 96
    a, b, c = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), nans(m, n, dtype=torch.float16)
    names = dict(
        zip(
            ("stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn"),
            (k, 1, n, 1, n, 1),
            strict=True,
        )
    )
    arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "M": m, "N": n, "K": k, **names}
    constants = {
        "BLOCK_SIZE_M": 64,
        "BLOCK_SIZE_N": 64,
        "BLOCK_SIZE_K": 32,
        "GROUP_SIZE_M": 2,
        "ACTIVATION": None,
    }
    emulate(fn, target, (4,), arguments, constants)
    close(c, a.double() @ b.double(), 2e-3)


def test_tutorial_seeded_dropout(jit_functions, target):
    fn = jit_functions(f"{TUTORIALS}/04-low-memory-dropout.py")._seeded_dropout
    x, o = torch.rand(1000) + 1, nans(1000)
    emulate(
        fn,
        target,
        (1,),
        {"x_ptr": x, "output_ptr": o, "n_elements": 1000, "p": 0.5, "seed": 123},
        {"BLOCK_SIZE": 1024},
    )
    kept = o != 0
    assert torch.equal(o[kept], x[kept] * 2)
    assert 430 < kept.sum() < 570


def test_tutorial_layer_norm(jit_functions, target):
    fn = jit_functions(f"{TUTORIALS}/05-layer-norm.py")._layer_norm_fwd_fused
    x, w, b = torch.randn(4, 1000), torch.randn(1000), torch.randn(1000)
    y, mean, rstd = nans(4, 1000), nans(4), nans(4)
    arguments = {
        "X": x,
        "Y": y,
        "W": w,
        "B": b,
        "Mean": mean,
        "Rstd": rstd,
        "stride": 1000,
        "N": 1000,
        "eps": 1e-5,
    }
    emulate(fn, target, (4,), arguments, {"BLOCK_SIZE": 512})
    close(y, torch.nn.functional.layer_norm(x.double(), (1000,), w.double(), b.double(), 1e-5), 1e-5)


def test_tutorial_layer_norm_backward_with_locks(jit_functions, target):
    fn = jit_functions(f"{TUTORIALS}/05-layer-norm.py")._layer_norm_bwd_dx_fused
    x, w, dy = torch.randn(6, 256), torch.randn(256), torch.randn(6, 256)
    mean, rstd = x.mean(1), 1 / torch.sqrt(x.var(1, unbiased=False) + 1e-5)
    dx, dw, db, lock = (
        nans(6, 256),
        torch.zeros(2, 256),
        torch.zeros(2, 256),
        torch.zeros(4, dtype=torch.int32),
    )
    arguments = {"DX": dx, "DY": dy, "DW": dw, "DB": db, "X": x, "W": w, "B": w, "M": mean, "V": rstd,
    "Mean": mean, "Rstd": rstd,
                 "Lock": lock, "stride": 256, "N": 256, "eps": 1e-5}  # fmt: skip
    arguments = {name: value for name, value in arguments.items() if name in fn.arg_names}
    emulate(fn, target, (6,), arguments, {"GROUP_SIZE_M": 2, "BLOCK_SIZE_N": 256})
    leaf = x.double().requires_grad_()
    torch.nn.functional.layer_norm(leaf, (256,), w.double(), None, 1e-5).backward(dy.double())
    close(dx, leaf.grad, 1e-4)
    close(db.sum(0), dy.sum(0), 1e-5)


def test_tutorial_fused_attention(jit_functions, target):
    fn = jit_functions(f"{TUTORIALS}/06-fused-attention.py")._fwd_kernel
    n, d = 128, 64
    q, k, v = (torch.randn(1, 2, n, d).half() for _ in range(3))
    o, l, m, tmp = torch.zeros_like(q), nans(2, n), nans(2, n), nans(2, n)
    arguments = {
        "Q": q,
        "K": k,
        "V": v,
        "sm_scale": 0.125,
        "TMP": tmp,
        "L": l,
        "M": m,
        "Out": o,
        "Z": 1,
        "H": 2,
        "N_CTX": n,
    }
    for x in "qkvo":
        last = {"q": "mk", "k": "nk", "v": "kn", "o": "mn"}[x]
        arguments |= dict(
            zip(
                (f"stride_{x}z", f"stride_{x}h", f"stride_{x}{last[0]}", f"stride_{x}{last[1]}"),
                (2 * n * d, n * d, d, 1),
                strict=True,
            )
        )
    arguments = {name: value for name, value in arguments.items() if name in fn.arg_names}
    emulate(fn, target, (1, 2), arguments, {"BLOCK_M": 128, "BLOCK_DMODEL": d, "BLOCK_N": 128})
    scores = (q.double() @ k.double().transpose(-1, -2) * 0.125).masked_fill(
        ~torch.ones(n, n).tril().bool(), -float("inf")
    )
    top = scores.amax(-1, keepdim=True)
    p = (scores - top).exp()
    close(m, top[0, ..., 0], 1e-5)
    close(l, p.sum(-1)[0], 1e-5)
    # This version of the tutorial says `p *= l_rcp`, which today's Triton broadcasts along the columns.
    close(o, (p / p.sum(-1)[..., None, :]) @ v.double(), 4e-3)


def test_liger_swiglu(jit_functions, target):
    fn = jit_functions(f"{LIGER}/swiglu.py")._swiglu_forward_kernel
    a, b, c = torch.randn(3, 500), torch.randn(3, 500), nans(3, 500)
    arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "stride": 500, "gate_multiplier": 1.0}
    emulate(fn, target, (3,), arguments, {"n_cols": 500, "BLOCK_SIZE": 512})
    close(c, torch.nn.functional.silu(a.double()) * b)


def test_liger_rms_norm(jit_functions, target):
    fn = jit_functions(f"{LIGER}/rms_norm.py")._rms_norm_forward_kernel
    x, w, y, r = torch.randn(3, 500), torch.randn(500), nans(3, 500), nans(3)
    arguments = {"Y_ptr": y, "Y_row_stride": 500, "X_ptr": x, "X_row_stride": 500, "W_ptr": w,
    "W_row_stride": 1, "RSTD_ptr": r,
                 "RSTD_row_stride": 1, "n_cols": 500, "eps": 1e-6, "offset": 0.0}  # fmt: skip
    emulate(fn, target, (3,), arguments, {"casting_mode": 0, "elementwise_affine": True, "BLOCK_SIZE": 512})
    close(y, x * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * w)


def test_liger_geglu(jit_functions, target):
    fn = jit_functions(f"{LIGER}/geglu.py")._geglu_tanh_forward_kernel
    a, b, c = torch.randn(3, 500), torch.randn(3, 500), nans(3, 500)
    emulate(fn, target, (3,), {"a": a, "b": b, "c": c, "stride": 500}, {"n_cols": 500, "BLOCK_SIZE": 512})
    close(c, torch.nn.functional.gelu(a.double(), approximate="tanh") * b, 1e-5)


def test_liger_layer_norm(jit_functions, target):
    fn = jit_functions(f"{LIGER}/layer_norm.py")._layer_norm_forward_kernel
    x, w, b, y, mean, rstd = (
        torch.randn(3, 500),
        torch.randn(500),
        torch.randn(500),
        nans(3, 500),
        nans(3),
        nans(3),
    )
    arguments = {
        "Y_ptr": y,
        "X_ptr": x,
        "W_ptr": w,
        "B_ptr": b,
        "Mean_ptr": mean,
        "RSTD_ptr": rstd,
        "n_cols": 500,
        "eps": 1e-5,
    }
    arguments |= {
        f"{p}_row_stride": s
        for p, s in (("Y", 500), ("X", 500), ("W", 1), ("B", 1), ("Mean", 1), ("RSTD", 1))
    }
    emulate(fn, target, (3,), arguments, {"BLOCK_SIZE": 512})
    close(y, torch.nn.functional.layer_norm(x.double(), (500,), w.double(), b.double(), 1e-5), 1e-5)


def test_liger_softmax(jit_functions, target):
    fn = jit_functions(f"{LIGER}/softmax.py")._softmax_single_block_forward_kernel
    x, y = torch.randn(3, 1000), nans(3, 1000)
    emulate(
        fn,
        target,
        (3,),
        {"Y_ptr": y, "Y_row_stride": 1000, "X_ptr": x, "X_row_stride": 1000, "n_cols": 1000},
        {"BLOCK_SIZE": 1024},
    )
    close(y, x.double().softmax(-1))


@pytest.mark.parametrize("log_target", [False, True])
def test_liger_kl_divergence(jit_functions, target, log_target):
    fn = jit_functions(f"{LIGER}/kl_div.py")._kldiv_kernel_forward
    y, gt, loss = torch.randn(3, 500).log_softmax(-1), torch.randn(3, 500).softmax(-1), nans(3, 500)
    gt = gt.log() if log_target else gt
    arguments = {
        "y_ptr": y,
        "y_stride": 500,
        "gt_ptr": gt,
        "gt_stride": 500,
        "loss_ptr": loss,
        "loss_stride": 500,
        "n_cols": 500,
        "eps": 1e-10,
    }
    emulate(fn, target, (3,), arguments, {"BLOCK_SIZE": 256, "log_target": log_target, "reduction": 0})
    close(
        loss,
        torch.nn.functional.kl_div(y.double(), gt.double(), reduction="none", log_target=log_target),
        2e-6,
    )


def test_liger_sparsemax(jit_functions, target):
    fn = jit_functions(f"{LIGER}/sparsemax.py")._sparsemax_forward_kernel
    x, o = torch.randn(3, 200), nans(3, 200)
    ordered = x.sort(-1, descending=True)[0]
    arguments = {
        "x_ptr": x,
        "x_stride_row": 200,
        "sorted_x_ptr": ordered,
        "sorted_x_stride_row": 200,
        "o_ptr": o,
        "o_stride_row": 200,
        "n_cols": 200,
    }
    emulate(fn, target, (3,), arguments, {"BLOCK_SIZE": 256, "num_warps": 4})
    close(o.sum(-1), torch.ones(3), 1e-5)
    threshold = (x - o)[:, :].masked_fill(o <= 0, float("nan")).nanmean(-1, keepdim=True)
    close(o, (x - threshold).clamp(min=0), 1e-5)


def test_liger_relu_squared(jit_functions, target):
    fn = jit_functions(f"{LIGER}/relu_squared.py")._relu_squared_forward_kernel
    x, y = torch.randn(3, 300), nans(3, 300)
    arguments = {"Y_ptr": y, "Y_stride": 300, "X_ptr": x, "X_stride": 300}
    emulate(
        fn,
        target,
        (3,),
        arguments | ({"n_cols": 300} if "n_cols" in fn.arg_names else {}),
        {"BLOCK_SIZE": 512},
    )
    close(y, x.clamp(min=0).square())
