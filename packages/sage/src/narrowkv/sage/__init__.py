"""Sage attention: dense attention on narrow matrix units, Q, K and V quantised on the way in."""

from narrowkv.sage.api import plan_sage, sage_attention
from narrowkv.sage.operation import SagePlan
from narrowkv.sage.prequantized import SageOperands, sage_attention_quantized
from narrowkv.sage.reference import sage_attention_reference
from narrowkv.sage.shapes import QuantizedKV, SageShape
from narrowkv.sage.torch_ops import traced_sage  # noqa: F401  # torch.ops.narrowkv.sage_attention

__all__ = [
    "QuantizedKV",
    "SageOperands",
    "SagePlan",
    "SageShape",
    "plan_sage",
    "sage_attention",
    "sage_attention_quantized",
    "sage_attention_reference",
]
