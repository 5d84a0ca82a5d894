"""Bad data, rewards and settings: a clear error before any training, or nothing lost."""

import dataclasses
import warnings

import pytest
import torch
from datasets import Dataset
from tiny_run import data, interrupted_once, letters, make, same, weights

from grpo_kit.record.files import read_completions, read_metrics
from grpo_kit.record.run_folder import RunFolder
from grpo_kit.rewards import Gated, SoftFormat, WeightedSum
from grpo_kit.rewards.parts import required_columns
from grpo_kit.rewards.scoring import RewardError, score
from grpo_kit.tasks import from_rows


def asks_for_answer(completions, answer, **columns):
    return [1.0] * len(completions)


def named_letters(completions, **columns):
    return [0.5] * len(completions)


named_letters.__name__ = "letters"  # another reward of the same name
half = SoftFormat()


@pytest.mark.parametrize(
    ("dataset", "rewards", "message"),
    [
        (Dataset.from_dict({"prompt": []}), letters, "train_dataset is empty"),
        (data(1), letters, "has 1 prompts, but one step needs 2"),
        (Dataset.from_dict({"question": ["a"] * 4}), letters, "no 'prompt'"),
        (
            Dataset.from_dict({"prompt": ["a", "b", "c"]}),
            asks_for_answer,
            "'asks_for_answer' asks for the column.*answer",
        ),
        (
            data(4),
            [Gated(letters, on=half), Gated(named_letters, on=half)],
            r"several parts named \['letters'\]",
        ),
        (
            Dataset.from_dict({"prompt": ["short", "word " * 1020]}),
            letters,
            "row 1: its prompt has .* context of 1024",
        ),
        (
            Dataset.from_dict({"prompt": ["short", "\U0001f9d9" * 600]}),
            letters,
            "row 1: its prompt has .* context of 1024",
        ),
    ],
    ids=[
        "empty",
        "too few prompts",
        "no prompt",
        "missing column",
        "parts of the same name",
        "prompt too long",
        "few characters, many tokens",
    ],
)
def test_refused_before_training(dataset, rewards, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make("kit", tmp_path, dataset=dataset, rewards=rewards)
    assert not (tmp_path / "metrics.csv").exists()


def test_plain_trl_trains_no_step_on_too_few_prompts(tmp_path):
    """Why we refuse: it only warns, and ends as if all were well."""
    trainer = make("plain", tmp_path, dataset=data(1))
    trainer.train()
    assert trainer.state.global_step == 0


def raises(completions, **columns):
    if any("boom" in str(c) for c in completions) or columns["trainer_state"].global_step == 2:
        raise KeyError("gold")
    return letters(completions)


def returns_nan(completions, **columns):
    scores = letters(completions)
    return [*scores[:-1], float("nan")] if columns["trainer_state"].global_step == 2 else scores


def too_short(completions, **columns):
    scores = letters(completions)
    return scores[:-3] if columns["trainer_state"].global_step == 2 else scores


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (raises, "'raises' raised KeyError"),
        (returns_nan, "'returns_nan' gave nan in row 7"),
        (too_short, "'too_short' returned 5 scores for 8"),
    ],
)
def test_broken_reward_stops_by_name_after_saving(reward, message, tmp_path):
    trainer = make("kit", tmp_path, rewards=reward)
    with pytest.raises(RewardError, match=message) as error:
        trainer.train()
    assert "row " in str(error.value) and "completion " in str(error.value)
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file()
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 3  # header and the two finished steps


def test_reward_that_breaks_in_an_evaluation_stops_after_saving_too(tmp_path):
    def wrong_on_held_out(completions, held_out=None, **columns):
        if held_out is not None:
            raise KeyError("gold")
        return letters(completions)

    trainer = make(
        "kit",
        tmp_path,
        rewards=wrong_on_held_out,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
        eval_dataset=data(4).add_column("held_out", [True] * 4),
    )
    with pytest.raises(RewardError, match="'wrong_on_held_out' raised KeyError"):
        trainer.train()
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file()


def test_an_extra_column_is_never_an_earlier_batch_s(tmp_path):
    def logs_once(completions, trainer_state, log_extra, **columns):
        if trainer_state.global_step == 0:
            log_extra("note", ["first step"] * len(completions))
        return letters(completions)

    make("kit", tmp_path, rewards=logs_once, max_steps=2).train()
    table = read_completions(tmp_path)
    assert set(table[table.step == 1]["note"]) == {"first step"}
    assert table[table.step == 2]["note"].isna().all()


def test_rows_a_full_disk_held_back_are_written_when_training_goes_on(tmp_path, monkeypatch):
    real, disk = RunFolder._write_lines, {"full": True}

    def write_lines(folder):
        if disk["full"] and folder._lines:
            raise OSError(28, "No space left on device")
        real(folder)

    monkeypatch.setattr(RunFolder, "_write_lines", write_lines)
    trainer = make("kit", tmp_path)
    interrupted_once(trainer, "rollout", at_step=2)
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        trainer.train(on_stop="return")
    disk["full"] = False
    trainer.train(on_stop="return")
    assert read_metrics(tmp_path)["step"].tolist() == [1, 2, 3, 4]


