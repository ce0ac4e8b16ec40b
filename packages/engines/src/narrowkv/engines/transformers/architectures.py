"""Which of transformers' decoder architectures narrowkv serves, by their configuration and source code.

A model's source says which arguments its attention passes and what it does with the cache; it is parsed, not
imported, so that asking about every architecture takes seconds.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from narrowkv.engines.geometry import decoder_reasons, is_latent

# What attention functions are passed that `attend` takes, or that does not change the result.
_TAKEN = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "attention_mask"}
_WITHOUT_EFFECT = {"position_ids", "output_attentions"}
_QUERY, _KEY, _VALUE = 1, 2, 3  # places of the arguments of an attention function


def supports(config: Any) -> list[str]:
    """Why narrowkv cannot serve a model; an empty list is a yes.

    Args:
        config: a model's configuration, or the configuration of its decoder.

    Returns:
        Sentences, in no order.

    Example:
        >>> from transformers import LlamaConfig
        >>> supports(LlamaConfig(head_dim=128))
        []
    """
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        return ["it has an encoder: attention to the encoder's tokens is not paged"]
    if text.model_type == "deepseek_v4":
        return [
            'its attention to compressed rows is sparse: attn_implementation="narrowkv-sparse", of '
            "narrowkv.engines.transformers.deepseek_v4.register(), serves it"
        ]
    source = _source_of(text.model_type)
    if source is None:
        return [f"transformers has no source of {text.model_type!r}; pass the configuration of its decoder"]
    if not isinstance(getattr(text, "num_hidden_layers", None), int):
        return ["its configuration names no number of layers"]
    geometry, code = decoder_reasons(text, latent=True), _code_reasons(source)
    if is_latent(text) and not geometry and any("passes indices," in reason for reason in code):
        return [
            'its attention to tokens that an indexer chose is sparse: attn_implementation="narrowkv-sparse", '
            "of narrowkv.engines.transformers.deepseek_v4.register(), serves it with a NarrowCache"
        ]
    reasons = [*code, *geometry, *_layer_reasons(text, source)]
    if getattr(text, "dtype", None) == torch.float32:
        reasons.append("it is loaded in float32: load it with dtype=torch.bfloat16")
    return reasons


def supported_architectures(*, multimodal: bool = False) -> dict[str, list[str]]:
    """`supports` of every decoder architecture that transformers registers, with its default configuration.

    Args:
        multimodal: ask about models of images and speech, and of encoders and decoders, too. The answer is
            about text through their decoder; transformers is not asked to make them.

    Returns:
        For each model type of `AutoModelForCausalLM`, the reasons why not; among them that transformers makes
        no model of the default configuration.
    """
    answers = {}
    others = (
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    )
    more = {name: None for names in others for name in names} if multimodal else {}
    for model_type in dict.fromkeys((*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *more)):
        try:
            config = AutoConfig.for_model(model_type)
        except Exception as error:  # configurations raise errors of many libraries
            answers[model_type] = [f"it has no default configuration: {str(error).splitlines()[0]}"]
            continue
        reasons = supports(config)
        if not reasons and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            reasons = _construction_reasons(config)
        answers[model_type] = reasons
    return answers


def _construction_reasons(config: Any) -> list[str]:
    """Why transformers makes no model of a configuration; the model takes no memory here."""
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config)
    except Exception as error:  # as many kinds as there are models
        text = str(error).strip().partition("\n")[0]
        return [f"transformers makes no model of its configuration: {type(error).__name__}: {text}"]
    return []


def _source_of(model_type: str) -> Path | None:
    module = model_type_to_module_name(model_type)
    package = importlib.util.find_spec("transformers")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "models" / module / f"modeling_{module}.py"
    return path if path.is_file() else None


@functools.cache
def _code_reasons(source: Path) -> tuple[str, ...]:
    """Why the code of an architecture cannot be served."""
    tree = ast.parse(source.read_text())
    own = [c.name for c in ast.walk(tree) if isinstance(c, ast.ClassDef) and any(map(_is_cache, c.bases))]
    if own:
        return (f"it has a cache of its own, {own[0]}",)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    attentions = [f for f in functions if _updated_names(f) is not None]
    if not attentions:
        return ("its attention keeps no keys and values in transformers' cache",)
    reasons: dict[str, None] = {}
    for function in attentions:
        calls = list(_attention_calls(function))
        if not calls:
            reasons["its attention does not go through transformers' AttentionInterface"] = None
        for call in calls:
            reasons |= dict.fromkeys(_call_reasons(function, call))
    return tuple(reasons)


def _call_reasons(function: ast.FunctionDef, call: ast.Call) -> Iterator[str]:
    unknown = {k.arg for k in call.keywords if k.arg} - _TAKEN - _WITHOUT_EFFECT
    if unknown:
        yield f"its attention passes {', '.join(sorted(unknown))}, which narrowkv's does not take"
    names = _updated_names(function)
    assert names is not None
    passed = [a.id if isinstance(a, ast.Name) else ast.unparse(a) for a in call.args[_KEY : _VALUE + 1]]
    after = max(n.lineno for n in ast.walk(function) if isinstance(n, ast.Assign) and _is_update(n.value))
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and _expands(node.value, names):
            after, names = node.lineno, _targets(node)
    if passed != names or _assigned(function, after) & set(names):
        yield "its attention changes keys or values after the cache has taken them"

    # What is assigned from another argument is the mask of attention to an encoder.
    own_masks = _assigned(function, but=lambda value: isinstance(value, ast.Name) and "mask" in value.id)
    mask = [k.value for k in call.keywords if k.arg == "attention_mask"] + call.args[_VALUE + 1 :]
    parameters = {a.arg for a in function.args.args} - own_masks
    if not mask or not isinstance(mask[0], ast.Name) or mask[0].id not in parameters:
        yield "its attention makes a mask of its own"


def _is_cache(base: ast.expr) -> bool:
    return isinstance(base, ast.Name) and base.id in ("Cache", "DynamicCache", "StaticCache")


def _updated_names(function: ast.FunctionDef) -> list[str] | None:
    """What a cache's `update` is assigned to, in a function that calls it."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and _is_update(node.value):
            return _targets(node)
    return None


