"""Kernels that the emulator was not written with: Triton's tutorials and Liger-Kernel.

They are not in this repository. ``NARROWKV_PUBLIC_KERNELS`` names a folder with checkouts ``triton`` (its
``python/tutorials``) and ``Liger-Kernel``; without it the tests skip. Only functions under ``@triton.jit``
are taken from a file, so that nothing else of it runs.
"""

import ast
import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from emulator_support import TARGETS, emulate, nans  # noqa: E402
from torch.nn import functional  # noqa: E402

FOLDER = os.environ.get("NARROWKV_PUBLIC_KERNELS")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="NARROWKV_PUBLIC_KERNELS names no folder with the checkouts"
)
PRELUDE = (
    "import triton\nimport triton.language as tl\nfrom triton.language.extra.libdevice import rsqrt, tanh\n"
)


class Call(NamedTuple):
    """A launch of a public kernel, and what it must give.

    Arguments that the checkout's version of the kernel does not have are left out.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    expected: list[tuple[Any, Any, float]]  # an output, its value, and the tolerance


def jit_function(path, name, folder):
    """A jit function of a file, from a module with the file's jit functions alone."""
    kept = []
    for node in ast.parse((Path(FOLDER) / path).read_text()).body:
        if isinstance(node, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(d) for d in node.decorator_list
        ):
            node.decorator_list = [ast.parse("triton.jit").body[0].value]
            kept.append(ast.unparse(node))
        elif isinstance(node, ast.AnnAssign) and "constexpr" in ast.unparse(node.annotation):
            kept.append(ast.unparse(node))
    file = folder / "extracted.py"
    file.write_text(PRELUDE + "\n\n".join(kept) + "\n")
    spec = importlib.util.spec_from_file_location(f"extracted_{abs(hash(path))}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def strides(**rows):
    """Arguments ``name_row_stride``."""
    return {f"{name}_row_stride": stride for name, stride in rows.items()}


def run(call, path, target, folder):
    fn = jit_function(path, call.kernel, folder)
    arguments = {name: value for name, value in call.arguments.items() if name in fn.arg_names}
    emulate(fn, target, call.grid, arguments, call.constants)
    for got, want, tolerance in call.expected:
        torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def vector_add():
    x, y, o = torch.randn(3000), torch.randn(3000), nans(3000)
    arguments = {"x_ptr": x, "y_ptr": y, "output_ptr": o, "n_elements": 3000}
    return Call("add_kernel", (3,), arguments, {"BLOCK_SIZE": 1024}, [(o, x + y, 0)])


def softmax():
    x, o = torch.randn(4, 781), nans(4, 781)
    arguments = {"output_ptr": o, "input_ptr": x, "n_cols": 781}
    arguments |= {"input_row_stride": 781, "output_row_stride": 781}
    return Call("softmax_kernel", (4,), arguments, {"BLOCK_SIZE": 1024}, [(o, x.double().softmax(-1), 2e-6)])


def matmul(dtype=torch.float16):
    m, n, k = 128, 128, 96
    a, b, c = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), nans(m, n, dtype=torch.float16)
    arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "M": m, "N": n, "K": k, "stride_am": k, "stride_ak": 1}
    arguments |= {"stride_bk": n, "stride_bn": 1, "stride_cm": n, "stride_cn": 1}
    constants = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 2}
    constants["ACTIVATION"] = None
    return Call("matmul_kernel", (4,), arguments, constants, [(c, a.double() @ b.double(), 2e-3)])


def matmul_bf16():
    return matmul(torch.bfloat16)


def layer_norm():
    x, w, b = torch.randn(4, 1000), torch.randn(1000), torch.randn(1000)
    y = nans(4, 1000)
    arguments = {"X": x, "Y": y, "W": w, "B": b, "Mean": nans(4), "Rstd": nans(4), "stride": 1000, "N": 1000}
    want = functional.layer_norm(x.double(), (1000,), w.double(), b.double(), 1e-5)
    constants = {"BLOCK_SIZE": 512}
    return Call("_layer_norm_fwd_fused", (4,), arguments | {"eps": 1e-5}, constants, [(y, want, 1e-5)])


