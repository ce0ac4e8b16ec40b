"""Tensors of device "cuda": run by test_on_device.py in a process with a virtual GPU."""

import copy
import io

import pytest
import torch

CUDA = torch.device("cuda", 0)


def test_tensors_are_cuda_tensors_and_compute_what_cpu_tensors_compute():
    x = torch.randn(4, 6)
    g = x.to("cuda")
    assert g.is_cuda
    assert g.device == CUDA
    assert g.get_device() == 0
    assert not x.is_cuda
    for f in (
        lambda t: t @ t.t(), lambda t: t.softmax(-1), lambda t: t.sort(dim=1).values, lambda t: t[t > 0],
        lambda t: t[:, ::2].contiguous(), lambda t: t.cumsum(0), lambda t: torch.cat([t, t]),
        lambda t: t.mean(), lambda t: t.view(2, 12).sum(0), lambda t: t.topk(2).indices,
        lambda t: t.to(torch.float8_e4m3fnuz).float(),
        lambda t: torch.einsum("ij,kj->ik", t, t), lambda t: torch.nn.functional.layer_norm(t, (6,)),
    ):  # fmt: skip
        got = f(g)
        assert got.device == CUDA
        assert torch.equal(got.cpu(), f(x))


def test_a_view_shares_memory_and_in_place_operations_write_through():
    base = torch.zeros(3, 4, device="cuda")
    base[1, ::2].fill_(5)
    base.view(-1)[0] = 7
    assert base.cpu().tolist() == [[7, 0, 0, 0], [5, 0, 5, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("before", [True, False])
def test_a_view_that_inference_mode_makes_is_written_through(before):
    base = torch.zeros(4, device="cuda") if before else None
    with torch.inference_mode():
        base = torch.zeros(4, device="cuda") if base is None else base
        view = base[1:3]
        assert view.is_inference() != before
        base[1:3] = 5
        view.view(2, 1).T.add_(1)
    assert base.tolist() == [0, 6, 6, 0]
    assert (base._version > 0) if before else base.is_inference()


def test_out_is_resized_on_the_device():
    out = torch.empty(0, device="cuda")
    torch.add(torch.ones(3, device="cuda"), 1, out=out)
    assert out.device == CUDA
    assert out.tolist() == [2, 2, 2]


def test_integers_are_counted_as_on_a_gpu():
    counts = torch.histc(torch.tensor([0, 2, 2, 3], device="cuda", dtype=torch.int32), bins=4, min=0, max=3)
    assert counts.tolist() == [1, 0, 2, 1]
    assert counts.dtype == torch.int32


def test_new_memory_is_not_zero():
    assert torch.empty(64, device="cuda", dtype=torch.uint8).unique().tolist() == [0xC7]


@pytest.mark.parametrize("name", ["linear", "attention", "embedding"])
def test_gradients_are_those_of_the_cpu(name):
    torch.manual_seed(0)
    if name == "attention":
        inputs = [torch.randn(1, 2, 8, 16) for _ in range(3)]
        function = torch.nn.functional.scaled_dot_product_attention
    elif name == "linear":
        inputs, function = [torch.randn(5, 4), torch.randn(3, 4)], torch.nn.functional.linear
    else:
        index = torch.tensor([0, 2, 2])
        inputs = [torch.randn(4, 3)]
        function = lambda w: torch.nn.functional.embedding(index.to(w.device), w)  # noqa: E731
    grads = []
    for device in ("cpu", "cuda"):
        leaves = [t.detach().to(device).requires_grad_() for t in inputs]
        function(*leaves).square().sum().backward()
        assert all(leaf.grad.device.type == device for leaf in leaves)
        grads.append([leaf.grad.cpu() for leaf in leaves])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_a_norm_are_summed_in_fp32_as_on_a_gpu():
    torch.manual_seed(0)
    x, grad = torch.randn(1000, 64).half().cuda(), torch.randn(1000, 64).half().cuda()
    weight, bias = (torch.rand(64).half().cuda().requires_grad_() for _ in range(2))
    torch.nn.functional.layer_norm(x, (64,), weight, bias).backward(grad)
    exact = grad.double().sum(0)
    assert bias.grad.dtype == torch.float16
    assert torch.native_layer_norm(x, (64,), weight, bias, 1e-5)[2].dtype == torch.float32
    torch.testing.assert_close(bias.grad.double(), exact, rtol=2**-10, atol=2**-10)


def test_a_module_trains():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).cuda()
    x = torch.randn(32, 4, device="cuda")
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(20):
        loss = (model(x).squeeze() - x.sum(-1)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
    assert copy.deepcopy(model)[0].weight.is_cuda


def test_another_device_is_an_error_that_names_the_variable():
    for make in (
        lambda: torch.ones(2, device="cuda:1"),
        lambda: torch.ones(2).cuda(1),
        lambda: torch.cuda.set_device(1),
    ):
        with pytest.raises(RuntimeError, match=r"cuda:1 .*has 1 device; TRITON_VIRTUAL_GPU_COUNT"):
            make()


def test_operands_on_two_devices_are_an_error():
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        x + torch.ones(3)
    assert (x + torch.tensor(1.0)).tolist() == [2, 2, 2]
    assert x[torch.tensor([0, 1])].is_cuda


def test_layouts_that_it_has_not_are_refused():
    with pytest.raises(NotImplementedError, match="virtual GPU"):
        torch.eye(2).to_sparse().cuda()


def test_memory_statistics_follow_allocations():
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    x = torch.empty(1000, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == before + 1000
    assert torch.cuda.mem_get_info() == (free - 1000, total)
    del x
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before + 1000
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == before + 1000
    assert "Allocated memory" in torch.cuda.memory_summary()


def test_the_chips_memory_is_the_limit():
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError, match="HIP out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")
    most = torch.empty(total - torch.cuda.memory_allocated(), dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="cuda")
    del most


def test_tensors_are_saved_and_loaded():
    x = torch.randn(3, 4, device="cuda")
    for where, device in ((None, "cuda"), ("cuda", "cuda"), ("cpu", "cpu")):
        file = io.BytesIO()
        torch.save({"x": x, "y": x[1:]}, file)
        file.seek(0)
        back = torch.load(file, map_location=where)
        assert back["x"].device.type == device
        assert torch.equal(back["x"].cpu(), x.cpu())
        back["x"][1:].fill_(0)
        assert not back["y"].any()  # one storage


def test_pinned_memory():
    x = torch.arange(4.0).pin_memory()
    assert x.is_pinned()
    assert not torch.arange(4.0).is_pinned()
    assert not x.is_cuda
    assert torch.equal(x.to("cuda", non_blocking=True).cpu(), x)
    assert torch.empty(2, pin_memory=True).is_pinned()


def test_streams_and_events():
    stream = torch.cuda.Stream()
    assert torch.cuda.current_stream().cuda_stream == 0
    assert stream.cuda_stream != 0
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        event = stream.record_event()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.current_stream().wait_event(event)
    torch.cuda.current_stream().wait_stream(stream)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    assert end.query()


def test_a_graph_repeats_operations_and_its_capture_changes_nothing():
    x, y = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        y.add_(x)
        z = y * 10
    assert not torch.cuda.is_current_stream_capturing()
    assert y.tolist() == [0, 0, 0]
    x.fill_(2)
    graph.replay()
    graph.replay()
    assert y.tolist() == [4, 4, 4]
    assert z.tolist() == [40, 40, 40]


def test_a_graph_holds_what_a_custom_operator_does_and_not_its_python():
    x, y = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    scope = [10]  # what holds during the capture alone

    def double(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.copy_(x * 2)
        return y + scope[0]

    with torch.library._scoped_library("check_graphs", "FRAGMENT") as library:
        library.define("double(Tensor x, Tensor(a!) y) -> Tensor")
        library.impl("double", double, "CUDA")
        decorated = torch.library.custom_op("check_graphs::decorated", double, mutates_args=("y",))
        for operation in (torch.ops.check_graphs.double, decorated):
            scope[:] = [10]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                z = operation(x.fill_(1), y.fill_(0)) * 2
            scope.clear()
            x.fill_(3)
            graph.replay()
            assert (y.tolist(), z.tolist()) == ([2, 2, 2], [24, 24, 24])


def test_torch_accelerator_says_what_torch_cuda_says_of_memory():
    before = torch.accelerator.memory_allocated()
    x = torch.zeros(1 << 20, device="cuda", dtype=torch.uint8)
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() >= before + x.numel()
    assert torch.accelerator.get_memory_info() == torch.cuda.mem_get_info()
    torch.accelerator.empty_cache()
    torch.accelerator.empty_host_cache()


def test_a_capture_refuses_to_wait_for_the_device():
    x = torch.ones(3, device="cuda")
    for wait in (lambda: x.sum().item(), lambda: x.cpu()):
        refused = pytest.raises(RuntimeError, match="not permitted when stream is capturing")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            wait()
        assert not torch.cuda.is_current_stream_capturing()


def test_seeds_repeat_random_numbers():
    torch.manual_seed(3)
    first = torch.randn(4, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), second)
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.randn(4, device="cuda"), first)


def test_what_is_absent_says_so():
    with pytest.raises(NotImplementedError, match="the virtual GPU does not have hipBLAS"):
        torch.cuda.current_blas_handle()
