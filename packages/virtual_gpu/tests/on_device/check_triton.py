"""Triton's own driver on the virtual GPU: run by test_on_device.py in a process with one."""

import pytest
import torch
import triton
import triton.language as tl

import narrowkv.virtual_gpu as virtual_gpu


@triton.jit
def add_kernel(x_ptr, y_ptr, o_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + at, tl.load(x_ptr + at, mask=at < n) + tl.load(y_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def scalars_kernel(o_ptr, a, b, c, d):
    tl.store(o_ptr, a)
    tl.store(o_ptr + 1, b)
    tl.store(o_ptr + 2, c.to(tl.float64))
    tl.store(o_ptr + 3, d.to(tl.float64))


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            a_ptr + m[:, None] * stride_a + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0
        )
        b = tl.load(
            b_ptr + k[:, None] * stride_b + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0
        )
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * stride_c + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def vectors(n=1000):
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    return x, y, torch.empty_like(x)


def matmul(a, b, **options):
    c = torch.empty(a.shape[0], b.shape[1], device="cuda")
    sizes = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32} | options
    grid = (triton.cdiv(c.shape[0], sizes["BLOCK_M"]), triton.cdiv(c.shape[1], sizes["BLOCK_N"]))
    compiled = matmul_kernel[grid](
        a, b, c, a.shape[0], b.shape[1], a.shape[1], a.stride(0), b.stride(0), c.stride(0), **sizes
    )
    return c, compiled


def test_the_driver_is_tritons_own_and_sees_the_chip():
    driver, chip = triton.runtime.driver.active, virtual_gpu.current().chip
    target = driver.get_current_target()
    assert type(driver).__name__ == "HIPDriver"
    assert (target.backend, target.arch) == ("hip", chip.arch)
    properties = driver.utils.get_device_properties(0)
    assert properties["multiprocessor_count"] == chip.compute_units
    assert properties["max_shared_mem"] == chip.lds_bytes
    assert torch.cuda.get_device_properties(0).multi_processor_count == chip.compute_units


def test_vector_add_gives_torchs_sum():
    x, y, o = vectors()
    compiled = add_kernel[(4,)](x, y, o, 1000, BLOCK=256)
    assert torch.equal(o, x + y)
    assert compiled.n_regs > 0
    assert compiled.n_spills == 0
    assert compiled.n_max_threads == 256
    last = virtual_gpu.current().launches[-1]
    assert (last.kernel, last.grid, last.threads) == ("add_kernel", (4, 1, 1), 256)
    assert last.wave_instructions > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dot_uses_matrix_instructions_and_is_right(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(100, 96, device="cuda", dtype=dtype), torch.randn(96, 72, device="cuda", dtype=dtype)
    c, compiled = matmul(a, b)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=0, atol=96 * 2**-20)
    assert "v_mfma_f32" in compiled.asm["amdgcn"]


def test_arguments_of_every_width_arrive():
    out = torch.empty(4, device="cuda", dtype=torch.float64)
    scalars_kernel[(1,)](out, -5, 1 << 40, 0.5, -2.25)
    assert out.tolist() == [-5, 1 << 40, 0.5, -2.25]


def test_launch_hooks_see_every_launch():
    seen = []
    x, y, o = vectors()
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    hooks = [(enter, lambda data: seen.append("in")), (leave, lambda data: seen.append("out"))]
    for chain, hook in hooks:
        chain.add(hook)
    try:
        add_kernel[(4,)](x, y, o, 1000, BLOCK=256)
    finally:
        for chain, hook in hooks:
            chain.remove(hook)
    assert seen == ["in", "out"]


def test_a_graph_repeats_launches():
    x, y, o = vectors()
    add_kernel[(4,)](x, y, o, 1000, BLOCK=256)
    o.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_kernel[(4,)](x, y, o, 1000, BLOCK=256)
        doubled = o * 2
    assert not o.any()
    x.fill_(1)
    y.fill_(2)
    graph.replay()
    assert (doubled == 6).all()


def test_a_graph_keeps_the_memory_that_its_capture_allocated():
    x, y, o = vectors()

    def twice():
        once = torch.empty_like(x)
        add_kernel[(4,)](x, y, once, 1000, BLOCK=256)
        add_kernel[(4,)](once, y, o, 1000, BLOCK=256)

    twice()
    expected = o.clone()
    o.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twice()
    others = [torch.zeros_like(x) for _ in range(8)]
    graph.replay()
    assert torch.equal(o, expected)
    assert not any(other.any() for other in others)


