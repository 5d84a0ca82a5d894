"""The stop button at awkward moments: in an evaluation, twice, where Python drops exceptions, before the first step."""

import os
import random
import signal
import threading

import pytest
from tiny_run import data, interrupted_once, make, press_stop, same, weights

from grpo_kit.loop.interrupts import InterruptGuard
from grpo_kit.record.files import read_metrics

EVALUATES = dict(eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4)


def evaluating(folder, **overrides):
    return make("kit", folder, eval_dataset=data(4), **EVALUATES | overrides)


def pressed_in_evaluation(trainer, at_step, part):
    """Press once, in the part-th batch of the evaluation after `at_step` steps."""
    inner, parts = trainer.prediction_step, []

    def prediction_step(*args, **kwargs):
        parts.append(trainer.state.global_step)
        if trainer.state.global_step == at_step and parts.count(at_step) == part:
            press_stop()
        return inner(*args, **kwargs)

    trainer.prediction_step = prediction_step
    return parts


def rows(folder):
    """metrics.csv as it stands, without the times."""
    table = read_metrics(folder)
    return table.drop(columns=[name for name in table if "seconds" in name or name == "step_time"])


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    trainer = make("kit", tmp_path_factory.mktemp("untouched") / "run")
    trainer.train(on_stop="return")
    return weights(trainer)


def test_an_evaluation_moves_no_later_step(tmp_path, untouched):
    """Its random numbers are its own, so that a run learns the same however often it is looked at."""
    trainer = evaluating(tmp_path, eval_steps=1)
    trainer.train(on_stop="return")
    assert same(untouched, weights(trainer))
    assert read_metrics(tmp_path)["eval/reward"].notna().all()


