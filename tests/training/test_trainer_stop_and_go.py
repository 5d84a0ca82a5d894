"""Interrupt, go on, resume: the same weights, bit for bit, as a run that nobody touched."""

import pandas as pd
import pytest
import torch
from tiny_run import data, difference, interrupted_once, make, press_stop, same, weights

from grpo_kit.models import load_policy
from grpo_kit.models.renamed import is_checkpointing
from grpo_kit.record.files import read_metrics


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("where", ["rollout", "backward", "optimizer"])
def test_interrupt_then_train_equals_never_stopping(where, tuning, tmp_path):
    untouched = make("kit", tmp_path / "a", tuning=tuning)
    untouched.train()

    trainer = make("kit", tmp_path / "b", tuning=tuning)
    pressed = interrupted_once(trainer, where, at_step=2)
    trainer.train(on_stop="return")
    assert pressed and trainer.interrupted
    done = 3 if where == "optimizer" else 2  # an optimizer step that has begun is finished and counted
    assert trainer.state.global_step == done
    assert (tmp_path / "b" / f"checkpoint-{done}" / "trainer_state.json").is_file()
    trainer.train(on_stop="return")

    assert not trainer.interrupted and trainer.state.global_step == 4
    assert same(weights(untouched), weights(trainer))
    rows, redone = read_metrics(tmp_path / "a"), read_metrics(tmp_path / "b")
    assert redone["step"].tolist() == [1, 2, 3, 4]
    assert redone["num_tokens"].tolist() == rows["num_tokens"].tolist(), (
        "those of a step left are not counted"
    )


