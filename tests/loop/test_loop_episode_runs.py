"""Runs of episodes in the loop, fast and plain: what they record, stop and go, environments that fail."""

import copy
import json
import random
from collections import defaultdict
from contextlib import contextmanager

import pytest
from tiny_loop_episodes import Coin, Letters, make, rolled_out, same, task, weights

from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.processes import Stopped
from grpo_kit.loop.protocols import Hook
from grpo_kit.loop.score import with_signal
from grpo_kit.more.episodes.environment import EpisodeError
from grpo_kit.more.episodes.observation import View
from grpo_kit.record._jsonl_run import lines_of

# ---- sampled runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seams", ["fast", "plain"])
@pytest.mark.parametrize(
    "view", [View(chat=True), View(actions=1)], ids=["chat", "one message"]
)
def test_a_sampled_run_records_whole_episodes_with_the_policys_logprobs(seams, view, tmp_path):
    batches = []

    class Keep(Hook):
        def before_step(self, trainer):
            self.model = copy.deepcopy(trainer.model)

        def after_step(self, trainer, row, batch):
            temperature = row["temperature"]
            batches.append(
                (batch, PaddedUpdate(trainer.config).logprobs(self.model, batch, temperature))
            )

    trainer = make(
        tmp_path / "run", seams, of=task(view=view), hooks=[Keep()], temperature=0.8, top_p=0.95
    )
    before = weights(trainer)
    trainer.train()
    rows = [*lines_of(trainer.folder / "metrics.jsonl")]
    table = defaultdict(lambda: defaultdict(list))
    for line in lines_of(trainer.folder / "completions.jsonl"):
        table[line["step"]][line["episode"]].append(line)
    assert [row["step"] for row in rows] == [1, 2, 3] == [*table] and not same(
        before, weights(trainer)
    )
    for row, episodes in zip(rows, table.values(), strict=True):
        assert len(episodes) == 8
        for turns in episodes.values():
            assert [turn["turn"] for turn in turns] == list(range(1, len(turns) + 1))
            assert (
                len({(turn["group"], turn["reward"], turn["advantage"]) for turn in turns}) == 1
            )
            assert sum(turn["turn_reward"] for turn in turns) == pytest.approx(
                turns[0]["reward"]
            )
            assert [t["result"] for t in turns[:-1]] == [t["observation"] for t in turns[1:]]
        firsts = [turns[0] for turns in episodes.values()]
        assert row["reward"] == pytest.approx(sum(turn["reward"] for turn in firsts) / 8)
        assert row["episodes/turns"] == pytest.approx(sum(map(len, episodes.values())) / 8)
        assert ("episodes/forked" in row) == view.chat
    assert len({len(ids) for batch, _ in batches for ids in batch.completion_ids}) > 1, (
        "some completions end"
    )
    for batch, logprobs in batches:
        assert any(batch.advantages)
        if seams == "fast":
            assert [*map(len, batch.entropies)] == [*map(len, batch.completion_ids)]
            for ids, sampled, scored in zip(
                batch.completion_ids, batch.sampler_logprobs, logprobs, strict=True
            ):
                assert sampled == pytest.approx(scored[: len(ids)].tolist(), abs=2e-4)
        else:
            assert batch.sampler_logprobs is None and batch.entropies is None


def test_slow_environments_and_the_runs_own_length(tmp_path):
    """Threads change nothing where an environment is a function of its row; config.max_completion_tokens counts."""
    alone, threads = (
        rolled_out(
            make(
                tmp_path / name,
                of=task(environment=Coin, seconds=seconds),
                max_completion_tokens=3,
            )
        )
        for name, seconds in (("alone", None), ("threads", 20.0))
    )
    assert alone.completion_ids == threads.completion_ids and alone.rewards == threads.rewards
    assert max(map(len, alone.completion_ids)) == 3


def test_an_episodes_draws_do_not_depend_on_which_others_are_still_played(tmp_path):
    made = {}
    for turns in (1, 3):
        of = task(rows=2)
        of.train[0]["turns"], of.train[1]["turns"] = turns, 3
        batch = rolled_out(make(tmp_path / str(turns), of=of))
        made[turns] = [
            ids
            for ids, row in zip(batch.completion_ids, batch.rows, strict=True)
            if row is of.train[1]
        ]
    assert made[1] == made[3] and len(made[3]) == 12 and len({*map(tuple, made[3])}) > 8


