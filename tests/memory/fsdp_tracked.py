"""A process of its own: torch's FSDPMemTracker over a backward pass of FSDP2 on made-up cards, beside the plan.

Wrapped as accelerate 1.15 does it (a decoder layer, the embedding, norm and head, the rest). Prints JSON.
"""

import json

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen2Config

CONFIG = Qwen2Config(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
CARDS, MICRO_BATCHES = 4, 2


def tracked(*, sync_each_batch: bool) -> dict[str, float]:
    """Bytes by kind at the fullest moment of two micro-batches, without optimizer."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (CARDS,))
    half = torch.bfloat16
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(half, half, half)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="sdpa")
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        for part in (*model.model.layers, model.model.embed_tokens):
            fully_shard(part, reshard_after_forward=True, **options)
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = FSDPMemTracker(model, optimizer)
        ids = torch.zeros(1, 32, dtype=torch.long)
        tracker.track_inputs((ids,))
        with tracker:
            for micro in range(MICRO_BATCHES):
                model.set_requires_gradient_sync(sync_each_batch or micro == MICRO_BATCHES - 1)
                model(input_ids=ids, use_cache=False).logits.float().sum().backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    return {str(kind).rpartition(".")[2]: size for kind, size in peak.items()}


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=CARDS)
    print(json.dumps({str(each): tracked(sync_each_batch=each) for each in (False, True)}))
