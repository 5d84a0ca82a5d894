"""What the engine keeps between rollouts on a card: as much as the update spares, given back where memory runs out."""

import pytest
import torch
from rollout_models import tiny_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_kit.engine._update_memory import UpdateMemory

GIB = 2**30


@pytest.fixture(scope="module")
def memory():
    """Qwen2.5-1.5B in bfloat16 without its weights; 14 GiB are free once gradients are there."""
    config = Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    # a CUDA build of torch, without a driver, has no card to ask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
        memory = UpdateMemory(model.requires_grad_(False), torch.device("cuda"))
    memory.attention = "flex_attention"
    return memory


def rows(completions, tokens):
    """Eight groups, of which no two share a prompt and no two completions a token."""
    return [
        ((p, *range(255)), [1000 * c + t for t in range(tokens)])
        for p in range(8)
        for c in range(completions)
    ]


@pytest.mark.parametrize(
    ("held", "completions", "tokens", "stays", "reason"),
    [
        (0.0, 8, 512, True, "nothing is held"),
        (1.0, 8, 512, True, "two layers of 28 more are computed again"),
        (3.0, 8, 512, False, "six layers more"),
        (2.5, 2, 64, True, "so little is updated that both fit"),
        (13.9, 2, 64, False, "the update does not fit beside it"),
    ],
)
def test_what_the_update_spares(memory, held, completions, tokens, stays, reason):
    free = int((14 - held) * GIB)
    assert memory.spares(int(held * GIB), rows(completions, tokens), free) == stays, reason


@pytest.mark.parametrize(
    ("held", "update", "capture", "stays"),
    [
        (3.0, 0.0, 1.0, False),  # nobody knows yet what a layer costs
        (3.0, 6.0, 1.0, True),  # six of 28 layers again: 0.43 s
        (3.0, 6.0, 0.4, False),
        (13.9, 6.0, 60.0, False),  # shorter chunks would round otherwise, by what a clock said
    ],
)
def test_graphs_stay_where_making_them_anew_takes_longer(
    memory, held, update, capture, stays, monkeypatch
):
    monkeypatch.setattr(memory, "_seconds", update)
    free = int((14 - held) * GIB)
    assert memory.spares(int(held * GIB), rows(8, 512), free, seconds=capture) == stays


def test_out_of_memory_takes_back_what_the_engine_keeps_before_chunks_shrink():
    memory = UpdateMemory(tiny_model(), torch.device("cpu"))
    kept, limits = [True], []

    def give_back():
        return bool(kept) and kept.pop()

    def work(limit):
        limits.append(limit)
        if len(limits) < 3:
            raise torch.OutOfMemoryError("full")
        return "done"

    memory.give_back = give_back
    some = [((1, 2, 3), [4] * 40), ((1, 2, 3), [5] * 40), ((7, 8), [4] * 40)]
    assert memory.run(work, some) == "done"
    assert limits[0] == limits[1] > limits[2] and not kept
