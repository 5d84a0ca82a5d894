"""What a user does before and beside: a backward pass, other trainers on the model, modes left on, hooks that fail."""

import gc
import weakref
from dataclasses import replace

import few_words
import pytest
import standard_runs
import torch
from loop_runs import make, record, same, task, weights
from transformers import PrinterCallback

from grpo_kit.loop import Config, Loop
from grpo_kit.loop.protocols import Hook

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """seams -> the weights of two steps that nobody disturbed."""
    known, root = {}, tmp_path_factory.mktemp("untouched")

    def of(seams):
        if seams not in known:
            trainer = make(root / seams, seams=seams, steps=2)
            trainer.train()
            known[seams] = weights(trainer)
        return known[seams]

    return of


def backward(model):
    ids = torch.arange(8)[None]
    with torch.enable_grad():
        model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("seams", ["plain", "fast"])
def test_a_backward_pass_before_or_between_leaves_no_trace(seams, untouched, tmp_path):
    class Probes(Hook):
        def after_step(self, trainer, row, batch):
            backward(trainer.model)

    trainer = make(tmp_path / "run", seams=seams, steps=2, hooks=[Probes()])
    backward(trainer.model)
    trainer.train()
    assert same(weights(trainer), untouched(seams))


MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", BF16),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_mode_that_a_cell_left_on_changes_nothing(mode, untouched, tmp_path):
    trainer = make(tmp_path / "run", steps=2)
    with mode():
        before = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        trainer.train()
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == before, (
            "it comes back"
        )
    assert same(weights(trainer), untouched("plain"))


# ---- two trainers on one model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seams", ["plain", "fast"])
def test_trainers_take_turns_on_one_model_and_each_says_whose_weights_it_goes_on_from(
    seams, tmp_path, capsys
):
    """One after another and back: the weights and moments are those of the same steps by hand, and it is on record."""
    model = few_words.policy()[0]
    first = make(tmp_path / "first", model=model, seams=seams, steps=2)
    second = make(tmp_path / "second", model=model, seams=seams, steps=2, seed=7)
    first.train()
    assert "otherwise" not in capsys.readouterr().out
    second.train()
    said = f"weights None, now '2 steps in {tmp_path / 'first'}'"
    assert said in capsys.readouterr().out
    assert record(second.folder)[0][0]["changes"] == {
        "weights": [None, f"2 steps in {tmp_path / 'first'}"]
    }
    first.change(steps=3)
    first.train()
    assert f"weights None, now '2 steps in {tmp_path / 'second'}'" in capsys.readouterr().out
    row = record(first.folder)[0][2]
    assert row["changes"]["weights"] == [None, f"2 steps in {tmp_path / 'second'}"]

    # By hand: the same three pieces on fresh models whose weights and moments are carried over.
    one = make(tmp_path / "one", seams=seams, steps=2)
    one.train()
    two = make(tmp_path / "two", model=one.model, seams=seams, steps=2, seed=7)
    two.train()
    three = make(tmp_path / "three", model=two.model, seams=seams, steps=3)
    three.optimizer.load_state_dict(one.optimizer.state_dict())
    three.step = 2
    three.train()
    assert same(weights(first), weights(three))


def test_a_run_that_is_resumed_has_its_own_weights_whatever_the_model_was_trained_to_since(
    tmp_path, capsys
):
    whole = make(tmp_path / "whole", steps=3)
    whole.train()
    trainer = make(tmp_path / "run", steps=2, save_steps=2)
    trainer.train()
    make(tmp_path / "other", model=trainer.model, steps=1, seed=9).train()
    again = make(tmp_path / "run", model=trainer.model, steps=3)
    capsys.readouterr()
    again.train(resume=True)
    assert (
        same(weights(again), weights(whole))
        and "weights" not in record(again.folder)[0][2]["changes"]
    )
    assert "steps in" not in capsys.readouterr().out


