"""Hinted: completions are sampled behind a prompt with a hint, and trained behind the prompt without it."""

import few_words
import pytest
import torch
from loop_runs import SMALL, record, same, task, weights

import grpo_kit as kit
from examples.hinted import Hinted
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.fast import fast
from grpo_kit.loop import Config, Loop
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.record.files import RunFolderError, read_completions, run_settings

HINT = "Write letters."


def trainer_of(folder, sample, *, seams="fast", **config):
    """A loop on a fresh tiny model. seams: "plain" samples by transformers' generate."""
    model, tokenizer = few_words.policy()
    config = Config(**(SMALL | {"importance_sampling_cap": 2.0} | config))
    update = PaddedUpdate(config)
    if seams == "fast":
        found = fast(model, config)
        update = found.update
        sample = found.sample if sample is None else sample.around(found.sample)
    return Loop(
        model, task(), config, tokenizer=tokenizer, folder=folder, sample=sample, update=update
    )


def told(row):
    """Another hint for each row, and none for some."""
    return f"It is {row['answer']}." if row["answer"] > "7" else None


def rendered(tokenizer, row, hint):
    """The prompt by the chat template alone."""
    system = task().system + (f"\n{hint}" if hint else "")
    messages = [{"role": "system", "content": system}]
    for question, response in task().examples:
        messages += [{"role": "user", "content": question}]
        messages += [{"role": "assistant", "content": response}]
    messages += [{"role": "user", "content": row["question"]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text + task().prefill)["input_ids"]


def logprobs_behind(model, prompt, completion, temperature):
    """Of the completion's tokens, one row through the whole model."""
    ids = torch.tensor([prompt + completion], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)


@pytest.mark.parametrize("hint", [HINT, told], ids=["a text", "by row"])
@pytest.mark.parametrize("seams", ["plain", "fast"])
def test_loss_and_gradient_are_those_of_weighted_tokens_behind_the_plain_prompt(
    tmp_path, hint, seams
):
    """min(p(token | prompt) / p(token | prompt with the hint), cap), in torch alone, a completion at a time."""
    cap, temperature, numbers = 1.001, 0.8, {}
    trainer = trainer_of(
        tmp_path / "run",
        Hinted(hint),
        seams=seams,
        steps=1,
        temperature=temperature,
        importance_sampling_cap=cap,
        max_grad_norm=1e9,
    )
    inner = trainer.update.gradients

    def spy(model, batch, loss, temperature, backward):
        numbers["loss"] = inner(model, batch, loss, temperature, backward)
        numbers["batch"] = batch
        numbers["gradients"] = [p.grad.clone() for p in trainer.trained.values()]
        return numbers["loss"]

    trainer.update.gradients = spy
    trainer.train()

    model, tokenizer = few_words.policy()
    batch = numbers["batch"]
    rewards = torch.tensor(batch.rewards).view(2, 4)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    assert advantages.abs().max() > 0
    weighted, uncapped = [], []
    for row, ids, advantage in zip(batch.rows, batch.completion_ids, advantages, strict=True):
        words = hint(row) if callable(hint) else hint
        plain = logprobs_behind(model, rendered(tokenizer, row, None), ids, temperature)
        hinted = logprobs_behind(model, rendered(tokenizer, row, words), ids, temperature)
        ratio = (plain - hinted).exp().detach()
        uncapped += ratio.tolist()
        weighted.append(-advantage * ratio.clamp(max=cap) * (plain - plain.detach()).exp())
    loss = torch.cat(weighted).sum() / len(uncapped)
    gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)

    assert numbers["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    for gradient, own in zip(numbers["gradients"], gradients, strict=True):
        torch.testing.assert_close(gradient, own, rtol=1e-3, atol=1e-6)
    row = record(trainer.folder)[0][0]
    capped = sum(ratio > cap for ratio in uncapped) / len(uncapped)
    assert row["rollout/capped"] == pytest.approx(capped) and 0 < capped < 1
    assert row["hint/tokens"] > 0


def test_no_hint_changes_nothing(tmp_path):
    plain = trainer_of(tmp_path / "plain", None)
    without = trainer_of(tmp_path / "without", Hinted(lambda row: None))
    hinted = trainer_of(tmp_path / "hinted", Hinted(HINT))
    for trainer in (plain, without, hinted):
        trainer.train()
    assert same(weights(plain), weights(without))
    assert not same(weights(plain), weights(hinted))


def test_only_training_samples_read_the_hint(tmp_path, monkeypatch):
    prompts, inner = [], RolloutEngine.generate

    def spy(self, prompt_ids, *arguments, **options):
        prompts.append({tokenizer.decode(ids) for ids in prompt_ids})
        return inner(self, prompt_ids, *arguments, **options)

    monkeypatch.setattr(RolloutEngine, "generate", spy)
    model, tokenizer = few_words.policy()
    trainer = kit.GRPOTrainer(
        model,
        task(),
        Config(**(SMALL | {"steps": 2, "importance_sampling_cap": 2.0})),
        tokenizer=tokenizer,
        folder=tmp_path / "run",
        held_out=kit.HeldOut(task(), rows=4, every=1),
        sample=Hinted(told),
        live=None,
    )
    trainer.train()
    held_out = {row["question"] for row in task().held_out}
    evaluated = [texts for texts in prompts if any(q in min(texts) for q in held_out)]
    sampled = [texts for texts in prompts if texts not in evaluated]
    assert len(evaluated) == 3 and not any("It is" in text for text in set.union(*evaluated))
    assert any("It is" in text for text in set.union(*sampled))
    table = read_completions(trainer.folder)
    assert not table["prompt"].str.contains("It is").any()
    hints = [told({"answer": answer}) or "" for answer in table["answer"]]
    assert table["hint"].tolist() == hints and {"", *hints} > {""}


def test_a_run_goes_on_with_its_hint_alone(tmp_path):
    whole = trainer_of(tmp_path / "whole", Hinted(told))
    whole.train()
    trainer_of(tmp_path / "run", Hinted(told), steps=2, save_steps=2).train()
    assert run_settings(tmp_path / "run")["sample"] == repr(Hinted(told))
    others = [Hinted(HINT), Hinted(lambda row: row["answer"]), None]
    for other in others:
        with pytest.raises(RunFolderError, match=r"(?s)sample: .Hinted\(told, code .*, now "):
            trainer_of(tmp_path / "run", other).train(resume=True)
    again = trainer_of(tmp_path / "run", Hinted(told))
    again.train(resume=True)
    assert same(weights(whole), weights(again))
    assert record(again.folder)[1] == record(whole.folder)[1]


def test_a_hint_needs_a_cap(tmp_path):
    trainer = trainer_of(tmp_path / "run", Hinted(HINT), importance_sampling_cap=None)
    with pytest.raises(
        ValueError, match="importance_sampling_cap=None: a hint samples another"
    ):
        trainer.train()
    trainer.change(importance_sampling_cap=2.0)
    trainer.train()
    assert trainer.step == SMALL["steps"]


@pytest.mark.parametrize("hint", [3, " ", None])
def test_a_hint_is_a_text(hint):
    with pytest.raises(ValueError, match=f"hint={hint!r} must be a text, or"):
        Hinted(hint)


def test_a_rows_hint_is_a_text(tmp_path):
    with pytest.raises(ValueError, match=r"hint\(row\)=7 must be a text"):
        trainer_of(tmp_path / "run", Hinted(lambda row: 7)).train()


def test_a_task_that_writes_its_own_prompts_is_refused(tmp_path):
    model, tokenizer = few_words.policy()
    config = Config(**(SMALL | {"importance_sampling_cap": 2.0}))
    trainer = Loop(
        model,
        kit.episodes.grid(8, 2),
        config,
        tokenizer=tokenizer,
        folder=tmp_path / "run",
        sample=Hinted(HINT),
    )
    with pytest.raises(
        ValueError, match="writes its prompts itself; Hinted takes a tasks.Task"
    ):
        trainer.train()
