"""The folder that `tools/kernels_hub.py` writes: its layout, and its results beside an installed narrowkv."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tool_modules import load_module, load_tool

import narrowkv.attn_decode
import narrowkv.attn_prefill
import narrowkv.paged_cache
import narrowkv.sparse_fp8

ALLOWED = {"torch", "triton", *sys.stdlib_module_names}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    tool = load_tool("kernels_hub")
    return list(tool.write(tmp_path_factory.mktemp("hub")))


@pytest.fixture(scope="module")
def rocm(builds: list[Path]) -> ModuleType:
    build = next(build for build in builds if build.name == "torch-rocm")
    return load_module(build / "__init__.py", "a_name_that_no_source_knows")


def test_a_build_imports_nothing_but_itself_torch_and_triton(builds: list[Path]) -> None:
    assert [build.name for build in builds] == ["torch-cuda", "torch-rocm"]
    for file in builds[1].rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module or "")
            assert {name.partition(".")[0] for name in names} <= ALLOWED, (file, names)


def test_metadata_name_the_build_and_digest_its_files(builds: list[Path]) -> None:
    namespaces = set()
    for build in builds:
        metadata = json.loads((build / "metadata.json").read_text())
        files = {str(file.relative_to(build)) for file in build.rglob("*.py")}
        assert set(metadata["digest"]["files"]) == files
        for name, digest in metadata["digest"]["files"].items():
            found = hashlib.sha256((build / name).read_bytes()).digest()
            assert base64.b64encode(found).decode() == digest
        assert metadata["backend"]["type"] == build.name.removeprefix("torch-")
        assert metadata["id"].isidentifier()
        operators = (build / "attn_decode" / "torch_ops.py").read_text()
        registrar = (build / "runtime" / "launch" / "tracing.py").read_text()
        assert f"torch.ops.{metadata['id']}.paged_decode" in operators
        assert "ops.narrowkv" not in operators
        assert registrar.count(f'"{metadata["id"]}::') == 2
        namespaces.add(metadata["id"])
    assert len(namespaces) == len(builds)


def test_every_public_name_of_the_operations_is_there(rocm: ModuleType) -> None:
    for package in (
        narrowkv.paged_cache, narrowkv.attn_decode, narrowkv.attn_prefill, narrowkv.sparse_fp8,
    ):  # fmt: skip
        assert set(package.__all__) <= set(rocm.__all__)
        assert all(getattr(rocm, name) is not getattr(package, name) for name in package.__all__)


def test_cpu_tensors_are_refused(rocm: ModuleType) -> None:
    k, v = torch.zeros(2, 2, 16, 2, 128).to(torch.float8_e4m3fn)
    cache, table = _cache_of(rocm, k, v)
    with pytest.raises(Exception, match="this build of narrowkv computes on GPUs only") as refused:
        rocm.paged_decode(torch.zeros(1, 8, 128).bfloat16(), cache, table)
    assert type(refused.value).__name__ == "UnsupportedError"


def _cache_of(module: ModuleType, k: torch.Tensor, v: torch.Tensor) -> tuple[object, object]:
    """A cache over K and V, and a table of one sequence of 20 tokens, by a module's classes."""
    cache = module.PagedKVCache.from_tensors(k, v, format="fp8_e4m3fn", k_descale=1.0, v_descale=1.0)
    ids = torch.tensor([[1, 0]], dtype=torch.int32, device=k.device)
    lengths = torch.tensor([20], dtype=torch.int32, device=k.device)
    return cache, module.PageTable.from_block_table(ids, lengths, page_size=16)


@pytest.mark.gpu
def test_results_are_those_of_narrowkv_bit_by_bit(rocm: ModuleType) -> None:
    """Append, decode, prefill and sparse attention; both write to a cache of their own."""
    torch.manual_seed(0)
    new = torch.randn(2, 20, 2, 128, device="cuda").bfloat16()
    q = torch.randn(20, 8, 128, device="cuda").bfloat16()
    rows = torch.randn(64, 512, device="cuda")
    starts = torch.tensor([0, 20], dtype=torch.int32, device="cuda")

    def results(module: ModuleType) -> list[torch.Tensor]:
        k, v = torch.zeros(2, 2, 16, 2, 128, device="cuda").to(torch.float8_e4m3fn)
        cache, table = _cache_of(module, k, v)
        slots = torch.arange(16, 36, dtype=torch.int64, device="cuda") % 32
        module.append(cache, new[0], new[1], slots)
        decoded = module.paged_decode(q[:1], cache, table, sm_scale=0.1)
        prefilled = module.batch_prefill(q, cache, table, starts, sm_scale=0.1)
        pool = module.DSV4Rows.quantize(rows, layout="packed584")
        indptr = torch.tensor([0, 30], dtype=torch.int32, device="cuda")
        source = module.KVSource(pool, indptr, torch.arange(30, dtype=torch.int32, device="cuda"))
        sparse = module.sparse_prefill_fp8(rows[:16].bfloat16().view(1, 16, 512), source)
        return [cache.k.view(torch.uint8), cache.v.view(torch.uint8), decoded, prefilled, sparse]

    ours = results(_narrowkv())
    for own, hub in zip(ours, results(rocm), strict=True):
        assert own.float().abs().sum() > 0
        assert torch.equal(own, hub)


def _narrowkv() -> ModuleType:
    """All public names of the operations' packages in one module."""
    module = ModuleType("narrowkv_operations")
    for package in (
        narrowkv.paged_cache, narrowkv.attn_decode, narrowkv.attn_prefill, narrowkv.sparse_fp8,
    ):  # fmt: skip
        vars(module).update({name: getattr(package, name) for name in package.__all__})
    return module