def test_run_goes_on_after_the_reward_is_mended(tmp_path):
    untouched = make("kit", tmp_path / "a")
    untouched.train()
    broken = make("kit", tmp_path / "b", rewards=too_short)
    with pytest.raises(RewardError):
        broken.train()
    mended = make("kit", tmp_path / "b")
    mended.train(resume_from_checkpoint=True)
    assert same(weights(untouched), weights(mended))


def test_plain_trl_trains_on_nan(tmp_path):
    trainer = make("plain", tmp_path, rewards=returns_nan)
    trainer.train()
    assert trainer.state.global_step == 4


def test_the_row_that_raises_is_named():
    with pytest.raises(RewardError, match="row 2, completion 'c'"):
        score(picky, ["a", "b", "c", "d"], prompts=["p"] * 4)


def picky(completions, **columns):
    return [1 / (c != "c") for c in completions]


def test_a_run_that_fails_before_its_first_rollout_is_scored_does_not_block_its_folder(tmp_path):
    with pytest.raises(RewardError):
        make("kit", tmp_path / "run", rewards=picky_about_all).train()
    make("kit", tmp_path / "run", max_steps=1).train()


def picky_about_all(completions, **columns):
    raise RuntimeError("no")


def test_none_is_a_verdict_of_its_own(tmp_path):
    def sometimes(completions, **columns):
        return [None if i % 2 else 1.0 for i, _ in enumerate(completions)]

    trainer = make("kit", tmp_path, rewards=sometimes, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/sometimes/mean"] == 1.0


def test_parts_of_a_weighted_sum_stay_visible(tmp_path):
    def short(completions, **columns):
        return [1 / (1 + len(text)) for text in completions]

    trainer = make("kit", tmp_path, rewards=WeightedSum({letters: 0.75, short: 0.25}), max_steps=2)
    trainer.train()
    metrics, table = read_metrics(tmp_path), read_completions(tmp_path)
    assert {"reward/weighted_sum", "reward/letters", "reward/short"} <= set(metrics.columns)
    first = table[table.step == 1]
    assert first["reward/letters"].mean() == pytest.approx(metrics["reward/letters"][0], abs=1e-6)
    total = 0.75 * first["reward/letters"] + 0.25 * first["reward/short"]
    assert total.tolist() == pytest.approx(first["reward"].tolist(), abs=1e-6)


def test_warmup_is_on_unless_turned_off(tmp_path):
    on = make("kit", tmp_path / "a", max_steps=10, kit={"warmup": 0.2})
    off = make("kit", tmp_path / "b", max_steps=10, kit={"warmup": 0})
    own = make("kit", tmp_path / "c", max_steps=10, warmup_steps=3, kit={"warmup": 0.2})
    assert [t.args.get_warmup_steps(10) for t in (on, off, own)] == [2, 0, 3]
    with pytest.raises(ValueError, match="warmup=1.5"):
        make("kit", tmp_path / "d", kit={"warmup": 1.5})


def test_required_columns():
    class Scorer:
        __name__ = "scorer"
        columns = ("gold",)

        def __call__(self, completions, *, tag="answer", **columns):
            return []

    assert required_columns(Scorer()) == ["gold"]
    assert required_columns(asks_for_answer) == ["answer"]
    assert required_columns(lambda completions, prompts, log_metric=None, **kw: []) == []


def test_settings_of_the_caller_are_left_alone(tmp_path):
    from tiny_run import settings

    from grpo_kit.models import load_policy
    from grpo_kit.training.trainer import GRPOTrainer

    model, tokenizer = load_policy("tiny-random", quiet=True)
    args = settings(tmp_path, logging_steps=7)
    GRPOTrainer(model, letters, args, data(), processing_class=tokenizer, live=False)
    assert args.logging_steps == 7 and args.warmup_steps == 0
    assert torch.is_grad_enabled()


def test_answers_that_do_not_fit_are_counted(tmp_path, tiny):
    """Of the task that the trainer was given: of other data nobody knows what a right answer is."""
    rows = [{"question": f"Say {i}:", "answer": "many words " * (1 + 3 * (i % 2))} for i in range(20)]
    task = from_rows("words", rows, reward=letters, max_completion_tokens=6, prefill="<answer>")
    data = task.dataset(tiny[1]).shuffle(seed=1).select(range(10))
    with pytest.warns(UserWarning, match=r"train_dataset: of 10 right answers \d have more than 6 tokens"):
        make("kit", tmp_path, task=task, dataset=data)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "train_dataset: of", UserWarning)
        make("kit", tmp_path, task=dataclasses.replace(task, max_completion_tokens=40))
        make("kit", tmp_path, dataset=data, max_completion_length=6)
