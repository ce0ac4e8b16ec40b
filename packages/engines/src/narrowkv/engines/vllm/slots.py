"""vLLM's cache of one layer as narrowkv's: where keys, values and their scales lie in a slot.

A slot holds everything of one token and head, in this order:

    16-bit, fp8             K | V
    fp8_per_token_head      K | fp32 scale | V | fp32 scale
    int8_per_token_head     K | fp32 scale | V | fp32 scale
    int4_per_token_head     K codes | fp32 scale | V codes | fp32 scale; K and V are `randomly_rotated`
    ultraquant_4bit         K codes | E8M0 per 32 | V codes | E8M0 per 32; K is rotated
    narrowkv_k8v4           K in FP8 | fp32 scale | V codes | E4M3 scale | padding to a multiple of 4 bytes
    narrowkv_fp4            K codes | E4M3 scale | V codes | E4M3 scale

The last two are narrowkv's own: `register_own_slots` makes them names of `--kv-cache-dtype`. vLLM 0.32 takes
no new names: `chosen_slots` says how they are asked for there.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from narrowkv.paged_cache import CacheFormat, PagedKVCache
from narrowkv.quant import KeyTransform, hadamard
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import check_choice
from narrowkv.runtime.launch import active_target

__all__ = [
    "CACHE_DTYPES",
    "OWN_SLOTS",
    "cache_options",
    "chosen_slots",
    "format_of",
    "layer_cache",
    "own_slots_of",
    "randomly_rotated",
    "register_own_slots",
    "rotation_block",
    "scales_of",
    "slot_bytes",
    "slot_reasons",
]

K8V4, FP4 = "narrowkv_k8v4", "narrowkv_fp4"
# The dtype in which vLLM views slots of narrowkv's own, bytes in any case: all that vLLM's specification of a
# cache says of their name.
_VIEWED_AS = {K8V4: torch.uint8, FP4: torch.int8}
OWN_SLOTS = tuple(_VIEWED_AS)
PER_TOKEN_HEAD, ULTRAQUANT = "fp8_per_token_head", "ultraquant_4bit"
INT8, INT4 = "int8_per_token_head", "int4_per_token_head"
_GROUP = 32
_SCALE_BYTES = 4
# vLLM's names of cache dtypes that are served. "auto" and 16-bit names are the model's dtype.
CACHE_DTYPES = (
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", PER_TOKEN_HEAD, INT8, INT4, ULTRAQUANT
)  # fmt: skip

# Those of latent rows (MLA).
LATENT_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")


class _OwnCacheDtype:
    """What vLLM asks about a cache dtype that a plugin registers."""

    def __init__(self, name: str) -> None:
        self.name = name

    def torch_dtype(self) -> torch.dtype:
        """The dtype in which vLLM views the cache."""
        return _VIEWED_AS[self.name]

    def quant_mode(self) -> Any:
        """A mode of which vLLM knows only that its kernels do not serve it."""
        from vllm.v1.kv_cache_interface import KVQuantMode

        return KVQuantMode.CUSTOM


def register_own_slots() -> bool:
    """Makes `OWN_SLOTS` names of vLLM's `--kv-cache-dtype`; False if the installed vLLM takes none (0.32)."""
    try:
        from vllm.config.cache import is_known_kv_cache_dtype, register_kv_cache_dtype
    except ImportError:
        return False
    for name in OWN_SLOTS:
        if not is_known_kv_cache_dtype(name):
            register_kv_cache_dtype(name)(functools.partial(_OwnCacheDtype, name))
    return True


def cache_options(cache_dtype: str) -> dict[str, Any]:
    """The options of vLLM's `LLM` that ask for a cache, in any version.

    Args:
        cache_dtype: one of `CACHE_DTYPES` or `OWN_SLOTS`.
    """
    if cache_dtype in OWN_SLOTS and not register_own_slots():
        return {"kv_cache_dtype": "fp8", "additional_config": {"kv_cache": cache_dtype}}
    return {"kv_cache_dtype": cache_dtype}


def own_slots_of(viewed_as: torch.dtype) -> str:
    """Which of `OWN_SLOTS` a cache has that vLLM views in this dtype.

    Example:
        >>> own_slots_of(torch.uint8)
        'narrowkv_k8v4'
    """
    return next(name for name, dtype in _VIEWED_AS.items() if dtype == viewed_as)


