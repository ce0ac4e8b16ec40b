"""A cost model of a context-parallel decode step, from published figures: bytes, latency and bandwidth.

A step is attention over the rank's share of the keys, then two collectives (queries over heads, partial
results by heads), each a latency and a transfer. Nothing overlaps, so that head groups can only do better.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch

from narrowkv.context_parallel.exchange import ExchangeSizes, block_elements
from narrowkv.paged_cache import PagedKVCache
from narrowkv.runtime.targets import get_target
from narrowkv.testing.bench.context_parallel import Setting

# Share of the peak HBM bandwidth that decode reaches on long contexts, and the time of a step that reads
# nothing: the two launches of attention and merge. Both are what `narrowkv bench decode` shows on an H100.
_HBM_SHARE = 0.85
_LAUNCHES_US = 6.0


@dataclass(frozen=True)
class Link:
    """How GPUs of a scale-up domain, and domains, are connected.

    Attributes:
        name: for people.
        domain: GPUs that are connected so.
        bytes_per_s: what a GPU sends to all others of its domain together, in one direction.
        peer_bytes_per_s: what it sends to one of them.
        latency_us: of a collective, however small; hop_us: for each further GPU of the domain.
        network_bytes_per_s, network_hop_us: of a GPU's network adapter to GPUs of other domains.
        source: where the figures come from.
    """

    name: str
    domain: int
    bytes_per_s: float
    peer_bytes_per_s: float
    latency_us: float
    hop_us: float
    network_bytes_per_s: float
    network_hop_us: float
    source: str


_LATENCY = (
    "latencies of a ring with the low-latency protocol by NCCL's table (src/graph/tuning.cc): 6.6 us a "
    "collective, 0.6 us an NVLink hop, 2.7 us a network hop; RDMA of one 400 Gb/s adapter a GPU"
)
LINKS: MappingProxyType[str, Link] = MappingProxyType(
    {
        "xgmi4": Link(
            "XGMI of MI300X", 8, 7 * 64e9, 64e9, 6.6, 0.6, 50e9, 2.7,
            f"AMD MI300X data sheet: seven links of 128 GB/s in both directions; {_LATENCY}",
        ),
        "xgmi4-355": Link(
            "XGMI of MI355X", 8, 7 * 76.8e9, 76.8e9, 6.6, 0.6, 50e9, 2.7,
            f"AMD MI355X data sheet: seven links of 153.6 GB/s in both directions; {_LATENCY}",
        ),
        "nvlink4": Link(
            "NVLink 4 of H100 and H200", 8, 450e9, 450e9, 6.6, 0.6, 50e9, 2.7,
            f"NVIDIA H100 data sheet: 900 GB/s in both directions through NVSwitch; {_LATENCY}",
        ),
        "nvlink5": Link(
            "NVLink 5 of GB200 NVL72", 72, 900e9, 900e9, 6.6, 0.6, 50e9, 2.7,
            f"NVIDIA GB200 NVL72 data sheet: 1.8 TB/s a GPU in both directions, 72 GPUs; {_LATENCY}",
        ),
    }
)  # fmt: skip
LINK_OF_TARGET = MappingProxyType({"gfx942": "xgmi4", "gfx950": "xgmi4-355", "sm90": "nvlink4"})


@dataclass(frozen=True)
class Predicted:
    """A modelled step.

    Attributes:
        world, context, batch: GPUs, tokens of each sequence, sequences.
        cache_gib: of all sequences, over all GPUs.
        one_gpu_us: of one GPU, whether or not the cache fits it. attention_us, communication_us, step_us: of
            all.
        sent_bytes: of one GPU.
    """

    world: int
    context: int
    batch: int
    cache_gib: float
    one_gpu_us: float
    attention_us: float
    communication_us: float
    step_us: float
    sent_bytes: int

    @property
    def speedup(self) -> float:
        """Decode rate over one GPU's."""
        return self.one_gpu_us / self.step_us

    def as_dict(self) -> dict[str, Any]:
        """The fields and the speed-up."""
        return {**asdict(self), "speedup": self.speedup}


def collective_us(link: Link, world: int, bytes_per_peer: float) -> float:
    """Microseconds of a collective in which each GPU sends this many bytes to every other.

    Raises:
        ValueError: fewer than one GPU.
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}")
    if world == 1:
        return 0.0
    near = min(world, link.domain) - 1
    far = world - 1 - near
    inside = max(near * bytes_per_peer / link.bytes_per_s, bytes_per_peer / link.peer_bytes_per_s)
    outside = far * bytes_per_peer / link.network_bytes_per_s
    domains = -(-world // link.domain)
    latency = link.latency_us + near * link.hop_us + (domains - 1) * link.network_hop_us
    return latency + max(inside, outside) * 1e6


def predict(
    setting: Setting, world: int, context: int, batch: int, *, target: str, link: str,
    partial_dtype: torch.dtype = torch.bfloat16, hbm_bytes_per_s: float | None = None,
) -> Predicted:  # fmt: skip
    """A step of `world` GPUs by the model.

    Args:
        setting: the model's heads and the cache's format. Heads that the GPUs do not divide are rounded up.
        world, context, batch: GPUs, tokens of each sequence, sequences.
        target: "gfx942", "gfx950" or "sm90": whose memory bandwidth.
        link: one of `LINKS`.
        partial_dtype: of partial results on their way.
        hbm_bytes_per_s: peak memory bandwidth of another chip of the target, such as 4.8e12 of an H200.

    Raises:
        ValueError: a target without figures.

    Example:
        >>> step = predict(Setting(), 8, 2**20, 1, target="gfx942", link="xgmi4")
        >>> 1 < step.speedup < 8
        True
    """
    own_heads = -(-setting.num_qo_heads // world)
    one_page = PagedKVCache.empty(
        1, setting.page_size, setting.num_kv_heads, setting.head_dim, format=setting.format
    )
    num_bytes = one_page.bytes_per_token() * context * batch
    figures = get_target(target).figures
    if figures is None:
        raise ValueError(f"target must be a GPU with known figures: gfx942, gfx950 or sm90, got {target!r}")
    rate = (hbm_bytes_per_s or figures.hbm_bytes_per_s) * _HBM_SHARE
    sizes = ExchangeSizes(world, 0, batch, own_heads * world, setting.head_dim)
    queries = batch * own_heads * setting.head_dim * 2
    partials = own_heads * block_elements(sizes, partial_dtype) * partial_dtype.itemsize
    communication = sum(collective_us(LINKS[link], world, each) for each in (queries, partials))
    one_gpu = _LAUNCHES_US + num_bytes / rate * 1e6
    attention = _LAUNCHES_US + num_bytes / world / rate * 1e6
    return Predicted(
        world, context, batch, num_bytes / 2**30, one_gpu, attention, communication,
        attention + communication, (world - 1) * (queries + partials),
    )  # fmt: skip
