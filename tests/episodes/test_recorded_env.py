"""A recorded environment played again: the same transitions, and what was never recorded said."""

import time
from dataclasses import replace

import numpy as np
import pytest

from examples.calculator import calculator
from grpo_kit.more.episodes import grid
from grpo_kit.more.episodes.recorded_env import RecordedEnv, recorded


def transcript(world, rows, texts):
    seen = world.reset(rows)
    found = [list(seen)]
    for turn, text in enumerate(texts, start=1):
        found.append(world.step({i: text for i in range(len(rows))}, turn))
    return found


def test_what_was_recorded_comes_again_word_for_word(tmp_path):
    path = tmp_path / "grid.jsonl"
    task = grid(n_train=8, n_held_out=8)
    texts = ["nowhere", "up", "sideways"]
    real = transcript(task.world(), task.train, texts)
    transcript(
        replace(task, environment=recorded(task.environment, path)).world(), task.train, texts
    )
    mock = RecordedEnv(path)
    assert transcript(replace(task, environment=mock).world(), task.train, texts) == real
    assert mock.report() == "0 of 24 steps (0.0 %) asked for what was never recorded."
    assert any(outcome.invalid for outcome in real[1].values())


def test_policies_score_the_same_on_it(tmp_path):
    path = tmp_path / "c.jsonl"
    task = calculator(n_train=4, n_held_out=8)
    noted = replace(task, environment=recorded(task.environment, path))
    assert (
        noted.score(task.optimum)
        == 1
        == replace(task, environment=RecordedEnv(path)).score(task.optimum)
    )


def test_what_was_never_recorded_is_counted_and_changes_nothing(tmp_path):
    path = tmp_path / "grid.jsonl"
    task = grid(n_train=2, n_held_out=2)
    transcript(
        replace(task, environment=recorded(task.environment, path)).world(),
        task.train,
        ["up", "left"],
    )
    mock = RecordedEnv(path, unknown="The line is dead.")
    world = replace(task, environment=mock).world()
    world.reset(task.train)
    found = world.step({0: "down", 1: "up"}, 1)
    assert found[0] == ("The line is dead.", 0.0, False, True) and not found[1].invalid
    assert not world.step({0: "up"}, 2)[0].invalid  # as if "down" had not been said
    assert mock.report().startswith("1 of 3 steps (33.3 %)")
    assert mock.missing()[["said", "times"]].values.tolist() == [["down", 1]]
    with pytest.raises(Exception, match="has no episode of this row"):
        world.reset(task.held_out)


def test_latency_is_what_it_took_or_what_is_asked_for(tmp_path):
    class Slow(grid().environment):
        def step(self, text):
            time.sleep(0.05)
            return super().step(text)

    path = tmp_path / "slow.jsonl"
    task = grid(n_train=2, n_held_out=2)
    transcript(replace(task, environment=recorded(Slow, path)).world(), task.train[:1], ["up"])
    for latency, least, most in ((0.0, 0, 0.03), ("recorded", 0.045, 0.5), (0.1, 0.095, 0.5)):
        world = replace(task, environment=RecordedEnv(path, latency=latency)).world()
        world.reset(task.train[:1])
        begun = time.perf_counter()
        world.step({0: "up"}, 1)
        assert least <= time.perf_counter() - begun <= most, latency


def test_files_that_are_none_are_named(tmp_path):
    with pytest.raises(FileNotFoundError):
        RecordedEnv(tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"row": "r"}\n')
    with pytest.raises(ValueError, match="bad.jsonl, line 1: no step that was recorded"):
        RecordedEnv(tmp_path / "bad.jsonl")
    with pytest.raises(ValueError, match="latency='slow' must be seconds"):
        RecordedEnv(tmp_path / "bad.jsonl", latency="slow")


class Numpy(grid().environment):
    """Rewards and ends as arrays give them; pays for being there when time is up."""

    def step(self, text):
        observation, reward, done = super().step(text)
        return observation, np.float32(reward), np.bool_(done)

    def settle(self):
        return np.float64(0.5)


def test_numbers_of_numpy_come_back_as_they_were(tmp_path):
    task = grid(n_train=2, n_held_out=2)
    path = tmp_path / "numpy.jsonl"
    noted = replace(task, environment=recorded(Numpy, path), max_turns=2)
    noted.score(lambda row, rng: lambda seen: "up", noted.train)
    world, again = (
        noted.world(),
        replace(task, environment=RecordedEnv(path), max_turns=2).world(),
    )
    for one in (world, again):
        one.reset(task.train[:1])
    for turn in (1, 2):
        outcomes = [one.step({0: "up"}, turn, last=turn == 2)[0] for one in (world, again)]
        assert outcomes[0] == outcomes[1] and type(outcomes[1].done) is bool
        if outcomes[0].done:
            break


def test_half_a_line_of_a_killed_recording_is_left_out_and_dropped(tmp_path):
    task, path = grid(n_train=2, n_held_out=2), tmp_path / "killed.jsonl"
    transcript(
        replace(task, environment=recorded(task.environment, path)).world(),
        task.train[:1],
        ["up"],
    )
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"row": "r", "sa')
    assert len(RecordedEnv(path).known) == 2
    recorded(task.environment, path)
    assert path.read_bytes() == whole


def test_no_blind_policy_is_played_where_steps_cost_or_are_counted(tmp_path):
    task, path = grid(n_train=2, n_held_out=2), tmp_path / "m.jsonl"
    assert task.strategies == task.actions
    transcript(
        replace(task, environment=recorded(task.environment, path)).world(),
        task.train[:1],
        ["up"],
    )
    assert (
        replace(task, environment=RecordedEnv(path)).strategies
        == ()
        == replace(task, seconds=5.0).strategies
    )
