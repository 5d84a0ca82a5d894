"""What a decoded token and a step cost in launches, waits and copies. MOST may only fall; the counts repeat exactly."""

import few_words
import pytest
import torch
from loop_runs import make
from test_cuda import qwen
from test_packed_update import ragged, step
from transformers import GenerationConfig

from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.engine.sampling import Sampler, uniform
from grpo_kit.loop import Config
from grpo_kit.loop.protocols import Hook
from grpo_kit.models._adapters import add_adapters

MOST = {
    "launches a layer, full": 29,
    "launches a layer, LoRA": 39,
    "bytes of sampling, bfloat16": 30.6,  # a number of the vocabulary
    "bytes of sampling, bfloat16, top-p": 76,
    "waits a step": 44,
    "copies to the card a step": 25,
}
COUNTED = {}


def decoded(counter, layers, tuning, tokens, **options):
    """(counts of a rollout with so many tokens, launches of its smallest graph), counted once: they repeat exactly."""
    asked = (layers, tuning, tokens, *options.items())
    if asked not in COUNTED:
        COUNTED[asked] = _decoded(counter, layers, tuning, tokens, options)
    return COUNTED[asked]


def _decoded(counter, layers, tuning, tokens, options):
    model = qwen(torch.bfloat16, layers=layers)
    if tuning == "LoRA":
        model = add_adapters(model, "lora", {}, 0)
    engine = RolloutEngine(model)
    how = GenerationConfig(
        max_new_tokens=tokens, do_sample=True, pad_token_id=0, eos_token_id=[], **options
    )
    engine.generate([[5, 6, 7]] * 4, how, seed=1)
    counter.reset()
    engine.generate([[5, 6, 7]] * 4, how, seed=1)
    graphs = engine._decoder.graphs
    assert not graphs._failed and graphs.replays
    return counter.counts(), min(graph.launches() for graph, _ in graphs._graphs.values())


@pytest.mark.parametrize(
    ("tuning", "options"),
    [("full", {}), ("LoRA", {}), ("full", {"top_p": 0.9, "temperature": 0.7})],
)
def test_a_decoded_token_waits_for_nothing_and_sends_nothing_to_the_card(
    counter, tuning, options
):
    few, _ = decoded(counter, 2, tuning, 8, **options)
    many, _ = decoded(counter, 2, tuning, 24, **options)
    assert many["replays"] - few["replays"] == 16
    more = {name: many[name] - few[name] for name in ("waits", "to_card")}
    assert more == {"waits": 0, "to_card": 0}, more


@pytest.mark.parametrize("tuning", ["full", "LoRA"])
def test_launches_a_layer_only_fall(counter, tuning):
    """Each layer more is so many kernels more in a graph of the decode step."""
    a_layer = decoded(counter, 3, tuning, 8)[1] - decoded(counter, 2, tuning, 8)[1]
    assert a_layer <= MOST[f"launches a layer, {tuning}"], "find what got dearer"


@pytest.mark.parametrize(("name", "options"), [("", {}), (", top-p", {"top_p": 0.9})])
def test_bytes_of_sampling_only_fall(counter, name, options):
    """Of 16-bit logits over a large vocabulary, a number; none of it a sort of the whole."""
    how = GenerationConfig(do_sample=True, temperature=0.7, top_k=0, **options)
    sampler, rows = Sampler.from_config(how, 1), torch.arange(4, device="cuda")
    logits = (8 * torch.randn(4, 100_000, device="cuda")).bfloat16()
    chances = uniform(sampler.seed, rows[:, None], torch.arange(1, device="cuda"))
    sampler(logits, rows, None, None, chances[:, 0])
    counter.reset()
    sampler(logits, rows, None, None, chances[:, 0])
    assert (
        counter.counts()["bytes"] / logits.numel() <= MOST[f"bytes of sampling, bfloat16{name}"]
    )
    assert counter.counts()["waits"] == 0 and "aten::sort.stable" not in counter.operators()
    assert not sampler.too_few()


def test_top_p_that_looked_at_too_few_tokens_is_done_again_by_sorting(counter):
    """A flat distribution: what is drawn is drawn on a CPU, and from then on it sorts at once."""
    model = qwen(vocabulary=9_000)
    with torch.no_grad():
        model.model.norm.weight.fill_(0.01)
    how = GenerationConfig(
        max_new_tokens=3, do_sample=True, top_p=0.95, top_k=0, pad_token_id=0, eos_token_id=[]
    )
    engine = RolloutEngine(model)
    made = [engine.generate([[5, 6, 7]] * 4, how, seed=seed).completion_ids for seed in (1, 2)]
    assert engine._sorts and counter.operators()["aten::topk"] == 3 + 3 + 3
    model = model.cpu()
    assert made == [
        RolloutEngine(model).generate([[5, 6, 7]] * 4, how, seed=seed).completion_ids
        for seed in (1, 2)
    ]


def test_a_norm_of_the_update_is_one_kernel_each_way(counter):
    model = qwen(torch.bfloat16, layers=3, vocabulary=4096).train()
    update = PackedUpdate(model, Config(autocast="none"))
    counter.reset()
    step(update, model, ragged(), autocast="none")
    operators = counter.operators()
    assert (
        operators["aten::_fused_rms_norm"]
        == operators["aten::_fused_rms_norm_backward"]
        == 2 * 3 + 1
    )
    assert "aten::rsqrt" not in operators


def test_waits_and_copies_a_step_only_fall(counter, tmp_path):
    """The third step of a run, when all graphs are there."""
    found = []

    class Count(Hook):
        def after_step(self, trainer, row, batch):
            found.append(counter.counts())

    model = few_words.policy()[0].cuda()
    make(tmp_path / "run", model=model, seams="fast", hooks=[Count()], steps=3).train()
    step = {name: found[2][name] - found[1][name] for name in found[0]}
    counted = {"waits a step": step["waits"], "copies to the card a step": step["to_card"]}
    assert all(number <= MOST[name] for name, number in counted.items()), counted