def chosen_slots(cache_dtype: str, additional_config: Any, *, has_names: bool = False) -> str:
    """What slots hold: vLLM's cache dtype, or one of `OWN_SLOTS` that is asked for beside "fp8".

    Args:
        cache_dtype: vLLM's `kv_cache_dtype`.
        additional_config: vLLM's option of that name; its entry "kv_cache" names one of `OWN_SLOTS`.
        has_names: whether `OWN_SLOTS` are cache dtypes of the installed vLLM.

    Raises:
        ValueError: for another name, or beside another cache dtype, whose bytes vLLM would allocate; for any
            name if `has_names`.

    Example:
        >>> chosen_slots("fp8", {"kv_cache": "narrowkv_k8v4"}), chosen_slots("fp8", {})
        ('narrowkv_k8v4', 'fp8')
    """
    own = additional_config.get("kv_cache") if isinstance(additional_config, dict) else None
    if own is None:
        return cache_dtype
    check_choice('additional_config["kv_cache"]', own, OWN_SLOTS)
    if has_names:
        raise ValueError(f'kv_cache_dtype must be {own} in this vLLM, without additional_config["kv_cache"]')
    if cache_dtype not in ("fp8", "fp8_e4m3"):
        raise ValueError(f"kv_cache_dtype must be fp8 with {own}, got {cache_dtype!r}")
    return str(own)


