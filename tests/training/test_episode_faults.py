"""Environments that go wrong in the middle of training: named, saved, mended, and gone on with as if they never had."""

import math
import threading

import pytest
from tiny_episodes import Letters, make, task
from tiny_run import same, weights

from grpo_kit.episodes.environment import LONGEST, EpisodeError
from grpo_kit.record.files import read_metrics

HELD = threading.Event()


class Wrong(Letters):
    """Letters, with what `fault` makes of a second turn, or of a reset, while `now()`."""

    fault, in_reset = None, False
    now = staticmethod(lambda: False)

    def reset(self, row):
        made = super().reset(row)
        return Wrong.fault(made) if Wrong.in_reset and Wrong.now() else made

    def step(self, text):
        made = super().step(text)
        return Wrong.fault(*made) if not Wrong.in_reset and self.left == 1 and Wrong.now() else made


def raises(*made):
    raise LookupError("no such level")


def hangs(*made):
    HELD.wait(60)
    return made


FAULTS = {  # what goes wrong, how it is said
    "NaN reward": (lambda seen, reward, done: (seen, math.nan, done), "turn 2: the reward is nan"),
    "no text": (lambda seen, reward, done: (7, reward, done), "turn 2: the observation is a int"),
    "huge text": (
        lambda seen, reward, done: ("x" * (LONGEST + 1), reward, done),
        f"turn 2: the observation has {LONGEST + 1} characters",
    ),
    "hangs": (hangs, "turn 2: no answer within 2 s"),
    "raises in reset": (raises, "reset: LookupError: no such level"),
    "no text in reset": (lambda seen: None, "reset: the observation is a NoneType"),
}  # fmt: skip


@pytest.fixture(scope="module")
def never_wrong(tmp_path_factory):
    trainer = make(tmp_path_factory.mktemp("never wrong") / "run", max_steps=4)
    trainer.train()
    return weights(trainer)


@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "third step"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_saved_and_training_goes_on_once_it_is_mended(
    fault, steps, never_wrong, tmp_path, monkeypatch
):
    wrong, said = FAULTS[fault]
    HELD.clear()
    of = task(environment=Wrong, seconds=2.0 if fault == "hangs" else None)
    trainer = make(tmp_path, of=of, max_steps=4)
    monkeypatch.setattr(Wrong, "fault", staticmethod(wrong))
    monkeypatch.setattr(Wrong, "in_reset", "reset" in fault)
    monkeypatch.setattr(Wrong, "now", lambda: trainer.state.global_step == steps)
    with pytest.raises(EpisodeError, match=f"environment Wrong, row 'row .' .*, ({said})"):
        trainer.train()
    saved = [path.name for path in tmp_path.glob("checkpoint-*")]
    assert trainer.state.global_step == steps and saved == ["checkpoint-2"] * (steps == 2)
    monkeypatch.setattr(Wrong, "now", lambda: False)
    trainer.train()
    HELD.set()
    assert same(never_wrong, weights(trainer))
    assert read_metrics(tmp_path)["step"].tolist() == [1, 2, 3, 4]
