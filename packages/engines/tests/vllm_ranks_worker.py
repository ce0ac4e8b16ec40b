"""`LLM.generate` with two ranks on a CPU: MODEL, RANKS THAT SHARE A SEQUENCE, INTERLEAVE; prints the tokens.

vLLM's workers import this module first. It puts narrowkv in the CPU's place, and computes slot mappings,
which vLLM does for a CPU only without context parallelism, by `ShardLayout`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.v1.worker.block_table import BlockTable

from narrowkv.context_parallel import ShardLayout
from narrowkv.engines import vllm as narrow

narrow.register(instead_of="CPU_ATTN")


def compute_slot_mapping(
    self: Any, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
) -> None:
    """Slots of the step's tokens in this rank's cache."""
    layout = ShardLayout(self.dcp_world_size, self.dcp_rank, self.cp_kv_cache_interleave_size)
    counts = query_start_loc[: num_reqs + 1].diff()
    seqs = torch.repeat_interleave(torch.arange(num_reqs), counts)
    tokens = len(seqs)
    covers = self.block_size * layout.world
    pages = self.block_table.gpu[seqs, positions[:tokens] // covers].long()
    slots = pages * covers + positions[:tokens] % covers
    self.slot_mapping.gpu.fill_(-1)
    self.slot_mapping.gpu[:tokens] = layout.local_slots(slots, self.block_size)


BlockTable.compute_slot_mapping = compute_slot_mapping


class Extension:
    """vLLM wants a class; the module's import is what is needed."""


def main(model: str, shared_by: int, interleave: int) -> None:
    """Two prompts, a few tokens of each."""
    llm = LLM(
        model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=128, enforce_eager=True,
        tensor_parallel_size=2, decode_context_parallel_size=shared_by,
        cp_kv_cache_interleave_size=interleave, max_num_seqs=4, seed=0,
        worker_extension_cls="vllm_ranks_worker.Extension",
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22])]
    found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, detokenize=False))
    print("TOKENS", json.dumps([list(each.outputs[0].token_ids) for each in found]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
