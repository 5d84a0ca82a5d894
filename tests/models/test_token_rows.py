"""Rows of a head without tokens: everywhere as if the model had none, beside the same model with those rows cut off.

The rows are what training makes of them at worst: likelier than every token. The head's length is no multiple of 64.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

import grpo_kit as kit
from benchmarks.architectures import batch_of, gradient, paying_letters
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine._decode import Decoder
from grpo_kit.engine.complete import complete
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Config, Loop
from grpo_kit.loop.batch import complete_prompts, generate
from grpo_kit.loop.config import StepNumbers
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.models._model_facts import close_rows, token_rows
from grpo_kit.more.export import _reader as reader
from grpo_kit.more.export import verify

MORE = 271
HOW = GenerationConfig(
    max_new_tokens=10, do_sample=True, temperature=0.9, top_k=0, eos_token_id=[], pad_token_id=0
)


@pytest.fixture(scope="module")
def both():
    """(model with closed rows, the same model without them, tokenizer)."""
    short, tokenizer = kit.load_policy("tiny-random", quiet=True)
    long = copy.deepcopy(short)
    with torch.no_grad():
        long.resize_token_embeddings(len(tokenizer) + MORE, mean_resizing=False)
        weight = long.get_output_embeddings().weight
        weight[-MORE:] = 3 * weight[:MORE]
    assert weight.size(0) % 64 and token_rows(long) == len(tokenizer) + MORE
    before = long(torch.tensor([[5, 6, 7]])).logits.softmax(-1)[..., -MORE:].sum(-1)
    (
        long.get_output_embeddings().weight.data.mul_(20),
        short.get_output_embeddings().weight.data.mul_(20),
    )
    likely = long(torch.tensor([[5, 6, 7]])).logits.softmax(-1)[..., -MORE:].sum(-1)
    assert likely.max() > 0.5 > before.max()  # what an update would do
    assert close_rows(long, tokenizer) == token_rows(long) == len(tokenizer)
    assert close_rows(short, tokenizer) == token_rows(short) == len(tokenizer)
    assert not short.get_output_embeddings()._forward_hooks
    return long.eval(), short.eval(), tokenizer


def batch():
    prompts = [[5, 6, 7, 8]] * 2 + [[5, 6, 9]] * 2
    return batch_of(prompts, [[11, 12, 13], [14, 15], [16], [17, 18, 19, 20]])


def updates(model, way, config):
    if way == "padded":
        return PaddedUpdate(config)
    update = PackedUpdate(model, config)
    if "dense" in way:
        update.memory.attention = "sdpa"
        # no plain head any more
        model.get_output_embeddings().register_forward_pre_hook(lambda *_: None)
    return update


@pytest.mark.parametrize("way", ["padded", "packed", "packed, dense mask and tiles"])
@pytest.mark.parametrize("bonus", [0.0, 0.1])
def test_scores_entropies_and_gradients_are_those_of_a_model_without_such_rows(
    both, way, bonus
):
    found = []
    for model in map(copy.deepcopy, both[:2]):
        update = updates(model, way, Config(max_completion_tokens=12, entropy_bonus=bonus))
        logprobs = update.logprobs(model, batch(), 0.5)
        found.append((logprobs, gradient(model, batch(), update)))
    (scores, grads), (wanted, true) = found
    assert torch.allclose(scores, wanted, atol=1e-5) and scores.abs().max() > 0
    width = both[0].config.hidden_size
    names = [name for name, _ in both[0].named_parameters()]
    assert names[0] == "model.embed_tokens.weight"  # tied: the head's rows come first
    ends = len(both[2]) * width
    kept = torch.cat([grads[:ends], grads[ends + MORE * width :]])
    assert (kept - true).norm() < 1e-5 * true.norm()
    assert not grads[ends : ends + MORE * width].any()


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("plain_layers", [True, False])
def test_the_engine_draws_the_same_tokens(both, bucketed, plain_layers):
    found = []
    for model in map(copy.deepcopy, both[:2]):
        if not plain_layers:
            model.model.norm.register_forward_hook(lambda *_: None)
        engine = RolloutEngine(model)
        engine._decoder = Decoder(model, bucketed=bucketed)
        found.append(engine.generate([[5, 6, 7]] * 4 + [[8, 9]] * 4, HOW, seed=0))
    long, short = found
    assert long.completion_ids == short.completion_ids
    for name in ("logprobs", "policy_logprobs", "entropies"):
        ours, theirs = (torch.tensor(getattr(one, name)) for one in found)
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_greedy_and_plain_sampling_never_give_one(both):
    long, short, tokenizer = both
    prompts = ["Which is the largest?", "Say a word."]
    texts = [
        complete(model, tokenizer, prompts, max_completion_tokens=8, samples=1, temperature=0.0)
        for model in (long, short)
    ]
    assert texts[0] == texts[1]
    torch.manual_seed(0)
    config = Config(max_completion_tokens=16)
    made = complete_prompts(
        long, tokenizer, [[5, 6, 7]] * 8, config, StepNumbers(0, 0.0, 1.0, 0.0, 0.0)
    )
    assert max(map(max, made)) < len(tokenizer)


def test_no_temperature_makes_a_number_that_is_none(both):
    long = both[0]
    for temperature in (1e-3, 100.0):
        scores = PaddedUpdate(Config()).logprobs(long, batch(), temperature)
        assert scores.isfinite().all()
    half = copy.deepcopy(long).half()
    assert half(torch.tensor([[5, 6]])).logits.float().softmax(-1)[..., -MORE:].max() == 0


def test_under_adapters_too_and_with_more_tokens_they_open(both):
    long, _, tokenizer = both
    adapted = get_peft_model(
        copy.deepcopy(long), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    assert token_rows(adapted) == len(tokenizer)
    assert adapted(torch.tensor([[5, 6]])).logits.softmax(-1)[..., -MORE:].max() == 0
    more = copy.deepcopy(tokenizer)
    more.add_tokens(["<one>", "<two>"])
    model = copy.deepcopy(long)
    assert (
        close_rows(model, more) == len(tokenizer) + 2
        and len(model.get_output_embeddings()._forward_hooks) == 1
    )
    open_ones = model(torch.tensor([[5, 6]])).logits.softmax(-1)[..., len(tokenizer) :].sum(-1)
    assert 0 < open_ones.max() < 1


def test_a_run_and_an_export_know_none(both, tmp_path, monkeypatch):
    def ask(request, path):  # not in a process of its own, which loads torch anew
        Path(request["answer"]).write_text(
            json.dumps(reader.read(json.loads(json.dumps(request))))
        )

    monkeypatch.setattr(verify, "_ask", ask)
    long, _, tokenizer = both
    model = copy.deepcopy(long)
    task = paying_letters(kit.tasks.largest(n_train=8, n_held_out=2, max_completion_tokens=6))
    config = Config(steps=2, prompts_per_step=2, group_size=4, seed=1, dynamic_sampling=0)
    trainer = kit.GRPOTrainer(
        model, task, config, tokenizer=tokenizer, folder=tmp_path / "run", live=None
    )
    trainer.train()
    plain = Loop(
        copy.deepcopy(long), task, config, tokenizer=tokenizer, folder=tmp_path / "plain", sample=generate,
        update=PaddedUpdate(config), hooks=[],
    )  # fmt: skip
    plain.train()
    for folder in ("run", "plain"):
        rows = kit.read_metrics(tmp_path / folder)
        assert rows["entropy"].max() < torch.log(torch.tensor(float(len(tokenizer))))
        assert rows["rollout/logprob_gap"].max() < 1e-4 if folder == "run" else True
    made = kit.export(model, tokenizer, tmp_path / "merged", task=task, quant="f32", rows=2)
    assert made.proof and made.proof.agreement == 1
    again, _ = kit.load_policy(tmp_path / "merged", quiet=True)
    assert (
        again.config.vocab_size == again.get_input_embeddings().weight.size(0) == len(tokenizer)
    )
    assert model.config.vocab_size == len(tokenizer) + MORE  # the model itself stays


def test_a_loaded_model_is_closed(both, tmp_path):
    long, _, tokenizer = both
    long.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    for tuning in ("full", "lora"):
        model, _ = kit.load_policy(tmp_path, tuning=tuning, quiet=True)
        assert token_rows(model) == len(tokenizer)
        assert model(torch.tensor([[5, 6]])).logits.softmax(-1)[..., -MORE:].max() == 0
