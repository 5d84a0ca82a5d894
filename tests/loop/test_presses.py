"""The stop button at awkward moments: twice, where Python drops exceptions, before the first step, while loading."""

import pytest
from loop_runs import KINDS, make, press_stop, record, same, weights

from grpo_kit.loop import checkpoint
from grpo_kit.loop.processes import InterruptGuard, Stopped


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    trainer = make(tmp_path_factory.mktemp("untouched") / "run")
    trainer.train()
    return weights(trainer), record(trainer.folder)


def pressed(trainer, where, at_step, press=press_stop):
    """Press once, in that part of the step that follows `at_step` finished steps."""
    owner, name = {
        "rollout": (trainer, "sample"),
        "backward": (trainer.update, "gradients"),
        "optimizer": (trainer.optimizer, "zero_grad"),
        "writing": (trainer, "_write"),
    }[where]
    inner, done = getattr(owner, name), []

    def then_press(*args, **kwargs):
        made = inner(*args, **kwargs)
        if trainer.step == at_step and not done:
            done.append(True)
            press()
        return made

    setattr(owner, name, then_press)


class PressesWhenDeleted:
    def __del__(self):
        press_stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_press_that_lands_in_a_del_is_obeyed_at_the_end_of_the_step(tmp_path, untouched):
    trainer = make(tmp_path / "run")

    def press():
        doomed = PressesWhenDeleted()
        del doomed  # Python prints the KeyboardInterrupt and goes on

    pressed(trainer, "rollout", 2, press)
    with pytest.raises(Stopped) as stopped:
        trainer.train()
    assert stopped.value.step == trainer.step == 3
    trainer.train()
    assert trainer.step == 4 and same(untouched[0], weights(trainer))


@pytest.mark.parametrize("where", ["rollout", "backward", "optimizer", "writing"])
def test_a_second_press_while_the_first_is_obeyed_changes_nothing(where, tmp_path, untouched):
    """At once after the first, before anything is saved and after it."""
    trainer = make(tmp_path / "run")
    pressed(trainer, where, 3 if where == "writing" else 2)
    inner = trainer._save_where_it_stopped

    def save_where_it_stopped(why):
        press_stop()
        said = inner(why)
        press_stop()
        return said

    trainer._save_where_it_stopped = save_where_it_stopped
    with pytest.raises(Stopped, match="saved to"):
        trainer.train()
    assert trainer.step == (2 if where in ("rollout", "backward") else 3)
    trainer.train()
    assert trainer.step == 4 and same(untouched[0], weights(trainer))
    assert record(trainer.folder) == untouched[1]


def test_a_press_before_the_first_step_is_done_leaves_the_run_to_go_on(
    tmp_path, untouched, capsys
):
    trainer = make(tmp_path / "run")
    pressed(trainer, "rollout", 0)
    with pytest.raises(Stopped, match="before the first step was done .*nothing to save"):
        trainer.train()
    assert trainer.step == 0 and not list(trainer.folder.glob("checkpoint-*"))
    trainer.train()
    assert same(untouched[0], weights(trainer)) and record(trainer.folder) == untouched[1]


def test_a_press_while_a_checkpoint_is_loaded_goes_on_from_it(tmp_path, untouched, monkeypatch):
    """In a new process, where only the folder knows of the run: half of the weights may be loaded."""
    make(tmp_path / "run", steps=2, save_steps=2).train()
    trainer, inner, done = make(tmp_path / "run"), checkpoint.load_weights, []

    def load_weights(*args):
        inner(*args)
        if not done:
            done.append(True)
            press_stop()

    monkeypatch.setattr(checkpoint, "load_weights", load_weights)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume=True)
    trainer.train(resume=True)
    assert trainer.step == 4 and same(untouched[0], weights(trainer))


@pytest.mark.parametrize("kind", ["lora", "two iterations"])
def test_a_press_between_two_updates_of_a_step_waits_for_its_end(kind, tmp_path):
    options = KINDS[kind] | ({"minibatches": 2} if kind == "lora" else {})
    whole = make(tmp_path / "whole", **options)
    whole.train()
    trainer = make(tmp_path / "run", **options)
    pressed(trainer, "optimizer", 1)
    with pytest.raises(Stopped, match="after step 2 of 4"):
        trainer.train()
    trainer.train()
    assert same(weights(whole), weights(trainer)) and record(trainer.folder) == record(
        whole.folder
    )


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