def test_an_access_out_of_bounds_names_the_line_and_the_place():
    x, y, o = vectors()
    with pytest.raises(
        RuntimeError, match=r"OutOfRangeError: load .*kernel add_kernel; line \d+: .*workgroup \("
    ):
        add_kernel[(4,)](x[:900].clone(), y, o, 1000, BLOCK=256)


@triton.jit
def count_kernel(x_ptr):
    tl.atomic_add(x_ptr, 1.0)


def test_a_16_bit_atomic_reads_the_dword_around_its_number():
    x = torch.zeros(1, device="cuda", dtype=torch.bfloat16)
    count_kernel[(3,)](x)
    assert x.tolist() == [3]


def test_a_cpu_tensor_is_refused():
    x, y, o = vectors()
    with pytest.raises(ValueError, match="cpu tensor"):
        add_kernel[(4,)](x.cpu(), y, o, 1000, BLOCK=256)


def test_a_grid_beyond_a_dispatch_is_refused():
    x, y, o = vectors()
    with pytest.raises(
        RuntimeError, match=r"invalid configuration argument: the grid has 1073741824 x 256 threads"
    ):
        add_kernel[(1 << 30,)](x, y, o, 1000, BLOCK=256)


def test_too_much_shared_memory_is_refused():
    a, b = (torch.ones(64, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    with pytest.raises(triton.runtime.errors.OutOfResources, match="shared memory"):
        matmul(a, b, BLOCK_M=256, BLOCK_N=256, BLOCK_K=256, num_warps=8, num_stages=2)


def test_a_code_object_of_another_kernel_is_refused(tmp_path):
    from narrowkv.virtual_gpu import assembly

    x, y, o = vectors()
    compiled = add_kernel[(4,)](x, y, o, 1000, BLOCK=256)
    _, other = matmul(*(torch.ones(32, 32, device="cuda", dtype=torch.float16) for _ in range(2)))
    arch = virtual_gpu.current().chip.arch
    assert assembly.assembly_of(compiled.asm["hsaco"], arch) == compiled.asm["amdgcn"]
    files = {"hsaco": tmp_path / "k.hsaco", "amdgcn": tmp_path / "k.amdgcn"}
    files["hsaco"].write_bytes(compiled.asm["hsaco"])
    files["amdgcn"].write_text(other.asm["amdgcn"])
    assembly.remember_assembly(None, None, "k", {kind: str(file) for kind, file in files.items()}, "")
    with pytest.raises(assembly.AssemblyError, match="is not the assembly of the code object"):
        assembly.assembly_of(compiled.asm["hsaco"], arch)
    with pytest.raises(assembly.AssemblyError, match="is not known"):
        assembly.assembly_of(compiled.asm["hsaco"] + b"\0", arch)


@triton.jit(noinline=True)
def doubled(x):
    return 2 * x


@triton.jit
def calling_kernel(o_ptr, x):
    tl.store(o_ptr, doubled(x))


def test_a_kernel_that_calls_functions_is_refused():
    with pytest.raises(RuntimeError, match="calls functions"):
        calling_kernel[(1,)](torch.zeros(1, device="cuda"), 3.0)


def test_autotune_chooses_a_configuration():
    configs = [triton.Config({"BLOCK": block}) for block in (128, 512)]
    tuned = triton.autotune(configs, key=["n"])(add_kernel)
    x, y, o = vectors()
    tuned[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, o, 1000)
    assert torch.equal(o, x + y)
    assert tuned.best_config in configs


def test_gradients_through_a_kernel():
    class Add(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            o = torch.empty_like(x)
            add_kernel[(4,)](x, y, o, x.numel(), BLOCK=256)
            return o

        @staticmethod
        def backward(ctx, grad):
            twice = torch.empty_like(grad)
            add_kernel[(4,)](grad.contiguous(), grad.contiguous(), twice, grad.numel(), BLOCK=256)
            return twice, grad

    x, y, _ = vectors()
    x.requires_grad_()
    y.requires_grad_()
    Add.apply(x, y).sum().backward()
    assert (x.grad == 2).all()
    assert (y.grad == 1).all()
