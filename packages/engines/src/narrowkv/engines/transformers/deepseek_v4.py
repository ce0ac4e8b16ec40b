"""DeepSeek-V4's sparse attention inside transformers, by the kernels over rows.

transformers keeps the tokens of this model in caches of its own, in 16 bits: a window, and compressed rows,
of which an indexer selects some. Its mask says which rows each token sees. Here it becomes lists of rows.

Example:
    >>> from narrowkv.engines.tiny import tiny_model
    >>> from narrowkv.engines.transformers import deepseek_v4
    >>> deepseek_v4.register("packed584")
    >>> model = tiny_model("deepseek-v4-tiny", attn_implementation="narrowkv-sparse")
    >>> with torch.no_grad():
    ...     model(torch.tensor([[5, 6]])).logits.shape
    torch.Size([1, 2, 96])
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from narrowkv.engines.deepseek import attend_to_rows, listed_rows
from narrowkv.engines.transformers.latent import attend_listed, latent_layer
from narrowkv.engines.versions import adapting
from narrowkv.runtime.errors import check_choice
from narrowkv.sparse_fp8 import DSV4Rows
from narrowkv.sparse_fp8.layouts import PAGED_LAYOUTS

with adapting("transformers"):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

__all__ = ["NAME", "attend", "register"]

NAME = "narrowkv-sparse"


def register(layout: str | None = None) -> None:
    """Makes `attn_implementation="narrowkv-sparse"` known to transformers, for DeepSeek-V4.

    Args:
        layout: None to attend to the 16-bit rows; a layout of pages ("packed584" is DeepSeek-V4's own) to
            quantise the rows of every call first, which shows what the layout costs in accuracy.

    Raises:
        ValueError: for another layout.
    """
    if layout is not None:
        check_choice("layout", layout, PAGED_LAYOUTS)
    AttentionInterface.register(NAME, functools.partial(attend, layout=layout))
    AttentionMaskInterface.register(NAME, eager_mask)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    layout: str | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer to the rows that its mask names, for transformers' `AttentionInterface`.

    Args:
        module: the attention module.
        query: `[batch, num_qo_heads, tokens, 512]`, bf16 or fp16; 1 to 128 heads.
        key, value: the same tensor, `[batch, 1, keys, 512]`.
        attention_mask: `[batch or 1, 1, tokens, keys]`, 0 for keys that a token sees, else negative.
        scaling: of the logits; default `512 ** -0.5`.
        s_aux: `[num_qo_heads]`, a logit per head whose value is 0.
        layout: as for `register`.
        **kwargs: what else the model passes: its mask says all of it.

    Returns:
        `[batch, tokens, num_qo_heads, 512]`, and None for the attention weights.

    Raises:
        ValueError: for another model's attention.
    """
    indices = kwargs.get("indices")
    if indices is not None and isinstance(attention_mask, torch.Tensor):
        latent = latent_layer(module)
        if latent is not None:
            return attend_listed(module, latent, query, attention_mask, indices, scaling), None
        raise ValueError(
            f'attn_implementation="{NAME}" reads the latent rows of a NarrowCache for this model, got '
            "another cache or none: pass past_key_values=NarrowCache(model.config, max_length=...)"
        )
    batch, heads, tokens, head_dim = query.shape
    keys = key.shape[2]
    if key is not value or key.shape[1] != 1 or not isinstance(attention_mask, torch.Tensor):
        raise ValueError(
            f'attn_implementation="{NAME}" serves DeepSeek-V4, whose keys are its values in one head, got '
            f'keys {list(key.shape)} and values {list(value.shape)}: use "narrowkv" for other models'
        )
    rows = key.reshape(batch * keys, head_dim)
    own = torch.arange(batch * keys, dtype=torch.int32, device=key.device).view(batch, 1, keys)
    seen = (attention_mask[:, 0, -tokens:, :keys] == 0).expand(batch, tokens, keys)
    stored = rows if layout is None else DSV4Rows.quantize(rows, layout=layout)
    source = listed_rows(stored, own.expand(batch, tokens, keys).masked_fill(~seen, -1))
    sink = None if s_aux is None else s_aux.detach().float()
    q = query.transpose(1, 2).reshape(batch * tokens, heads, head_dim)
    o = attend_to_rows(q, source, None, attn_sink=sink, sm_scale=scaling)
    return o.view(batch, tokens, heads, head_dim), None