def layer_norm_backward_with_locks():
    x, w, dy = torch.randn(6, 256), torch.randn(256), torch.randn(6, 256)
    mean, rstd = x.mean(1), 1 / torch.sqrt(x.var(1, unbiased=False) + 1e-5)
    dx, dw, db = nans(6, 256), torch.zeros(2, 256), torch.zeros(2, 256)
    arguments = {
        "DX": dx, "DY": dy, "DW": dw, "DB": db, "X": x, "W": w, "B": w, "M": mean, "V": rstd, "Mean": mean,
        "Rstd": rstd, "Lock": torch.zeros(4, dtype=torch.int32), "stride": 256, "N": 256, "eps": 1e-5,
    }  # fmt: skip
    leaf = x.double().requires_grad_()
    functional.layer_norm(leaf, (256,), w.double(), None, 1e-5).backward(dy.double())
    constants = {"GROUP_SIZE_M": 2, "BLOCK_SIZE_N": 256}
    # The kernel leaves the sums over groups of rows to another one.
    run_after = [(dx, leaf.grad, 1e-4), (LazySum(db), dy.sum(0), 1e-5)]
    return Call("_layer_norm_bwd_dx_fused", (6,), arguments, constants, run_after)


class LazySum(NamedTuple):
    """The sum over the rows of a tensor, taken after the kernel has run."""

    rows: Any

    def double(self):
        return self.rows.double().sum(0)


def fused_attention():
    n, d = 128, 64
    q, k, v = (torch.randn(1, 2, n, d).half() for _ in range(3))
    o, l, m, tmp = torch.zeros_like(q), nans(2, n), nans(2, n), nans(2, n)
    arguments = {
        "Q": q, "K": k, "V": v, "sm_scale": 0.125, "TMP": tmp, "L": l, "M": m, "Out": o, "Z": 1, "H": 2,
        "N_CTX": n,
    }  # fmt: skip
    for x, (row, column) in {"q": "mk", "k": "nk", "v": "kn", "o": "mn"}.items():
        names = (f"stride_{x}z", f"stride_{x}h", f"stride_{x}{row}", f"stride_{x}{column}")
        arguments |= dict(zip(names, (2 * n * d, n * d, d, 1), strict=True))
    masked = ~torch.ones(n, n).tril().bool()
    scores = (q.double() @ k.double().transpose(-1, -2) * 0.125).masked_fill(masked, -float("inf"))
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    # This version of the tutorial says `p *= l_rcp`, which today's Triton broadcasts along the columns.
    want = (p / p.sum(-1)[..., None, :]) @ v.double()
    expected = [(m, scores.amax(-1)[0], 1e-5), (l, p.sum(-1)[0], 1e-5), (o, want, 4e-3)]
    constants = {"BLOCK_M": 128, "BLOCK_DMODEL": d, "BLOCK_N": 128}
    return Call("_fwd_kernel", (1, 2), arguments, constants, expected)


def swiglu():
    a, b, c = torch.randn(3, 500), torch.randn(3, 500), nans(3, 500)
    arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "stride": 500, "gate_multiplier": 1.0}
    constants = {"n_cols": 500, "BLOCK_SIZE": 512}
    want = functional.silu(a.double()) * b
    return Call("_swiglu_forward_kernel", (3,), arguments, constants, [(c, want, 2e-6)])


def rms_norm():
    x, w, y = torch.randn(3, 500), torch.randn(500), nans(3, 500)
    arguments = {"Y_ptr": y, "X_ptr": x, "W_ptr": w, "RSTD_ptr": nans(3), "n_cols": 500, "eps": 1e-6}
    arguments |= {"offset": 0.0, **strides(Y=500, X=500, W=1, RSTD=1)}
    constants = {"casting_mode": 0, "elementwise_affine": True, "BLOCK_SIZE": 512}
    want = x * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * w
    return Call("_rms_norm_forward_kernel", (3,), arguments, constants, [(y, want, 2e-6)])


def geglu():
    a, b, c = torch.randn(3, 500), torch.randn(3, 500), nans(3, 500)
    arguments, constants = {"a": a, "b": b, "c": c, "stride": 500}, {"n_cols": 500, "BLOCK_SIZE": 512}
    want = functional.gelu(a.double(), approximate="tanh") * b
    return Call("_geglu_tanh_forward_kernel", (3,), arguments, constants, [(c, want, 1e-5)])


def liger_layer_norm():
    x, w, b, y = torch.randn(3, 500), torch.randn(500), torch.randn(500), nans(3, 500)
    arguments = {"Y_ptr": y, "X_ptr": x, "W_ptr": w, "B_ptr": b, "Mean_ptr": nans(3), "RSTD_ptr": nans(3)}
    arguments |= {"n_cols": 500, "eps": 1e-5, **strides(Y=500, X=500, W=1, B=1, Mean=1, RSTD=1)}
    want = functional.layer_norm(x.double(), (500,), w.double(), b.double(), 1e-5)
    return Call("_layer_norm_forward_kernel", (3,), arguments, {"BLOCK_SIZE": 512}, [(y, want, 1e-5)])


