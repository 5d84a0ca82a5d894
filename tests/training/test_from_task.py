"""The trainer is given the task: the same run as with its pieces, and what contradicts the task is refused."""

import inspect
import json
import warnings
from dataclasses import replace

import pytest
import torch
from trl import GRPOConfig

from grpo_kit import EpisodeTrainer, GRPOTrainer, PositivesTrainer, episodes, profile, tasks
from grpo_kit.record.files import read_completions, read_metrics
from grpo_kit.rewards import ExactAnswer
from tests.tiny_run import letters, make, same, settings, tiny, weights

TASK = replace(
    tasks.largest(n_train=16, n_held_out=4),
    rewards=[letters, ExactAnswer()],  # letters differ inside the groups of a random model
    reward_weights=[0.75, 0.25],
)


def trained(folder, **how):
    trainer = make("kit", folder, max_steps=2, **how)
    torch.manual_seed(0)
    trainer.train()
    return trainer


def test_with_the_task_a_run_is_the_one_with_its_pieces_bit_for_bit(tmp_path):
    of_task = trained(tmp_path / "task", task=TASK)
    in_pieces = trained(
        tmp_path / "pieces", rewards=TASK.rewards, dataset=TASK.dataset(tiny()[1]),
        reward_weights=TASK.reward_weights, max_completion_length=TASK.max_completion_tokens,
    )  # fmt: skip
    assert same(weights(of_task), weights(in_pieces))
    assert not same(weights(of_task), dict(tiny()[0].named_parameters())), (
        "two steps that train nothing show nothing"
    )
    rows, pieces = (read_metrics(tmp_path / name) for name in ("task", "pieces"))
    alike = [c for c in rows if "seconds" not in c and not c.startswith(("time/", "memory/"))]
    assert rows["reward"].nunique() == 2 and (rows["loss"] != 0).all()
    assert rows[["step", "reward", "loss", "grad_norm"]].equals(
        pieces[["step", "reward", "loss", "grad_norm"]]
    )
    assert set(alike) <= set(pieces.columns)
    written, again = (read_completions(tmp_path / name) for name in ("task", "pieces"))
    assert list(written["completion"]) == list(again["completion"])


def test_run_json_has_what_the_task_says(tmp_path):
    trainer = trained(tmp_path / "run", task=TASK)
    config = json.loads((tmp_path / "run" / "run.json").read_text())
    assert trainer.task is TASK
    assert config["data"] == {"task": "largest", "rows": 16}
    assert config["reward_weights"] == [0.75, 0.25] and config["reward_parts"] == ["letters", "exact_answer"]
    assert config["best_constant"] == TASK.best_constant_parts() != None  # noqa: E711
    assert config["args"]["max_completion_length"] == 12
    assert TASK.dataset(tiny()[1]).info.description == "", "a data set is rows, and no letter to the trainer"


def test_rows_beside_the_task_are_trained_on_in_place_of_its_own(tmp_path):
    few = TASK.dataset(tiny()[1]).select(range(4, 8))
    trainer = trained(tmp_path / "run", task=TASK, dataset=few)
    assert trainer.train_dataset["question"] == few["question"]
    assert set(read_completions(tmp_path / "run")["prompt"]) <= set(few["prompt"])
    with pytest.raises(
        ValueError, match=r"'exact_answer' asks for the column \['answer'\], which train_dataset does not"
    ):
        make("kit", tmp_path / "lacks", task=TASK, dataset=few.remove_columns("answer"))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            {"kit": {"reward_funcs": letters}},
            "reward_funcs=.* beside task 'largest', which has rewards of its own",
        ),
        (
            {"reward_weights": [0.5, 0.5]},
            r"reward_weights=\[0.5, 0.5\], but task 'largest' has \[0.75, 0.25\]",
        ),
    ],
)
def test_what_contradicts_the_task_is_refused_by_name(tmp_path, how, words):
    with pytest.raises(ValueError, match=words):
        make("kit", tmp_path / "run", task=TASK, **how)
    assert make("kit", tmp_path / "same", task=TASK, reward_weights=[0.75, 0.25]).task is TASK


def test_a_task_of_the_other_kind_is_refused(tmp_path):
    model, tokenizer = tiny()
    with pytest.raises(
        ValueError, match="'grid' is an EpisodeTask; PositivesTrainer takes a Task, EpisodeTrainer it"
    ):
        PositivesTrainer(model, episodes.grid(), settings(tmp_path), processing_class=tokenizer)
    with pytest.raises(ValueError, match="is a Task; EpisodeTrainer takes an EpisodeTask"):
        EpisodeTrainer(model, TASK, settings(tmp_path), processing_class=tokenizer)
    with pytest.raises(ValueError, match="second argument of type ExactAnswer, which is no Task"):
        GRPOTrainer(
            model, ExactAnswer(), settings(tmp_path), reward_funcs=letters, processing_class=tokenizer
        )
    with pytest.raises(ValueError, match="processing_class=None, but the prompts of task 'largest'"):
        nameless = tiny()[0]
        nameless.config._name_or_path = ""
        nameless.name_or_path = ""
        GRPOTrainer(nameless, TASK, settings(tmp_path))


def test_both_trainers_take_the_task_in_the_same_place():
    for kind in (GRPOTrainer, EpisodeTrainer):
        assert list(inspect.signature(kind).parameters)[:3] == ["model", "task", "args"]


def length_of(folder, args, task=TASK):
    model, tokenizer = tiny()
    trainer = GRPOTrainer(model, task, args, processing_class=tokenizer, live=None)
    assert trainer.task.max_completion_tokens == trainer.args.max_completion_length
    return trainer.max_completion_length


def test_the_length_is_the_tasks_unless_the_run_was_given_one(tmp_path):
    trls_own = GRPOConfig("x", use_cpu=True, bf16=False).max_completion_length
    plain = {"per_device_train_batch_size": 8, "use_cpu": True, "bf16": False, "report_to": []}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert length_of(tmp_path, GRPOConfig(str(tmp_path / "a"), **plain)) == 12
        assert length_of(tmp_path, profile("smoke").grpo_config(tmp_path / "b")) == 12
        assert (
            length_of(
                tmp_path, profile("gpu24", model="tiny-random").grpo_config(tmp_path / "c", use_cpu=True)
            )
            == 12
        )
    own = profile("smoke", max_completion_tokens=trls_own)
    for args in (
        GRPOConfig(str(tmp_path / "d"), max_completion_length=20, **plain),
        profile("smoke", max_completion_tokens=20).grpo_config(tmp_path / "e"),
        profile("smoke").grpo_config(tmp_path / "f", task=TASK, max_completion_length=20),
    ):
        with pytest.warns(
            UserWarning, match="max_completion_length=20 is this run's own, but task 'largest' has .*=12"
        ):
            assert length_of(tmp_path, args) == 20
    with pytest.warns(UserWarning, match=f"max_completion_length={trls_own}"):  # asked for
        assert length_of(tmp_path, own.grpo_config(tmp_path / "g", task=TASK)) == trls_own
    later = profile("smoke").grpo_config(tmp_path / "h")
    later.max_completion_length = 20
    with pytest.warns(UserWarning, match="max_completion_length=20"):
        assert length_of(tmp_path, later) == 20
