"""Host time of a layer's decode step inside transformers: the adapter beside planned calls by hand.

    python benchmarks/engines_host.py

Times are those of the host alone, medians of many steps; the device is waited for between steps. On a CPU the
kernels are left out, so that only the adapter's own time is shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import narrowkv.engines.transformers as narrow
from narrowkv.engines.tiny import tiny_config
from narrowkv.engines.transformers import attention, layers


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def leave_kernels_out() -> None:
    """Replaces the operations, where they are looked up, by functions that do nothing."""
    out = torch.zeros(1, 1, 1)
    layers.append = lambda *args, **kwargs: None
    attention.paged_decode = lambda *args, **kwargs: out


def measure(layers: int, batch: int, steps: int, device: str) -> dict[str, tuple[float, float]]:
    """Microseconds of the first layer and of the median other one: by hand and inside the adapter."""
    config = tiny_config("glm-4.5-air-tiny", num_layers=layers)
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    made = narrow.NarrowCache(config, max_length=4096)
    module = torch.nn.Module()
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    prompt = torch.randn(batch, kv_heads, 1024, dim, **options)
    k, v = torch.randn(2, batch, kv_heads, 1, dim, **options)
    q = torch.randn(batch, heads, 1, dim, **options)
    for index in range(layers):
        made.update(prompt, prompt, index)
        made.narrow_layers[index].store(None)
    flat_q, flat_k = q.squeeze(2), k.squeeze(2)
    times: dict[str, list[list[float]]] = {"by hand": [], "adapter": []}
    for _ in range(steps):
        lap = []
        for index in range(layers):
            begun = time.perf_counter()
            keys, values = made.update(k, v, index)
            attention.attend(module, q, keys, values, None)
            lap.append(time.perf_counter() - begun)
        wait()
        times["adapter"].append(lap)
        rows, lap = made.rows, []
        assert rows.step is not None
        for layer in made.narrow_layers:
            assert layer.cache is not None
            (plan,) = layer.decode_plans(flat_q)
            begun = time.perf_counter()
            layers.append(layer.cache, flat_k, flat_k, rows.step.slots)
            attention.paged_decode(flat_q, layer.cache, rows.table, plan=plan)
            lap.append(time.perf_counter() - begun)
        wait()
        times["by hand"].append(lap)
    found = {}
    for name, laps in times.items():
        kept = laps[len(laps) // 4 :]
        others = [statistics.median(lap[1:]) for lap in kept]
        found[name] = (
            statistics.median(lap[0] for lap in kept) * 1e6,
            statistics.median(others) * 1e6,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        leave_kernels_out()
    found = measure(options.layers, options.batch, options.steps, device)
    print(f"{'host us a layer':18}{'first layer':>12}{'other layers':>14}")
    for name, (first, other) in found.items():
        print(f"{name:18}{first:12.1f}{other:14.1f}")
    beyond = [a - b for a, b in zip(found["adapter"], found["by hand"], strict=True)]
    print(f"{'beyond by hand':18}{beyond[0]:12.1f}{beyond[1]:14.1f}")


if __name__ == "__main__":
    main()