def liger_softmax():
    x, y = torch.randn(3, 1000), nans(3, 1000)
    arguments = {"Y_ptr": y, "X_ptr": x, "n_cols": 1000, **strides(Y=1000, X=1000)}
    expected = [(y, x.double().softmax(-1), 2e-6)]
    return Call("_softmax_single_block_forward_kernel", (3,), arguments, {"BLOCK_SIZE": 1024}, expected)


def kl_divergence(log_target=False):
    y, gt, loss = torch.randn(3, 500).log_softmax(-1), torch.randn(3, 500).softmax(-1), nans(3, 500)
    gt = gt.log() if log_target else gt
    arguments = {"y_ptr": y, "y_stride": 500, "gt_ptr": gt, "gt_stride": 500, "loss_ptr": loss}
    arguments |= {"loss_stride": 500, "n_cols": 500, "eps": 1e-10}
    want = functional.kl_div(y.double(), gt.double(), reduction="none", log_target=log_target)
    constants = {"BLOCK_SIZE": 256, "log_target": log_target, "reduction": 0}
    return Call("_kldiv_kernel_forward", (3,), arguments, constants, [(loss, want, 2e-6)])


def kl_divergence_of_logs():
    return kl_divergence(log_target=True)


def sparsemax():
    x, o = torch.randn(3, 200), nans(3, 200)
    ordered = x.sort(-1, descending=True)[0]
    arguments = {"x_ptr": x, "x_stride_row": 200, "sorted_x_ptr": ordered, "sorted_x_stride_row": 200}
    arguments |= {"o_ptr": o, "o_stride_row": 200, "n_cols": 200}
    total, count = ordered.cumsum(-1), torch.arange(1, 201)
    kept = (1 + count * ordered > total).sum(-1, keepdim=True)
    want = (x - (total.gather(-1, kept - 1) - 1) / kept).clamp(min=0)
    constants = {"BLOCK_SIZE": 256, "num_warps": 4}
    return Call("_sparsemax_forward_kernel", (3,), arguments, constants, [(o, want, 1e-5)])


def relu_squared():
    x, y = torch.randn(3, 300), nans(3, 300)
    arguments = {"Y_ptr": y, "Y_stride": 300, "X_ptr": x, "X_stride": 300, "n_cols": 300}
    expected = [(y, x.clamp(min=0).square(), 2e-6)]
    return Call("_relu_squared_forward_kernel", (3,), arguments, {"BLOCK_SIZE": 512}, expected)


TUTORIALS = {
    "01-vector-add": (vector_add,), "02-fused-softmax": (softmax,),
    "03-matrix-multiplication": (matmul, matmul_bf16),
    "05-layer-norm": (layer_norm, layer_norm_backward_with_locks), "06-fused-attention": (fused_attention,),
}  # fmt: skip
LIGER = {
    "swiglu": (swiglu,), "rms_norm": (rms_norm,), "geglu": (geglu,), "layer_norm": (liger_layer_norm,),
    "softmax": (liger_softmax,), "kl_div": (kl_divergence, kl_divergence_of_logs), "sparsemax": (sparsemax,),
    "relu_squared": (relu_squared,),
}  # fmt: skip
PUBLIC = [
    pytest.param(f"{folder}/{file}.py", make, id=make.__name__)
    for folder, files in (
        ("triton/python/tutorials", TUTORIALS), ("Liger-Kernel/src/liger_kernel/ops", LIGER)
    )
    for file, makers in files.items()
    for make in makers
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("path", "make"), PUBLIC)
def test_a_public_kernel_is_right(path, make, target, tmp_path):
    torch.manual_seed(0)
    run(make(), path, target, tmp_path)


@pytest.mark.parametrize("target", TARGETS)
def test_seeded_dropout_keeps_half(target, tmp_path):
    torch.manual_seed(0)
    x, o = torch.rand(1000) + 1, nans(1000)
    arguments = {"x_ptr": x, "output_ptr": o, "n_elements": 1000, "p": 0.5, "seed": 123}
    call = Call("_seeded_dropout", (1,), arguments, {"BLOCK_SIZE": 1024}, [])
    run(call, "triton/python/tutorials/04-low-memory-dropout.py", target, tmp_path)
    kept = o != 0
    assert torch.equal(o[kept], x[kept] * 2)
    assert 430 < kept.sum() < 570
