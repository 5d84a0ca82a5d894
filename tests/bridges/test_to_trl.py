"""to_trl: a task of the kit under trl's own trainer."""

import copy
import dataclasses

import few_words
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from grpo_kit._support.unsloth import changed_defaults
from grpo_kit.loop import Config
from grpo_kit.more.bridges import to_trl
from grpo_kit.schedules import linear
from grpo_kit.tasks import largest


def letters(completions, **columns):
    """Share of letters: differs inside a group of random text."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def task_of_two():
    """largest, with a reward that a random model earns differently each time."""
    task = largest()
    return dataclasses.replace(
        task, rewards=[task.rewards[0], letters], reward_weights=[0.75, 0.25]
    )


def made(folder, config, **overrides):
    model, tokenizer = few_words.policy()
    return to_trl(
        task_of_two(),
        config,
        model,
        tokenizer,
        folder,
        use_cpu=True,
        disable_tqdm=True,
        **overrides,
    )


def test_a_task_trains_there(tmp_path, capsys):
    config = Config(
        steps=2, prompts_per_step=2, group_size=4, temperature=linear(1.2, 0.6), learning_rate=1e-3, warmup=0,
        micro_batch=4, dynamic_sampling=1,
    )  # fmt: skip
    trainer = made(tmp_path, config)
    printed = capsys.readouterr().out
    assert (
        "temperature=linear(start=1.2, end=0.6)" in printed and "dynamic_sampling=1" in printed
    )
    task = task_of_two()
    assert type(trainer) is GRPOTrainer
    assert trainer.args.gradient_accumulation_steps == 2 and trainer.temperature == 1.2
    assert trainer.reward_weights.tolist() == pytest.approx(task.reward_weights)
    assert trainer.train_dataset[0]["prompt"].endswith(task.prefill)
    seen = []
    trainer.reward_funcs = [_watched(reward, seen) for reward in trainer.reward_funcs]
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == 2
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert {one["prefill"][0] for one in seen} == {task.prefill} and "answer" in seen[0]
    names = [name for name in trainer.state.log_history[0] if name.startswith("rewards/")]
    assert {"rewards/exact_answer/mean", "rewards/letters/mean"} <= set(names)


def _watched(reward, seen):
    def watched(**columns):
        seen.append(columns)
        return reward(**columns)

    return watched


def test_overrides_stand_before_the_configs(tmp_path):
    trainer = made(
        tmp_path, Config(reward_weights=[1.0, 0.0]), per_device_train_batch_size=16, temperature=0.5, top_k=3,
        callbacks=[],
    )  # fmt: skip
    assert (
        trainer.args.per_device_train_batch_size,
        trainer.args.gradient_accumulation_steps,
    ) == (16, 4)
    assert (trainer.temperature, trainer.args.top_k) == (0.5, 3)
    assert trainer.reward_weights.tolist() == [1.0, 0.0]


@dataclasses.dataclass
class UnslothsConfig(GRPOConfig):
    """As Unsloth makes it: a subclass of the same name, with an __init__ of its own defaults."""

    def __init__(
        self,
        output_dir=None,
        weight_decay=0.001,
        seed=3407,
        repetition_penalty=1.1,
        chunks=-1,
        **rest,
    ):
        given = {
            "weight_decay": weight_decay,
            "seed": seed,
            "repetition_penalty": repetition_penalty,
        }
        super().__init__(output_dir, **given, **rest)


UnslothsConfig.__name__ = "GRPOConfig"


def test_defaults_that_unsloth_changed_are_trls_again(tmp_path, monkeypatch):
    assert changed_defaults(GRPOConfig) == {}
    own = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    names = ("weight_decay", "seed", "repetition_penalty")
    assert changed_defaults(UnslothsConfig) == {name: getattr(own, name) for name in names}
    monkeypatch.setattr("grpo_kit.more.bridges.trl.GRPOConfig", UnslothsConfig)
    monkeypatch.setattr(
        "grpo_kit.more.bridges.trl.fields_of",
        lambda *given: ({"seed": 5, "num_generations": 4}, []),
    )
    args = made(tmp_path, Config(), weight_decay=0.1).args
    assert type(args) is UnslothsConfig and (args.weight_decay, args.seed) == (0.1, 5)
    assert args.repetition_penalty == own.repetition_penalty == 1.0


def test_a_model_may_be_given_by_its_name_so_that_it_is_divided_as_it_is_loaded(tmp_path):
    model, tokenizer = few_words.policy()
    model.save_pretrained(tmp_path / "model")
    config = Config(steps=1, prompts_per_step=2, group_size=2)
    how = {"use_cpu": True, "disable_tqdm": True}
    trainer = to_trl(
        task_of_two(), config, str(tmp_path / "model"), tokenizer, tmp_path / "run", **how
    )
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("token", ["<answer>", "</answer>", "answer>", "</"])
def test_tags_that_are_special_tokens_are_refused(token, tmp_path):
    """TRL takes every special token out of completions, so that no reward would see the tags."""
    model, tokenizer = few_words.policy()
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens([token], special_tokens=True)
    with pytest.raises(ValueError, match=f"special token '{token}', which TRL takes out"):
        to_trl(task_of_two(), Config(), model, tokenizer, tmp_path / "run")


def test_a_task_of_episodes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="one turn"):
        to_trl(
            dataclasses.make_dataclass("Episodes", ["name", "train"])("walk", []),
            Config(),
            None,
            None,
            tmp_path,
        )
