"""Data and rewards in every form that trl takes: they work, or are refused before any training in words."""

import json

import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from tiny_run import data, letters, make
from transformers import LlamaForSequenceClassification

from grpo_kit.models import load_policy
from grpo_kit.rewards import RewardError, WeightedSum
from grpo_kit.training.trainer import GRPOTrainer
from grpo_kit.watch.red_flag import Setup

ROWS = [{"prompt": f"Say {i}:", "answer": str(i)} for i in range(8)]


def chat(*words):
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in words]})


def chat_letters(completions, **columns):
    return letters([c[-1]["content"] for c in completions])


def asks_for_answer(completions, answer, **columns):
    return letters(completions)


def only_completions(completions):
    return letters(completions)


class Scorer:
    def __call__(self, completions, answer):
        return letters(completions)


async def later(completions, prompts):
    return letters(completions)


class Classifier:
    def predict(self, texts):
        return [1.0] * len(texts)


def reward_model():
    config = load_policy("tiny-random", quiet=True)[0].config
    config = type(config)(**{**config.to_dict(), "num_labels": 1, "_name_or_path": ""})
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_dataset": Dataset.from_dict({"prompt": []})}, "eval_dataset is empty"),
        ({"eval_dataset": Dataset.from_dict({"question": ["a"]})}, "eval_dataset has columns .* no 'prompt'"),
        (
            {"eval_dataset": Dataset.from_dict({"prompt": ["a"]}), "rewards": asks_for_answer},
            "'asks_for_answer' asks for the column.*answer.*which eval_dataset does not have",
        ),
        (
            {"eval_dataset": {"easy": data(2), "hard": Dataset.from_dict({"prompt": ["word " * 1020]})}},
            r"eval_dataset\['hard'\] row 0: its prompt has .* context of 1024",
        ),
        (
            {"dataset": chat("short", "word " * 1020), "rewards": chat_letters},
            "train_dataset row 1: its prompt has .* context of 1024",
        ),
        ({"dataset": []}, "train_dataset is a list without rows"),
        ({"dataset": [{"prompt": "a"}, "b"]}, r"train_dataset\[1\] is a str"),
        ({"dataset": pd.DataFrame(ROWS)}, "train_dataset is a DataFrame.*Dataset.from_pandas"),
        ({"dataset": DatasetDict(train=data())}, r"train_dataset is a DatasetDict of \['train'\].*data\['train'\]"),
        ({"rewards": only_completions}, r"'only_completions' has the parameters \(completions\).*add \*\*columns"),
        ({"rewards": Scorer()}, r"'Scorer' has the parameters \(completions, answer\)"),
        ({"rewards": later}, r"'later' has the parameters \(completions, prompts\)"),
        ({"rewards": [letters, Classifier()]}, r"reward_funcs\[1\] is a Classifier, which cannot be called"),
        ({"rewards": reward_model}, r"reward_funcs\[0\] is a LlamaForSequenceClassification .*reward_processing"),
    ],
)  # fmt: skip
def test_refused_before_training(options, message, tmp_path):
    if options.get("rewards") is reward_model:
        options = {"rewards": reward_model()}
    with pytest.raises(ValueError, match=message):
        make("kit", tmp_path, **options)


def test_what_evaluate_is_given_is_checked_too(tmp_path):
    trainer = make("kit", tmp_path)
    with pytest.raises(ValueError, match="eval_dataset row 1: its prompt has"):
        trainer.evaluate(Dataset.from_dict({"prompt": ["short", "word " * 1020]}))


def test_a_list_of_dicts_is_a_data_set(tmp_path):
    trainer = make(
        "kit", tmp_path, dataset=ROWS, rewards=asks_for_answer, eval_dataset={"a": ROWS}, max_steps=1
    )
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.evaluate(ROWS[:2])["eval_reward"] >= 0


def test_what_cannot_be_counted_is_checked_for_its_columns(tmp_path):
    stream = data().to_iterable_dataset()
    assert isinstance(stream, IterableDataset)
    make("kit", tmp_path / "a", dataset=stream, rewards=asks_for_answer)
    with pytest.raises(ValueError, match="train_dataset does not have"):
        make("kit", tmp_path / "b", dataset=stream.remove_columns("answer"), rewards=asks_for_answer)


def test_a_reward_model_scores_with_the_tokenizer_it_is_given(tmp_path):
    tokenizer = load_policy("tiny-random", quiet=True)[1]
    model = reward_model()
    model.config._name_or_path = "scorer"  # its name in metrics
    options = {"reward_processing_classes": [tokenizer]}
    trainer = make("kit", tmp_path, rewards=model, trl=options, max_steps=1)
    trainer.train()
    assert "rewards/scorer/mean" in trainer.state.log_history[0]


@pytest.mark.parametrize("bias, said", [(5.0, True), (float("inf"), False)])
def test_a_reward_model_keeps_its_own_scale_which_is_said_once(bias, said, tmp_path, capsys):
    tokenizer = load_policy("tiny-random", quiet=True)[1]
    model = reward_model()
    model.config._name_or_path = "scorer"
    model.score.register_forward_hook(lambda module, given, scores: scores + bias)
    options = {"reward_processing_classes": [tokenizer]}
    trainer = make("kit", tmp_path, rewards=model, trl=options, max_steps=2)
    if said:
        trainer.train()
        assert capsys.readouterr().out.count("reward 'scorer' gave ") == 1
    else:
        with pytest.raises(RewardError, match="'scorer' gave inf in row 0, .*use a finite number"):
            trainer.train()


def test_ranges_that_rewards_and_their_parts_state_are_written_down(tmp_path, capsys):
    """Flags go by them; the sum, which states none, is said."""

    def points(completions, **columns):
        return [3.0 if i % 2 else -1.0 for i, _ in enumerate(completions)]

    points.range = (-1, 3)
    make("kit", tmp_path, rewards=[letters, WeightedSum({points: 1.0})], max_steps=1).train()
    config = json.loads((tmp_path / "run.json").read_text())
    assert config["reward_ranges"] == {"points": [-1.0, 3.0]}
    assert Setup.of(config).ranges == {"points": (-1.0, 3.0)}
    assert "reward 'weighted_sum' gave -1 (row 0; so far -1 to 3)" in capsys.readouterr().out


def test_no_args_at_all_train_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = load_policy("tiny-random", quiet=True)
    trainer = GRPOTrainer(model, letters, train_dataset=data(), processing_class=tokenizer)
    assert trainer.args.output_dir == "runs/grpo"
    assert trainer.args.bf16 == torch.cuda.is_available()