@pytest.mark.parametrize("in_memory", [True, False], ids=["same trainer", "new process"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize(
    "when, at_step",
    [
        ({}, 2),
        ({}, 4),
        ({"eval_strategy": "epoch"}, 4),
        ({"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 2, "max_steps": 6}, 4),
        ({"eval_strategy": "epoch", "max_steps": 6}, 6),
    ],
    ids=["steps", "last step", "epoch", "epoch, saved before", "end inside an epoch"],
)
def test_an_evaluation_cut_short_is_made_up_and_changes_nothing(when, at_step, tuning, in_memory, tmp_path):
    if tuning == "lora" and at_step != 2:
        pytest.skip("once is enough")
    whole = evaluating(tmp_path / "a", tuning=tuning, **when)
    whole.train()
    trainer = evaluating(tmp_path / "b", tuning=tuning, **when)
    parts = pressed_in_evaluation(trainer, at_step, part=2)
    trainer.train(on_stop="return")
    assert trainer.interrupted and trainer.state.global_step == at_step and trainer.model.training
    assert parts.count(at_step) == 2, "stopped at once"
    if in_memory:
        trainer.train(on_stop="return")
    else:
        trainer = evaluating(tmp_path / "b", tuning=tuning, **when)
        trainer.train(resume_from_checkpoint=True, on_stop="return")
    assert same(weights(whole), weights(trainer))
    assert rows(tmp_path / "a").equals(rows(tmp_path / "b")[list(rows(tmp_path / "a"))])
    assert read_metrics(tmp_path / "b")["eval/reward"].notna().sum() == len(
        whole.state.log_history and [entry for entry in whole.state.log_history if "eval_loss" in entry]
    )
    lines = (tmp_path / "b/metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + len(rows(tmp_path / "a")), "one row a step"


class PressesWhenDeleted:
    def __del__(self):
        press_stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_press_that_lands_in_a_del_is_obeyed_at_the_end_of_the_step(tmp_path, untouched):
    trainer = make("kit", tmp_path)
    inner = trainer._generate_single_turn

    def generate(*args, **kwargs):
        if trainer.state.global_step == 2:
            doomed = PressesWhenDeleted()
            del doomed  # Python prints the KeyboardInterrupt and goes on
        return inner(*args, **kwargs)

    trainer._generate_single_turn = generate
    trainer.train(on_stop="return")
    assert trainer.interrupted and trainer.state.global_step in (2, 3)
    trainer._generate_single_turn = inner
    trainer.train(on_stop="return")
    assert trainer.state.global_step == 4 and same(untouched, weights(trainer))


@pytest.mark.parametrize("where", ["rollout", "backward", "optimizer"])
def test_a_second_press_while_the_first_is_obeyed_changes_nothing(where, tmp_path, untouched):
    """At once after the first, before anything is saved: where it once restarted at step 0 on trained weights."""
    trainer = make("kit", tmp_path)
    interrupted_once(trainer, where, at_step=2)
    inner = trainer._save_where_it_stopped

    def save_where_it_stopped(why):
        press_stop()
        inner(why)
        press_stop()

    trainer._save_where_it_stopped = save_where_it_stopped
    trainer.train(on_stop="return")
    assert trainer.interrupted and trainer.state.global_step == (3 if where == "optimizer" else 2)
    trainer.train(on_stop="return")
    assert trainer.state.global_step == 4 and same(untouched, weights(trainer))


@pytest.mark.parametrize("part", ["open", "begin"])
def test_a_press_before_the_first_step_leaves_the_name_free(part, tmp_path, untouched):
    trainer = make("kit", tmp_path / "run")
    inner, pressed = getattr(trainer.recorder, part), []

    def then_press(*args, **kwargs):
        inner(*args, **kwargs)
        if not pressed:
            pressed.append(True)
            press_stop()

    setattr(trainer.recorder, part, then_press)
    trainer.train(on_stop="return")
    assert trainer.interrupted and trainer.state.global_step == 0
    other = make("kit", tmp_path / "run")
    other.train()
    assert same(untouched, weights(other))


def test_a_press_while_a_checkpoint_is_loaded_goes_on_from_it(tmp_path, untouched):
    """In a new process, where only the folder knows of the run: half of the weights may be loaded."""
    make("kit", tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    trainer = make("kit", tmp_path)
    inner, pressed = trainer._load_optimizer_and_scheduler, []

    def load(*args, **kwargs):
        if not pressed:
            pressed.append(True)
            press_stop()
        return inner(*args, **kwargs)

    trainer._load_optimizer_and_scheduler = load
    trainer.train(resume_from_checkpoint=True, on_stop="return")
    assert trainer.interrupted
    trainer.train(on_stop="return")
    assert trainer.state.global_step == 4 and same(untouched, weights(trainer))


@pytest.mark.parametrize("seed", range(2))
def test_presses_at_random_moments(seed, tmp_path):
    """Up to three a call, at any moment, in an evaluation and while saving too, until the run is through."""
    options = dict(max_steps=5, save_strategy="steps", save_steps=2, num_iterations=2)
    whole = evaluating(tmp_path / "a", **options)
    whole.train()
    trainer, draw = evaluating(tmp_path / "b", **options), random.Random(seed)
    while trainer.state.global_step < 5 or trainer.interrupted:
        timers = [
            threading.Timer(draw.uniform(0, 1.5), os.kill, (os.getpid(), signal.SIGINT))
            for _ in range(draw.choice((0, 1, 1, 2, 3)))
        ]
        late = signal.signal(signal.SIGINT, lambda *_: None)  # those that land outside train()
        for timer in timers:
            timer.start()
        trainer.train(on_stop="return")
        for timer in timers:
            timer.cancel()
            timer.join()
        signal.signal(signal.SIGINT, late)
    assert same(weights(whole), weights(trainer))
    assert rows(tmp_path / "a").equals(rows(tmp_path / "b")[list(rows(tmp_path / "a"))])


def test_guard_waits_but_inside_at_once():
    with InterruptGuard() as guard:
        press_stop()
        assert guard.pending
        with pytest.raises(KeyboardInterrupt), guard.at_once():
            pass
    with InterruptGuard() as guard:
        with pytest.raises(KeyboardInterrupt), guard.at_once():
            press_stop()
        press_stop()  # while the first one is obeyed
    with InterruptGuard() as guard, pytest.raises(KeyboardInterrupt), guard.at_once():
        guard.begin_finish_first()
        press_stop()
        assert guard.pending
        guard.end_finish_first()
