"""The schedule reaches the sampler, the policy's and the reference's log-probabilities; plain TRL's does not."""

import pytest
import torch
from tiny_run import data, make
from transformers import TrainerCallback

from grpo_kit.training.trainer import GRPOTrainer

START, END = 2.0, 0.5


def schedule(progress):
    return START + (END - START) * progress


class NaiveSchedule(TrainerCallback):
    """What people write with plain TRL: set the attributes and hope."""

    def on_step_begin(self, args, state, control, **kwargs):
        args.temperature = self.trainer.temperature = schedule(state.global_step / (state.max_steps - 1))


def spy(trainer, expected):
    """Record, at every rollout, how far sampler and log-probabilities are from the expected temperature."""
    seen = {"sampler": [], "policy": [], "reference": [], "clip": [], "eval": []}
    inner_generate, inner_score = trainer._generate_single_turn, trainer._generate_and_score_completions
    sampled_at = []

    def generate(*args, **kwargs):
        sampled_at.append(trainer.generation_config.temperature)
        return inner_generate(*args, **kwargs)

    def independent(model, batch, temperature, **context):
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        width, training = batch["completion_ids"].size(1), model.training
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1] / temperature
        model.train(training)
        return logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]

    def policy_scores(batch):
        """What the trainer scores, and what the kit's engine says it sampled with."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        with torch.no_grad():
            yield trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, batch["completion_ids"].size(1)
            )[0]
        if "sampling_per_token_logps" in batch:
            yield batch["sampling_per_token_logps"]

    def score(inputs):
        training = trainer.model.training
        batch = inner_score(inputs)
        if not training:
            seen["eval"].append(sampled_at[-1])
            return batch
        temperature = expected(trainer.state.global_step)
        seen["sampler"].append(abs(sampled_at[-1] - temperature))
        policy = independent(trainer.model, batch, temperature)
        for scored in policy_scores(batch):
            seen["policy"].append((policy - scored).mul(batch["completion_mask"]).abs().max().item())
        if trainer.ref_model is not None:
            reference = independent(trainer.ref_model, batch, temperature)
        else:
            with trainer.model.disable_adapter():
                reference = independent(trainer.model, batch, temperature)
        seen["reference"].append((reference - batch["ref_per_token_logps"]).abs().max().item())
        return batch

    trainer._generate_single_turn, trainer._generate_and_score_completions = generate, score
    return seen


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("which", ["plain", "kit"])
def test_schedule_reaches_everything(which, tuning, tmp_path):
    steps, buffer = 6, 2
    model = None
    if tuning == "full":
        from grpo_kit.models import load_policy

        model, tokenizer = load_policy("tiny-random", quiet=True)
        model.save_pretrained(tmp_path / "model")  # plain TRL reloads the reference from a path
        model = type(model).from_pretrained(tmp_path / "model")
    trainer = make(
        which,
        tmp_path / "run",
        tuning=tuning,
        model=model,
        max_steps=steps,
        num_iterations=buffer,
        beta=0.1,
        temperature=START,
        eval_strategy="steps",
        eval_steps=3,  # in the middle of a buffer
        per_device_eval_batch_size=4,
        eval_dataset=data(2),
        kit={"temperature": schedule, "eval_temperature": 1.0},
    )

    if which == "plain":
        naive = NaiveSchedule()
        naive.trainer = trainer
        trainer.add_callback(naive)
    seen = spy(trainer, lambda step: schedule(step // buffer * buffer / (steps - buffer)))
    trainer.train()

    assert len(seen["reference"]) == steps // buffer  # rollouts were reused, as num_iterations says
    worst = {k: max(v) for k, v in seen.items() if k in ("sampler", "policy", "reference")}
    clipped = [row.get("clip_ratio/region_mean", 0) for row in trainer.state.log_history if "loss" in row]
    if which == "kit":
        assert worst["sampler"] == 0
        assert worst["policy"] < 1e-4 and worst["reference"] < 1e-4
        assert set(seen["eval"]) == {1.0}
        assert [round(r["temperature"], 6) for r in trainer.state.log_history if "temperature" in r] == [
            2.0,
            1.25,
            0.5,
        ]
        assert clipped[0] == 0  # first pass over fresh rollouts: the ratio is 1
    else:
        assert worst["policy"] > 0.05 or worst["sampler"] > 0.1


def test_schedule_is_exact_at_both_ends(tmp_path):
    trainer = make("kit", tmp_path, max_steps=5, kit={"temperature": schedule})
    trainer.state.max_steps = 5
    assert trainer.temperatures.at(0) == START
    assert trainer.temperatures.at(4) == END


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_refuses_a_schedule_that_is_not_positive(bad, tmp_path):
    with pytest.raises(ValueError, match="temperature.*above 0"):
        make("kit", tmp_path, kit={"temperature": lambda progress: 1.0 if progress < 1 else bad})


def test_eval_temperature_comes_back_after_an_error(tmp_path):
    def broken(completions, **columns):
        raise RuntimeError("no")

    trainer = make(
        "kit", tmp_path, rewards=broken, per_device_eval_batch_size=4, kit={"eval_temperature": 0.25}
    )
    assert isinstance(trainer, GRPOTrainer)
    with pytest.raises(ValueError):
        trainer.evaluate(data(2))
    assert trainer.temperature == 1.0 and trainer.generation_config.temperature == 1.0
