"""What trl documents of its trainer holds for the kit's too: each run by both, a tiny model, and compared."""

import json

import pytest
from datasets import Dataset
from tiny_run import data, difference, letters, make, weights
from transformers import EarlyStoppingCallback
from trl_runs import CALL, FOUR, QWEN, Counter, add, assert_alike, both, reward_model, scripted

from grpo_kit.models import load_policy
from grpo_kit.record.files import read_completions, read_metrics

CHAT = [[{"role": "user", "content": f"1 + {i}?"}] for i in range(8)]
TALK = Dataset.from_dict({"prompt": CHAT, "answer": [str(i) for i in range(8)]})


def of_messages(completions, **columns):
    return letters([c[-1]["content"] for c in completions])


async def later(completions, **columns):
    return letters([c if isinstance(c, str) else c[-1]["content"] for c in completions])


def turns(completions, **columns):
    """More messages, more reward: runs with and without a call differ."""
    return [len(c) / 10 for c in completions]


def on_disk(tmp_path):
    model, tokenizer = load_policy("tiny-random", quiet=True)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dataset": TALK, "rewards": of_messages},
        {"dataset": data().to_iterable_dataset()},
        {"rewards": later},
        {"rewards": [letters, later], "reward_weights": [0.25, 0.75]},
        {"dataset": TALK, "rewards": [of_messages, later]},
        {"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 2},
        {"scale_rewards": "batch", "loss_type": "dr_grpo"},
        {"log_completions": True},
    ],
    ids=["strings", "messages", "a stream", "async", "sync and async", "async chat", "reuse", "batch scale", "logs"],
)  # fmt: skip
def test_runs_alike(options, tmp_path):
    assert_alike(both(tmp_path, max_steps=2, **options))


def test_a_reward_model_and_a_function(tmp_path):
    folder = reward_model(tmp_path / "scorer")
    assert_alike(both(tmp_path, max_steps=2, rewards=[folder, letters]))


def test_tools(tmp_path):
    calls = scripted(lambda row: CALL if row % 2 else "no<|im_end|>", lambda row: "3<|im_end|>")
    options = {"chat_template": QWEN, "dataset": TALK, "rewards": turns, "max_completion_length": 80}
    trainers = both(tmp_path, before=calls, trl={"tools": [add]}, max_steps=1, **options)
    assert_alike(trainers)
    assert trainers["kit"].state.log_history[0]["tools/call_frequency"] == 0.5
    table = read_completions(tmp_path / "kit")
    assert all("<tool_response>\n3\n</tool_response>" in text for text in table["completion"][1::2])
    assert all(
        text.startswith("<tool_call>") and text.endswith("3<|im_end|>") for text in table["completion"][1::2]
    )
    assert set(table["completion"][::2]) == {"no"}
    assert all("<|im_start|>user\n1 + " in prompt and "# Tools" in prompt for prompt in table["prompt"])


def test_an_environment_may_be_the_only_reward(tmp_path):
    trainer = make(
        "kit", tmp_path, chat_template=QWEN, dataset=TALK, rewards=[], trl={"environment_factory": Counter},
        max_completion_length=80, max_steps=1, **FOUR,
    )  # fmt: skip
    scripted(lambda row: CALL if row % 2 else "no<|im_end|>", lambda row: "3<|im_end|>")(trainer)
    trainer.train()
    assert read_completions(tmp_path)["reward"].tolist() == [0.0, 1.0] * 2


@pytest.mark.parametrize(
    ("dataset", "environment"),
    [
        (TALK.add_column("environment", ["counter"] * 8), {"counter": Counter}),
        (Dataset.from_dict({"start": list(range(8))}), Counter),
        (None, Counter),
    ],
    ids=["by name", "no prompt column", "no data"],
)
def test_environments(dataset, environment, tmp_path):
    def also_asks(completions, environments, **columns):
        return [e.total / 6 for e in environments]

    calls = scripted(lambda row: CALL if row % 2 else "no<|im_end|>", lambda row: "3<|im_end|>")

    def run(which):
        trainer = make(
            which, tmp_path / which, chat_template=QWEN, dataset="no data" if dataset is None else dataset,
            rewards=also_asks, trl={"environment_factory": environment}, max_completion_length=80, max_steps=1,
            **FOUR,
        )  # fmt: skip
        calls(trainer)
        trainer.train()
        return trainer

    trainers = {which: run(which) for which in ("plain", "kit")}
    assert_alike(trainers)
    assert trainers["kit"].state.log_history[0]["rewards/Counter/mean"] == 0.5
    table = read_completions(tmp_path / "kit")
    assert table["reward/Counter"].tolist() == [0.0, 1.0] * 2
    assert all("start" in prompt and prompt.startswith("<|im_start|>") for prompt in table["prompt"])