def _targets(node: ast.Assign) -> list[str]:
    """What an assignment assigns to."""
    return [ast.unparse(e) for e in getattr(node.targets[0], "elts", [node.targets[0]])]


def _expands(node: ast.AST, names: list[str]) -> bool:
    """Whether an expression expands what the cache returned, latent rows, to keys and values of heads."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "expand_kv"
        and [ast.unparse(argument) for argument in node.args] == names
    )


def _is_update(node: ast.AST) -> bool:
    """Whether an expression is `past_key_values.update(...)`, whatever the cache is called."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "update"
        and any("layer_idx" in ast.unparse(argument) for argument in (*node.args, *node.keywords))
    )


def _assigned(
    function: ast.FunctionDef, after: int = 0, but: Callable[[ast.expr], bool] = lambda value: False
) -> set[str]:
    """Names that a function assigns below a line, other than values that `but` excepts."""
    return {
        name.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and node.lineno > after and not but(node.value)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }


def _attention_calls(function: ast.FunctionDef) -> Iterator[ast.Call]:
    """Calls of what `ALL_ATTENTION_FUNCTIONS.get_interface` returned."""
    interfaces = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            if "ALL_ATTENTION_FUNCTIONS" in ast.unparse(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                interfaces |= {ast.unparse(target) for target in targets}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in interfaces:
            yield node


def _layer_reasons(text: Any, source: Path) -> Iterator[str]:
    kinds = set(getattr(text, "layer_types", None) or ())
    if any("chunk" in kind for kind in kinds) or (not kinds and getattr(text, "attention_chunk_size", None)):
        yield "some layers attend within chunks"
    try:
        layers = DynamicCache(config=text).layers
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        yield f"transformers makes no cache for it: {error}"
        return
    code = source.read_text()
    decides = "config.is_decoder" in code and "self.is_causal = True" not in code
    if decides and getattr(text, "is_decoder", True) is False:
        yield "it is configured as an encoder: set is_decoder=True in its configuration"
    if (
        any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers)
        and "sliding_window=" not in code
    ):
        yield "some layers have a sliding window, which its attention does not pass"
    for layer in layers:
        if isinstance(layer, CacheLayerMixin) and type(layer) not in (
            DynamicLayer,
            DynamicSlidingWindowLayer,
        ):
            yield f"it caches in {type(layer).__name__}, which is not keys and values of heads alone"
            return