def slot_bytes(cache_dtype: str, head_dim: int) -> int | None:
    """Bytes of a slot that vLLM must be told; None where it knows them.

    Example:
        >>> slot_bytes("fp8_per_token_head", 128), slot_bytes("ultraquant_4bit", 128), slot_bytes("fp8", 128)
        (264, 136, None)
        >>> slot_bytes("int8_per_token_head", 128), slot_bytes("int4_per_token_head", 128)
        (264, 136)
        >>> slot_bytes("narrowkv_k8v4", 128), slot_bytes("narrowkv_fp4", 128)
        (200, 130)
    """
    if cache_dtype in (PER_TOKEN_HEAD, INT8):
        return 2 * (head_dim + _SCALE_BYTES)
    if cache_dtype == INT4:
        return 2 * (head_dim // 2 + _SCALE_BYTES)
    if cache_dtype == ULTRAQUANT:
        return 2 * (head_dim // 2 + head_dim // _GROUP)
    if cache_dtype == K8V4:
        used = head_dim + _SCALE_BYTES + head_dim // 2 + 1
        return -(-used // _SCALE_BYTES) * _SCALE_BYTES
    if cache_dtype == FP4:
        return 2 * (head_dim // 2 + 1)
    return None


def slot_reasons(cache_dtype: str, head_dim: int) -> list[str]:
    """Why slots cannot hold heads of a size that the kernels have; empty if they can.

    Example:
        >>> slot_reasons("fp8", 96), slot_reasons("ultraquant_4bit", 128)
        ([], [])
    """
    if cache_dtype == ULTRAQUANT and head_dim & (head_dim - 1):
        return [f"{ULTRAQUANT} rotates heads of 64, 128 or 256 channels, and they have {head_dim}"]
    return []


def scales_of(cache_dtype: str) -> dict[str, Any]:
    """`scale_group` and `scale_format` of FP4 in slots, as `plan_decode` takes them.

    Example:
        >>> scales_of("ultraquant_4bit"), scales_of("narrowkv_k8v4"), scales_of("fp8")
        ({'scale_group': 32}, {'scale_format': 'e4m3'}, {})
    """
    if cache_dtype == ULTRAQUANT:
        return {"scale_group": _GROUP}
    return {"scale_format": "e4m3"} if cache_dtype in OWN_SLOTS else {}


def format_of(cache_dtype: str, model_dtype: torch.dtype, device: torch.device) -> CacheFormat:
    """The formats of K and V in slots; plain "fp8" is the E4M3 format of the device.

    Raises:
        ValueError: for a cache dtype that is not served.
    """
    if cache_dtype not in (*CACHE_DTYPES, *OWN_SLOTS):
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(CACHE_DTYPES)}, got {cache_dtype!r}")
    fp8 = active_target(device).native_fp8 or "fp8_e4m3fn"
    if cache_dtype in (ULTRAQUANT, FP4):
        return CacheFormat.parse("fp4_e2m1")
    if cache_dtype == K8V4:
        return CacheFormat(fp8, "fp4_e2m1")
    if cache_dtype in (INT8, INT4):
        return CacheFormat.parse("int8" if cache_dtype == INT8 else "int4")
    if cache_dtype.startswith("fp8"):
        return CacheFormat.parse("fp8_e5m2" if cache_dtype == "fp8_e5m2" else fp8)
    names = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    return CacheFormat.parse(get_format(names.get(cache_dtype, model_dtype)).name)


def rotation_block(head_dim: int) -> int:
    """Channels that vLLM rotates together in INT4 slots: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


@functools.lru_cache(maxsize=8)
def _random_rotation(block: int, device: torch.device) -> torch.Tensor:
    # The signs are part of the format: vLLM draws them with this seed (v1/attention/ops/int4_per_token_head).
    random = torch.Generator().manual_seed(0x9E3779B9)
    signs = 2.0 * torch.bernoulli(torch.full((block,), 0.5), generator=random) - 1.0
    return (signs[:, None] * hadamard(torch.eye(block)).sign()).to(device)


def randomly_rotated(x: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Keys, values or queries as INT4 slots have them: signs flipped, then a Hadamard matrix of +-1.

    Lengths grow by the square root of `rotation_block(head_dim)`, products of two rotated vectors by that
    block itself. The inverse undoes both.

    Args:
        x: `[tokens, heads, head_dim]`.

    Returns:
        The dtype and shape of `x`.

    Example:
        >>> x = torch.arange(64.0).view(1, 1, 64)
        >>> torch.allclose(randomly_rotated(randomly_rotated(x), inverse=True), x, atol=1e-4)
        True
    """
    block = rotation_block(x.shape[-1])
    matrix = _random_rotation(block, x.device)
    rows = x.float().reshape(*x.shape[:-1], -1, block) @ (matrix.T / block if inverse else matrix)
    return rows.reshape(x.shape).to(x.dtype)


def layer_cache(
    kv_cache: torch.Tensor, cache_dtype: str, head_dim: int, k_scale: torch.Tensor, v_scale: torch.Tensor
) -> PagedKVCache:
    """A layer's cache as views of vLLM's memory; nothing is copied.

    Args:
        kv_cache: `[blocks, num_kv_heads, block_size, slot]`, any strides but the last.
        cache_dtype: one of `CACHE_DTYPES` or `OWN_SLOTS`.
        head_dim: channels.
        k_scale, v_scale: fp32 `[]`, `[1]` or `[num_kv_heads]`: the layer's, used for "fp8".

    Raises:
        TypeError, ValueError: for a cache that does not hold such slots.
    """
    slots = kv_cache.transpose(1, 2)
    given: dict[str, Any] = {}
    if cache_dtype in (PER_TOKEN_HEAD, INT8, INT4):
        numbers = head_dim // 2 if cache_dtype == INT4 else head_dim
        halves = torch.split(slots.view(torch.uint8), numbers + _SCALE_BYTES, -1)
        number = torch.int8 if cache_dtype == INT8 else torch.uint8
        k, v = (half[..., :numbers].view(number) for half in halves)
        scales = [half[..., numbers:].view(torch.float32)[..., 0] for half in halves]
        given = {"k_granularity": "token_head", "v_granularity": "token_head"}
    elif cache_dtype == ULTRAQUANT:
        codes, groups = head_dim // 2, head_dim // _GROUP
        k, k_groups, v, v_groups = torch.split(slots.view(torch.uint8), [codes, groups, codes, groups], -1)
        scales = [k_groups, v_groups]
    elif cache_dtype in OWN_SLOTS:
        k_bytes, scale_bytes = (head_dim, _SCALE_BYTES) if cache_dtype == K8V4 else (head_dim // 2, 1)
        sizes = [k_bytes, scale_bytes, head_dim // 2, 1]
        parts = torch.split(slots.view(torch.uint8)[..., : sum(sizes)], sizes, -1)
        k, v = parts[0], parts[2]
        scales = [
            part.view(torch.float32 if part.shape[-1] > 1 else torch.float8_e4m3fn)[..., 0]
            for part in (parts[1], parts[3])
        ]
        given = {"k_granularity": "token_head", "v_granularity": "token_head"}
    else:
        k, v = torch.split(slots, head_dim, -1)
        scales = [k_scale, v_scale]
    form = format_of(cache_dtype, kv_cache.dtype, kv_cache.device)
    if get_format(form.k).kind == "float":
        return PagedKVCache.from_tensors(k, v, format=form)
    cache = PagedKVCache.from_tensors(k, v, format=form, k_descale=scales[0], v_descale=scales[1], **given)
    return replace(cache, key_transform=KeyTransform()) if cache_dtype == ULTRAQUANT else cache
