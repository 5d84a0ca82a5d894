"""What a decoded token and a step cost in launches, waits and copies. MOST may only fall; the counts repeat exactly."""

import pytest
import torch
from loop_runs import make
from test_cuda import qwen
from transformers import GenerationConfig

from grpo_kit.loop.hooks import Hook
from grpo_kit.models import load_policy
from grpo_kit.models.adapters import add_adapters
from grpo_kit.rollout import RolloutEngine

MOST = {
    "launches a layer, full": 29,
    "launches a layer, LoRA": 39,
    "waits a step": 44,
    "copies to the card a step": 25,
}


def decoded(counter, layers, tuning, tokens):
    """(counts of a rollout with so many tokens, launches of its smallest graph)."""
    model = qwen(torch.bfloat16, layers=layers)
    if tuning == "LoRA":
        model = add_adapters(model, "lora", {}, 0)
    engine = RolloutEngine(model)
    how = GenerationConfig(max_new_tokens=tokens, do_sample=True, pad_token_id=0, eos_token_id=[])
    engine.generate([[5, 6, 7]] * 4, how, seed=1)
    counter.reset()
    engine.generate([[5, 6, 7]] * 4, how, seed=1)
    graphs = engine._decoder.graphs
    assert not graphs._failed and graphs.replays
    return counter.counts(), min(graph.launches() for graph, _ in graphs._graphs.values())


@pytest.mark.parametrize("tuning", ["full", "LoRA"])
def test_a_decoded_token_waits_for_nothing_and_sends_nothing_to_the_card(counter, tuning):
    few, _ = decoded(counter, 2, tuning, 8)
    many, _ = decoded(counter, 2, tuning, 24)
    assert many["replays"] - few["replays"] == 16
    more = {name: many[name] - few[name] for name in ("waits", "to_card")}
    assert more == {"waits": 0, "to_card": 0}, more


@pytest.mark.parametrize("tuning", ["full", "LoRA"])
def test_launches_a_layer_only_fall(counter, tuning):
    """Each layer more is so many kernels more in a graph of the decode step."""
    a_layer = decoded(counter, 3, tuning, 8)[1] - decoded(counter, 2, tuning, 8)[1]
    assert a_layer <= MOST[f"launches a layer, {tuning}"], "find what got dearer"


def test_waits_and_copies_a_step_only_fall(counter, tmp_path):
    """The third step of a run, when all graphs are there."""
    found = []

    class Count(Hook):
        def after_step(self, trainer, row, batch):
            found.append(counter.counts())

    model = load_policy("tiny-random", quiet=True)[0].cuda()
    make(tmp_path / "run", model=model, seams="fast", hooks=[Count()], steps=3).train()
    step = {name: found[2][name] - found[1][name] for name in found[0]}
    counted = {"waits a step": step["waits"], "copies to the card a step": step["to_card"]}
    assert all(number <= MOST[name] for name, number in counted.items()), counted
