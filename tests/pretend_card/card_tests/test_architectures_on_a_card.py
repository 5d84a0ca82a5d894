"""Families with windows and soft caps on a card: captured graphs decode them, the packed update scores them."""

import pytest
import torch
from transformers import GenerationConfig

from benchmarks.architectures import alone, batch_of, gradient, off, random_batch, tiny
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.fast import fast
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Config
from grpo_kit.loop.padded_update import PaddedUpdate

HOW = GenerationConfig(
    max_new_tokens=12, do_sample=True, temperature=0.7, top_k=0, eos_token_id=[], pad_token_id=0
)
CONFIG = Config(max_completion_tokens=12)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral"])
def test_graphs_and_packed_rows_give_what_the_cpu_gives(family):
    model, batch = tiny(family).to("cuda"), random_batch()
    assert RolloutEngine.unsupported(model, HOW) is None
    engine = RolloutEngine(model)
    for seed in (0, 1):  # captured, then replayed with other weights' worth of keys
        made = engine.generate(batch.prompt_ids, HOW, seed=seed)
        with torch.no_grad():
            wanted = alone(tiny(family), batch_of(batch.prompt_ids, made.completion_ids), 0.7)
        assert off(made.policy_logprobs, wanted) < 1e-3
    assert engine._decoder.graphs.captures and engine._decoder.graphs.replays
    wanted = gradient(model, batch, PaddedUpdate(CONFIG))
    found = gradient(model, batch, PackedUpdate(model, CONFIG))
    assert (found - wanted).norm() < 1e-3 * wanted.norm()


def test_a_new_family_is_fast_on_a_card_once_it_is_compared():
    seams = fast(tiny("gemma3").to("cuda"), CONFIG)
    assert seams.why_not is None and seams.update.memory.by_layer
