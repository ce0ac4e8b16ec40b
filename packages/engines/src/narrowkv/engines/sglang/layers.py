"""What the backend keeps of SGLang's layers, and what layers may not ask for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.radix_attention import AttentionType

from narrowkv.engines.sglang.pools import has_window, layer_cache
from narrowkv.paged_cache import PagedKVCache
from narrowkv.runtime.errors import UnsupportedError

__all__ = ["NOT_SERVED", "Layer", "check_layer", "check_options", "make_layer"]

NOT_SERVED = "use another --attention-backend for this model"


class Layer(NamedTuple):
    """What is the same in every step.

    Attributes:
        layer: SGLang's `RadixAttention`.
        address: of its keys.
        cache: its pages.
        window: whether they lie in the pool of sliding windows.
        options: of `narrowkv.engines.steps.attend`.
    """

    layer: Any
    address: int
    cache: PagedKVCache
    window: bool
    options: dict[str, Any]


def make_layer(pool: Any, layer: Any, buffers: list[torch.Tensor]) -> Layer:
    """A layer of SGLang's, whose pages are views of the pool's memory.

    Args:
        pool: SGLang's `token_to_kv_pool`.
        layer: SGLang's `RadixAttention`.
        buffers: what `layer_buffers` returned for it.

    Raises:
        UnsupportedError: the layer asks for more than causal attention of a decoder.
    """
    check_layer(layer)
    window = layer.sliding_window_size
    return Layer(
        layer,
        buffers[0].data_ptr(),
        layer_cache(pool, layer, buffers),
        has_window(pool, layer.layer_id),
        {
            "sm_scale": layer.scaling,
            "logits_soft_cap": layer.logit_cap or 0.0,
            "window_left": -1 if window is None else window,
        },
    )


def check_layer(layer: Any, *, latent: bool = False) -> None:
    """Refuses layers that ask for more than causal attention of a decoder.

    Args:
        layer: SGLang's `RadixAttention`.
        latent: whether it attends to latent rows, without windows and soft caps.

    Raises:
        UnsupportedError: naming what it asks for.
    """
    wanted = []
    if layer.attn_type != AttentionType.DECODER or layer.is_cross_attention:
        wanted.append("attention that is not a decoder's own")
    if layer.xai_temperature_len > 0:
        wanted.append("xai_temperature_len")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        wanted.append(f"logit_capping_method {layer.logit_capping_method}")
    if latent and layer.sliding_window_size not in (None, -1):
        wanted.append("sliding window over latent rows")
    if latent and layer.logit_cap:
        wanted.append("soft cap over latent rows")
    _refuse(wanted)


def check_options(options: dict[str, Any]) -> None:
    """Refuses arguments that other backends take and this one does not.

    Raises:
        UnsupportedError: naming them.
    """
    _refuse([name for name, value in options.items() if value is not None])


def _refuse(wanted: list[str]) -> None:
    if wanted:
        raise UnsupportedError(f"narrowkv's backend has no {', '.join(wanted)}: {NOT_SERVED}")