def test_one_config_of_two_trainers_keeps_the_length_of_each_ones_task(tmp_path):
    """Made before either has trained; one that failed to be made takes nothing of it either."""
    config = Config(steps=1, prompts_per_step=2, group_size=4)
    model, tokenizer = (
        few_words.policy()[0],
        few_words.policy()[1],
    )
    given = {"tokenizer": tokenizer}
    first = Loop(model, task(), config, folder=tmp_path / "a", **given)
    second = Loop(
        model, replace(task(), max_completion_tokens=12), config, folder=tmp_path / "b", **given
    )
    with pytest.raises(ValueError, match="asks for the column"):
        failing = replace(
            task(),
            rewards=[lambda completions, gold, **c: []],
            reward_weights=[1.0],
            max_completion_tokens=9,
        )
        Loop(model, failing, config, folder=tmp_path / "c", **given)
    assert (first.config.max_completion_tokens, second.config.max_completion_tokens) == (6, 12)
    assert first.config is config, "an assignment to it is obeyed"
    config.learning_rate = 3e-3
    first.train()
    assert record(first.folder)[0][0]["learning_rate"] == pytest.approx(1e-3), (
        "the warmup's first third"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"hooks": [PrinterCallback()]},
        {"beta": 0.1, "optimizer": "flash-adamw"},
        {"micro_batch": 0},
    ],
)
def test_a_trainer_that_failed_to_be_made_leaves_the_earlier_one_whole(
    wrong, untouched, tmp_path
):
    trainer = make(tmp_path / "run", steps=2)
    with pytest.raises(ValueError):
        make(tmp_path / "failed", model=trainer.model, steps=2, **wrong)
    assert not (tmp_path / "failed").exists()
    trainer.train()
    assert same(weights(trainer), untouched("plain"))


# ---- hooks, and what is left ------------------------------------------------------------------------------------


class Fails(Hook):
    """Raises once, at one of the four moments."""

    def __init__(self, moment):
        self.moment = moment

    def _at(self, moment, there=True):
        if self.moment == moment and there:
            self.moment = None
            raise RuntimeError("boom")

    def begin(self, trainer):
        self._at("begin")

    def before_step(self, trainer):
        self._at("before_step", trainer.step == 1)

    def after_step(self, trainer, row, batch):
        self._at("after_step", trainer.step == 1)

    def end(self, trainer, error):
        self._at("end")


@pytest.mark.parametrize("moment", ["begin", "before_step", "after_step", "end"])
def test_a_hook_that_raises_at_any_moment_costs_nothing(moment, untouched, tmp_path):
    trainer = make(tmp_path / "run", steps=2, hooks=[Fails(moment)])
    with pytest.raises(RuntimeError, match="boom"):
        trainer.train()
    trainer.train()
    assert same(weights(trainer), untouched("plain")) and [
        row["step"] for row in record(trainer.folder)[0]
    ] == [1, 2]


@pytest.mark.parametrize("hooks", [[PrinterCallback()], [Hook], Hook(), [None], lambda: None])
def test_what_is_no_hook_is_refused_before_training(hooks, tmp_path):
    for made in (make, standard_runs.make):
        with pytest.raises(ValueError, match="which is no Hook; |must be a list of them: "):
            made(tmp_path / "run", hooks=hooks)


@pytest.mark.parametrize("kind", ["plain", "fast", "standard"])
def test_what_a_deleted_trainer_held_is_free_at_once(kind, tmp_path):
    """Without waiting for the collector of circles, which knows nothing of a card's memory."""
    model = few_words.policy()[0]
    gc.collect()
    gc.disable()
    try:
        if kind == "standard":
            trainer = standard_runs.make(tmp_path / "run", model=model, live=False)
        else:
            trainer = make(tmp_path / "run", model=model, seams=kind, steps=1)
        trainer.train()
        held = [weakref.ref(one) for one in (trainer, trainer.optimizer, trainer.update, model)]
        held += [weakref.ref(state["exp_avg"]) for state in trainer.optimizer.state.values()]
        del trainer
        assert [ref for ref in held if ref() is not None] == [held[3]], (
            "the model is still mine"
        )
        del model
        assert held[3]() is None
    finally:
        gc.enable()