def test_a_rollout_func_s_fields_reach_the_rewards(tmp_path):
    def rollout(prompts, trainer):
        ids = trainer._tokenizer(prompts)["input_ids"]
        written = [[100 + row, 101, trainer._tokenizer.eos_token_id] for row in range(len(prompts))]
        fields = {"steps_taken": [row / 8 for row in range(len(prompts))]}
        return {
            "prompt_ids": ids,
            "completion_ids": written,
            "logprobs": [[-10.0] * 3] * len(prompts),
            **fields,
        }

    def by_steps(completions, steps_taken, **columns):
        return list(steps_taken)

    trainers = both(tmp_path, rewards=by_steps, trl={"rollout_func": rollout}, max_steps=2)
    assert_alike(trainers)
    assert read_completions(tmp_path / "kit")["reward"].tolist() == [row / 8 for row in range(4)] * 2


@pytest.mark.parametrize("form", ["one", "dict", "stream"])
def test_evaluation_while_training(form, tmp_path):
    held_out = {
        "one": data(2),
        "dict": {"a": data(2), "b": data(3)},
        "stream": data(2).to_iterable_dataset(),
    }[form]
    more = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2, "max_steps": 2}
    # The kit's evaluations draw from random numbers of their own, and move no later step.
    assert_alike(both(tmp_path, eval_dataset=held_out, **more), numbers=False)


@pytest.mark.parametrize("given", ["its own", "another", "a dict", "by name"])
def test_evaluate_alone(given, tmp_path):
    own = {"a": data(2), "b": data(3)} if given == "by name" else data(2)
    asked = {"its own": None, "another": data(2), "a dict": {"x": data(2)}, "by name": "b"}[given]
    results = {}
    for which in ("plain", "kit"):
        trainer = make(
            which, tmp_path / which, eval_dataset=own, per_device_eval_batch_size=2, **FOUR,
            **({"kit": {"rollout": "hf"}} if which == "kit" else {}),
        )  # fmt: skip
        results[which] = trainer.evaluate(asked)
    assert set(results["plain"]) <= set(results["kit"])
    rewards = [name for name in results["plain"] if name.endswith("reward")]
    assert rewards and all(results["kit"][n] == pytest.approx(results["plain"][n], rel=1e-3) for n in rewards)


def test_sync_ref_model(tmp_path):
    """The reference follows the policy by the same steps; it is a copy of the model that was passed."""
    path = on_disk(tmp_path)
    more = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    model = lambda: load_policy(path, quiet=True)[0]  # noqa: E731
    trainers = both(tmp_path, model=model, max_steps=2, **more)
    assert_alike(trainers)
    references = [dict(t.ref_model.named_parameters()) for t in trainers.values()]
    assert difference(*references) < 1e-4
    start = dict(load_policy(path, quiet=True)[0].named_parameters())
    assert difference(start, references[1]) > 1e-4


def test_early_stopping_and_the_best_model_at_the_end(tmp_path):
    def worse_and_worse(completions, trainer_state, **columns):
        return [1 / (1 + trainer_state.global_step) - (i % 2) / 8 for i, _ in enumerate(completions)]

    trainers = both(
        tmp_path, rewards=worse_and_worse, eval_dataset=data(2), per_device_eval_batch_size=2, max_steps=6,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="eval_reward", greater_is_better=True,
        trl={"callbacks": [EarlyStoppingCallback(early_stopping_patience=2)]},
    )  # fmt: skip
    assert_alike(trainers, numbers=False)
    for which, trainer in trainers.items():
        assert trainer.state.global_step == 3, which
        assert trainer.state.best_model_checkpoint == str(tmp_path / which / "checkpoint-1")
    assert difference(weights(trainers["plain"]), weights(trainers["kit"])) < 1e-4
    assert read_metrics(tmp_path / "kit")["step"].tolist() == [1, 2, 3]
    assert json.loads((tmp_path / "kit" / "run.json").read_text())["args"]["load_best_model_at_end"]
