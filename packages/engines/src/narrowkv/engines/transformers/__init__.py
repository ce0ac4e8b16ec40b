"""narrowkv inside transformers: an attention function, a mask function and a cache for `generate`.

Example:
    >>> import narrowkv.engines.transformers as narrow
    >>> narrow.register()
    >>> model = AutoModelForCausalLM.from_pretrained(
    ...     name, attn_implementation="narrowkv", dtype=torch.bfloat16
    ... )  # doctest: +SKIP
    >>> cache = narrow.NarrowCache(model.config, max_length=4096)  # doctest: +SKIP
    >>> model.generate(**inputs, past_key_values=cache)  # doctest: +SKIP
"""

from narrowkv.engines.versions import adapting

with adapting("transformers"):
    from transformers import AttentionInterface, AttentionMaskInterface

    from narrowkv.engines.transformers.architectures import supported_architectures, supports
    from narrowkv.engines.transformers.attention import attend
    from narrowkv.engines.transformers.cache import NarrowCache
    from narrowkv.engines.transformers.layers import NarrowLayer
    from narrowkv.engines.transformers.masks import padding_of

NAME = "narrowkv"


def register() -> None:
    """Registers `attn_implementation="narrowkv"` with transformers. A second call has no effect."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, padding_of)


__all__ = [
    "NAME",
    "NarrowCache",
    "NarrowLayer",
    "attend",
    "padding_of",
    "register",
    "supported_architectures",
    "supports",
]