@pytest.mark.parametrize("seams", ["fast", "plain"])
def test_groups_without_a_signal_are_drawn_anew(seams, tmp_path):
    of = task(rows=8)
    for row in of.train[:6]:
        row["pays"] = 0
    without = rolled_out(make(tmp_path / "a", seams, of=of))
    assert len({without.groups[place] for place in with_signal(without)}) < 2, (
        "the test can fail"
    )
    batch = rolled_out(make(tmp_path / "b", seams, of=of, dynamic_sampling=8))
    assert with_signal(batch) == [*range(len(batch))] and len({*batch.groups}) == 2
    turns = defaultdict(list)
    for group, episode, turn in zip(
        batch.groups, batch.extra["episode"], batch.extra["turn"], strict=True
    ):
        turns[group, episode].append(turn)
    assert len(turns) == 8 and all(
        found == [*range(1, len(found) + 1)] for found in turns.values()
    )


# ---- stop and go ------------------------------------------------------------------------------------------------


@contextmanager
def at(step, trainer, act, turn=2):
    """act() happens once, in a turn of an episode of the step."""
    left = [act]

    def fault(row, now):
        if trainer.step == step and now == turn and left:
            left.pop()()

    Letters.fault = staticmethod(fault)
    try:
        yield
    finally:
        Letters.fault = staticmethod(lambda row, now: None)
        assert not left, "it happened"


def stop():
    raise KeyboardInterrupt


@pytest.mark.parametrize("seams", ["fast", "plain"])
@pytest.mark.parametrize("again", ["train() again", "another process"])
def test_stopped_inside_an_episode_and_gone_on_is_as_never_stopped(seams, again, tmp_path):
    straight = make(tmp_path / "straight", seams)
    straight.train()
    trainer = make(tmp_path / "stopped", seams)
    with at(2, trainer, stop), pytest.raises(Stopped, match="after step 2"):
        trainer.train()
    if seams == "fast":
        assert trainer.sample.writer.sample.engine.nbytes() == 0, (
            "nothing is kept of a rollout that was stopped"
        )
    if again == "another process":
        random.seed(99)
        trainer = make(tmp_path / "stopped", seams)
        trainer.train(resume=True)
    else:
        trainer.train()
    assert same(weights(straight), weights(trainer))
    one, other = ([*lines_of(t.folder / "completions.jsonl")] for t in (straight, trainer))
    assert json.dumps(one) == json.dumps(other) and len(one) > 24


@pytest.mark.parametrize("seams", ["fast", "plain"])
def test_stopped_behind_a_rollout_and_gone_on_is_as_never_stopped(seams, tmp_path):
    """The rollout is made again with the same weights: what the engine knew of the first one must not matter."""
    straight, trainer = make(tmp_path / "straight", seams), make(tmp_path / "stopped", seams)
    straight.train()
    gradients, left = trainer.update.gradients, [stop]

    def stopping(*args):
        if trainer.step == 1 and left:
            left.pop()()
        if seams == "fast":
            assert trainer.sample.writer.sample.engine.nbytes() == 0, (
                "on a CPU the update has the memory"
            )
        return gradients(*args)

    trainer.update.gradients = stopping
    with pytest.raises(Stopped, match="after step 1"):
        trainer.train()
    trainer.train()
    assert same(weights(straight), weights(trainer)) and not left


@pytest.mark.parametrize("step", [0, 1])
def test_an_environment_that_raises_is_named_and_training_goes_on_once_it_is_mended(
    step, tmp_path
):
    def raises():
        raise LookupError("no such level")

    straight, trainer = make(tmp_path / "straight"), make(tmp_path / "wrong")
    straight.train()
    with (
        at(step, trainer, raises),
        pytest.raises(
            EpisodeError,
            match=r"environment Letters, row 'row \d' .*, turn 2: LookupError: no such level",
        ),
    ):
        trainer.train()
    assert [path.name for path in trainer.folder.glob("checkpoint-*")] == [
        f"checkpoint-{step}"
    ] * bool(step)
    trainer.train()
    assert same(weights(straight), weights(trainer))