@pytest.mark.parametrize("rows", [8, 32], ids=["ends with an epoch", "ends inside one"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_finished_run_resumed_is_left_as_it_is(tuning, rows, tmp_path, capsys):
    first = make("kit", tmp_path / "a", tuning=tuning, dataset=data(rows))
    first.train()
    first._save_checkpoint(first.model, trial=None)
    again = make("kit", tmp_path / "a", tuning=tuning, dataset=data(rows))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4 and same(weights(first), weights(again))
    assert read_metrics(tmp_path / "a")["step"].tolist() == [1, 2, 3, 4]
    assert "All 4 steps are done already" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["rollout", "backward", "optimizer"])
def test_plain_trl_does_not_go_on_after_an_interrupt(where, tmp_path):
    untouched = make("plain", tmp_path / "a")
    untouched.train()
    trainer = make("plain", tmp_path / "b")
    pressed = interrupted_once(trainer, where, at_step=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert pressed
    trainer.train()
    assert not same(weights(untouched), weights(trainer))


def count_rollouts(trainer):
    """The steps in which the trainer samples, as a list that grows."""
    rollouts, inner = [], trainer._generate_single_turn

    def generate(*args, **kwargs):
        rollouts.append(trainer.state.global_step)
        return inner(*args, **kwargs)

    trainer._generate_single_turn = generate
    return rollouts


@pytest.mark.parametrize("in_memory", [True, False], ids=["same trainer", "new process"])
@pytest.mark.parametrize("stop", [2, 5])
def test_a_stop_inside_a_rollout_buffer_goes_on_with_that_buffer(stop, in_memory, tmp_path):
    """4 steps a buffer: the step is done again with the rollouts, old log-probabilities and random state it had."""
    common = dict(num_iterations=4, max_steps=8, lora={"lora_dropout": 0.2}, tuning="lora")
    untouched = make("kit", tmp_path / "a", **common)
    untouched.train()
    trainer = make("kit", tmp_path / "b", **common)
    rollouts = count_rollouts(trainer)
    interrupted_once(trainer, "backward", at_step=stop)
    trainer.train(on_stop="return")
    assert trainer.interrupted and trainer.state.global_step == stop
    if not in_memory:
        trainer = make("kit", tmp_path / "b", **common)
        rollouts += count_rollouts(trainer)
        trainer.train(resume_from_checkpoint=True, on_stop="return")
    else:
        trainer.train(on_stop="return")
        assert rollouts == [0, 4]
    assert same(weights(untouched), weights(trainer))


def test_plain_trl_goes_on_with_stale_rollouts(tmp_path):
    """In the middle of a buffer it goes on from step 0 with what other weights wrote."""
    trainer = make("plain", tmp_path, num_iterations=4, max_steps=8)
    rollouts = count_rollouts(trainer)
    interrupted_once(trainer, "backward", at_step=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    before = len(rollouts)
    trainer.train()
    assert rollouts[before] != 0


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_resume_in_a_new_process_equals_never_stopping(tuning, tmp_path):
    untouched = make("kit", tmp_path / "a", tuning=tuning, beta=0.05)
    untouched.train()
    first = make("kit", tmp_path / "b", tuning=tuning, beta=0.05, save_strategy="steps", save_steps=2)
    first.train()
    again = make("kit", tmp_path / "b", tuning=tuning, beta=0.05, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert same(weights(untouched), weights(first))
    assert same(weights(untouched), weights(again))


@pytest.mark.parametrize("which", ["plain", "kit"])
def test_resuming_in_the_second_epoch_asks_that_epochs_questions(which, tmp_path):
    """8 questions, 2 a step: steps 5 to 8 are the second epoch; plain TRL goes on with the first one's order."""
    common = dict(max_steps=8, save_strategy="steps", save_steps=6)
    whole = make(which, tmp_path / "b", **common)
    whole.train()
    again = make(which, tmp_path / "b", **common)
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-6"))
    assert same(weights(whole), weights(again)) == (which == "kit")


SAVED = {
    "steps": dict(save_strategy="steps", save_steps=3),
    "fraction": dict(save_strategy="steps", save_steps=0.35),
    "epoch": dict(save_strategy="epoch", max_steps=7),
}


@pytest.mark.parametrize("when", SAVED)
@pytest.mark.parametrize("which", ["plain", "kit"])
def test_resuming_from_inside_a_rollout_buffer_is_exact(which, when, tmp_path):
    """3 is in the middle of a buffer of 2, and so is the end of 7 steps: the kit keeps the buffer in the checkpoint."""
    common = dict(num_iterations=2, max_steps=8) | SAVED[when]
    whole = make(which, tmp_path / "a", **common | {"max_steps": 8, "save_strategy": "no"})
    whole.train()
    first = make(which, tmp_path / "b", **common)
    first.train()
    saved = min(int(p.name.split("-")[1]) for p in (tmp_path / "b").glob("checkpoint-*"))
    assert saved == (7 if when == "epoch" else 3)
    again = make(which, tmp_path / "b", **common | {"max_steps": 8, "save_strategy": "no"})
    again.train(resume_from_checkpoint=str(tmp_path / "b" / f"checkpoint-{saved}"))
    assert same(weights(whole), weights(again)) == (which == "kit")


@pytest.mark.parametrize("strategy", ["epoch", "no"])
def test_metrics_have_a_row_a_step_whatever_the_logging_strategy(strategy, tmp_path, capsys):
    make("kit", tmp_path, logging_strategy=strategy).train()
    assert read_metrics(tmp_path)["step"].tolist() == [1, 2, 3, 4]
    assert f"not '{strategy}'" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_interrupt_between_micro_batches(where, tmp_path):
    """A step of two micro-batches in several chunks, stopped in its second: the first must not count twice."""
    common = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    untouched = make("kit", tmp_path / "a", **common)
    untouched.update.memory.chunk_tokens = 30
    untouched.train()
    trainer = make("kit", tmp_path / "b", **common)
    trainer.update.memory.chunk_tokens = 30
    inner, chunks = trainer._compute_loss, []

    def compute_loss(*args, **kwargs):
        loss = inner(*args, **kwargs)
        if loss.requires_grad:
            chunks.append(trainer.state.global_step)
            if where == "backward" and chunks.count(2) == 2 and len(set(chunks)) == 3:
                loss.register_hook(lambda grad: press_stop())
        return loss

    trainer._compute_loss = compute_loss
    if where == "optimizer":
        interrupted_once(trainer, where, at_step=2)
    trainer.train(on_stop="return")
    assert trainer.interrupted and chunks.count(2) >= 2
    trainer._compute_loss = inner
    trainer.train(on_stop="return")
    assert trainer.state.global_step == 4
    assert same(weights(untouched), weights(trainer))


def test_interrupt_between_the_buffers_of_a_step(tmp_path):
    """Each micro-batch has rollouts of its own; stopped in the second, the first must not be used again."""
    common = dict(per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=1)
    untouched = make("kit", tmp_path / "a", **common)
    untouched.train()
    trainer = make("kit", tmp_path / "b", **common)
    inner, rollouts = trainer._generate_single_turn, []

    def generate(*args, **kwargs):
        rollouts.append(trainer.state.global_step)
        if rollouts.count(2) == 2 and len(rollouts) == 6:
            press_stop()
        return inner(*args, **kwargs)

    trainer._generate_single_turn = generate
    trainer.train(on_stop="return")
    assert trainer.interrupted and rollouts.count(2) == 2
    trainer.train(on_stop="return")
    assert trainer.state.global_step == 4
    assert same(weights(untouched), weights(trainer))


@pytest.mark.parametrize("engine", ["generate", "generate_batch"])
@pytest.mark.parametrize("which", ["plain", "kit"])
def test_gradient_checkpointing_comes_back_after_an_interrupt(which, engine, tmp_path):
    continuous = engine == "generate_batch"
    trainer = make(
        which, tmp_path, gradient_checkpointing=True, use_transformers_continuous_batching=continuous
    )

    def stop(*args, **kwargs):
        press_stop()

    setattr(trainer.model, engine, stop)
    if which == "plain":
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    else:
        trainer.train(on_stop="return")
    assert is_checkpointing(trainer.model) == (which == "kit")


def test_interrupt_before_the_first_step_saves_nothing_and_goes_on(tmp_path, capsys):
    untouched = make("kit", tmp_path / "a")
    untouched.train()
    trainer = make("kit", tmp_path / "b")
    interrupted_once(trainer, "rollout", at_step=0)
    trainer.train(on_stop="return")
    assert trainer.interrupted and not list((tmp_path / "b").glob("checkpoint-*"))
    trainer.train(on_stop="return")
    assert same(weights(untouched), weights(trainer))


def test_run_folder_is_never_overwritten(tmp_path):
    make("kit", tmp_path, max_steps=1).train()
    before = (tmp_path / "metrics.csv").read_bytes()
    with pytest.raises(ValueError, match="resume_from_checkpoint|next free|already"):
        make("kit", tmp_path, max_steps=1).train()
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_completions_are_on_disk_for_every_step(tmp_path):
    trainer = make("kit", tmp_path)
    trainer.train(on_stop="return")
    table = pd.read_parquet(tmp_path / "completions.parquet")
    assert table.groupby("step").size().tolist() == [8, 8, 8, 8]
    assert table.groupby(["step", "group"]).size().unique().tolist() == [4]
    advantage = table.groupby(["step", "group"])["advantage"].sum()
    assert advantage.abs().max() < 1e-4


def test_weights_really_moved(tmp_path):
    """Else every equality above would be empty."""
    start = {n: p.detach().clone() for n, p in load_policy("tiny-random", quiet=True)[0].named_parameters()}
    trainer = make("kit", tmp_path)
    trainer.train(on_stop="return")
    assert difference(start, weights(trainer)) > 1e-3
    assert torch.isfinite(torch.cat([p.flatten() for p in trainer.model.parameters()])).all()
