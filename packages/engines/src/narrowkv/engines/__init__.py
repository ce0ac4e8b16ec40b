"""narrowkv inside inference engines. Each module imports its engine, and only when it is itself imported.

    narrowkv.engines.transformers    attention function, mask function and cache for `generate`
    narrowkv.engines.vllm            attention backend of the V1 engine
    narrowkv.engines.sglang          attention backend over its KV pools
    narrowkv.engines.aiter           AITER's attention functions, by their names and signatures

A module of an engine has `register()`, which makes narrowkv known to it, and `supports(config)`, which
returns the reasons why a model cannot be served: an empty list is a yes.
"""

__all__: list[str] = []
