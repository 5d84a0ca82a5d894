"""Schedules reach everything: the sampler, the policy's and the reference's log-probabilities, the learning rate."""

import copy

import pytest
import torch
from loop_runs import make, record, same, weights

from grpo_kit.engine.optim.split_adamw import SplitAdamW8bit
from grpo_kit.loop import Config
from grpo_kit.loop.protocols import Hook
from grpo_kit.models import load_policy
from grpo_kit.record.files import run_settings


def schedule(progress):
    return 2.0 - 1.5 * progress


def logprobs_of(model, prompt, completion, temperature):
    """By one plain forward without padding."""
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([[*prompt, *completion]])).logits[
            0, len(prompt) - 1 : -1
        ]
    return (
        (logits / temperature)
        .log_softmax(-1)
        .gather(1, torch.tensor(completion)[:, None])[:, 0]
    )


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("seams", ["fast", "plain"])
def test_a_schedule_reaches_sampler_policy_and_reference(seams, tuning, tmp_path):
    apart = {"sampler": [], "policy": [], "reference": []}

    class Compare(Hook):
        def begin(self, trainer):
            self.start = copy.deepcopy(trainer.model)

        def before_step(self, trainer):
            self.model = copy.deepcopy(trainer.model)

        def after_step(self, trainer, row, batch):
            temperature = schedule((trainer.step - 1) / 3)
            assert row["temperature"] == pytest.approx(temperature)
            for i, (prompt, ids) in enumerate(
                zip(batch.prompt_ids, batch.completion_ids, strict=True)
            ):
                policy = logprobs_of(self.model, prompt, ids, temperature)
                found = {"policy": batch.old_logprobs[i][: len(ids)]}
                found["reference"] = batch.ref_logprobs[i][: len(ids)]
                if batch.sampler_logprobs is not None:
                    found["sampler"] = torch.tensor(batch.sampler_logprobs[i])
                for name, values in found.items():
                    wanted = (
                        logprobs_of(self.start, prompt, ids, temperature)
                        if name == "reference"
                        else policy
                    )
                    scored = (
                        torch.tensor([1.0]) if any(batch.advantages) else torch.tensor([0.0])
                    )
                    apart[name].append(((values - wanted).abs() * scored).max().item())

    options = {"temperature": schedule, "beta": 0.1, "iterations": 2, "learning_rate": 1e-3}
    trainer = make(tmp_path / "run", tuning=tuning, seams=seams, hooks=[Compare()], **options)
    trainer.train()
    assert len(apart["reference"]) == 32 and len(apart["sampler"]) == (
        32 if seams == "fast" else 0
    )
    assert max(sum(apart.values(), [])) < 1e-4
    assert [line["temperature"] for line in record(trainer.folder)[1][::8]] == pytest.approx(
        [2.0, 1.5, 1.0, 0.5]
    )


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_a_schedule_that_is_not_positive_is_refused(bad):
    with pytest.raises(ValueError, match="temperature.*above 0"):
        Config(temperature=lambda progress: 1.0 if progress < 1 else bad)


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_sampler_and_update_agree_and_the_gap_is_on_record(tuning, tmp_path):
    """Under top_k and a repetition penalty too: the whole distribution is scored, cut off or not."""
    options = {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.3}
    trainer = make(tmp_path / "run", tuning=tuning, seams="fast", **options)
    trainer.train()
    assert max(row["rollout/logprob_gap"] for row in record(trainer.folder)[0]) < 1e-5


@pytest.mark.parametrize(
    ("warmup", "rates"),
    [(2, [1 / 3, 2 / 3, 1, 1]), (0, [1, 1, 1, 1]), (0.25, [1 / 3, 2 / 3, 1, 1])],
)
def test_the_warmup_begins_above_zero(warmup, rates):
    config = Config(steps=4, warmup=warmup, learning_rate=1.0)
    assert [config.at(step).learning_rate for step in range(4)] == pytest.approx(rates)
    falling = Config(steps=4, warmup=warmup, learning_rate=lambda progress: 1 - progress / 2)
    wanted = [rate * (1 - step / 6) for step, rate in enumerate(rates)]
    assert [falling.at(step).learning_rate for step in range(4)] == pytest.approx(wanted)


def test_a_run_of_one_step_trains(tmp_path):
    trainer = make(tmp_path / "run", steps=1, warmup=0.1)
    before = weights(trainer)
    trainer.train()
    assert not same(before, {name: weights(trainer)[name] for name in before})


def test_the_run_says_which_optimizer_its_weights_have(tmp_path):
    for tuning in ("full", "lora"):
        trainer = make(tmp_path / tuning, tuning=tuning, steps=1)
        trainer.train()
        assert type(trainer.optimizer) is torch.optim.AdamW
        assert run_settings(trainer.folder)["optimizer"] == "adamw"
    model = load_policy("tiny-random", dtype="bfloat16", quiet=True)[0]
    trainer = make(tmp_path / "narrow", model=model, learning_rate=1e-6, steps=3)
    before = {name: p.detach().clone() for name, p in trainer.trained.items()}
    trainer.train()
    assert type(trainer.optimizer) is SplitAdamW8bit and {
        p.dtype for p in trainer.trained.values()
    } == {torch.bfloat16}
    master = {name: trainer.optimizer.master(p) for name, p in trainer.trained.items()}
    assert any((master[n] - before[n].float()).abs().max() > 1e-7 for n in before)
