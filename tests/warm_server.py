"""A serving process as Triton sees it on an MI300X, without one: `python tests/warm_server.py`.

Every launch goes through Triton's own JIT: `kernel[grid](...)` makes the cache key, and compiles or loads, as
on a GPU. Only what needs the GPU is replaced: the driver's answers, loading a binary, launching it.
It prints the kernels that were compiled, those that were loaded, and those that calls loaded, as JSON: with
the argument "preload" kernels are loaded before the calls.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_prefill import batch_prefill, prefill_append
from narrowkv.attn_prefill.warmup import model_kernels
from narrowkv.paged_cache import PagedKVCache, PageTable, append
from narrowkv.runtime.launch import LaunchOptions, count_compiles, executing, load_kernels
from narrowkv.runtime.launch.gpu import gpu_launch
from narrowkv.runtime.targets import device_target

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 1, 64, 16, 64
MOST_Q_LEN = 3
ONE = {"k_descale": 1.0, "v_descale": 1.0}
WARM = (
    f"--heads {HEADS}/{KV_HEADS} --head-dim {DIM} --page-size {PAGE} --num-pages {PAGES} --max-batch 2 "
    f"--max-seq-len 64 --max-q-len {MOST_Q_LEN}"
)


MODEL: dict[str, Any] = {
    "num_qo_heads": HEADS, "max_batch": 2, "max_seq_len": 64, "max_num_tokens": 8, "max_q_len": MOST_Q_LEN
}  # fmt: skip


class _Utils:
    """What loads and launches binaries."""

    def get_device_properties(self, device: int) -> dict[str, Any]:
        return {"max_shared_mem": 65536, "arch": "gfx942:sramecc+:xnack-", "warpSize": 64}

    loaded = 0

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        assert kernel[:4] == b"\x7fELF"
        _Utils.loaded += 1
        return 1, 2, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        pass


class _Launcher:
    """A launch that does nothing."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        pass


class _Mi300x:
    """Answers as `triton.backends.amd.driver.HIPDriver` does on that GPU."""

    utils, launcher_cls = _Utils(), _Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        found = self.utils.get_device_properties(self.get_current_device())
        return GPUTarget("hip", found["arch"].split(":")[0], found["warpSize"])

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class _OnTheGpu:
    """Launches by narrowkv's path for GPUs; the tensors are on the CPU, which Triton does not ask."""

    target = device_target("cpu")

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constexprs: dict[str, Any],
        options: LaunchOptions,
    ) -> None:
        gpu_launch(kernel, constexprs, options).launch(grid, args, torch.device("cuda", 0))


def serve(cache: PagedKVCache, with_prefill: bool) -> None:
    """A few steps of a server."""

    def tensor(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, DIM).bfloat16()

    for lens, q_len in (((64, 3), 1), ((17,), 1), ((64, 3), MOST_Q_LEN)):
        ids = torch.arange(4 * len(lens), dtype=torch.int32).view(len(lens), 4)
        table = PageTable.from_block_table(ids, torch.tensor(lens, dtype=torch.int32), page_size=PAGE)
        paged_decode(tensor(len(lens) * q_len, HEADS), cache, table)
        slots = torch.arange(len(lens), dtype=torch.int64)
        append(cache, tensor(len(lens), KV_HEADS), tensor(len(lens), KV_HEADS), slots)
        if with_prefill:
            tokens = 5 + len(lens)
            starts = torch.tensor([0, *range(6, tokens), tokens], dtype=torch.int32)
            q, k, v = tensor(tokens, HEADS), tensor(tokens, KV_HEADS), tensor(tokens, KV_HEADS)
            batch_prefill(q, cache, table, starts)
            before = PageTable.from_block_table(ids, cached_lens=torch.tensor(lens).int() - 3, page_size=PAGE)
            prefill_append(q, k, v, cache, before, starts)


def main() -> None:
    """Serves with prefill where the first argument says so."""
    torch.version.hip = "7.0"
    gpu = type("Properties", (), {"gcnArchName": "gfx942:sramecc+:xnack-", "multi_processor_count": 304})
    torch.cuda.get_device_properties = lambda index: gpu
    torch.cuda.current_device = lambda: 0
    driver.set_active(_Mi300x())
    executor = _OnTheGpu()
    executor.target = device_target(0)
    own = PagedKVCache.empty(PAGES, PAGE, KV_HEADS, DIM, format="fp8_e4m3fn")
    caches = own, PagedKVCache.from_tensors(own.k, own.v, format="fp8_e4m3fn", **ONE)
    with count_compiles() as compiles:
        if "preload" in sys.argv:
            for cache in caches:
                load_kernels(model_kernels(cache, target="gfx942", **MODEL))
        modules = _Utils.loaded
        with executing(executor):
            for cache in caches:
                serve(cache, "prefill" in sys.argv)
    print(json.dumps({
        "compiled": compiles.compiled, "loaded": compiles.loaded, "by_calls": _Utils.loaded - modules
    }))  # fmt: skip


if __name__ == "__main__":
    main()
