"""Environments side by side; whatever breaks the contract is named with its row and turn."""

import math
import sys
import threading
import time

import pytest

from grpo_kit.more.episodes.environment import LONGEST, EpisodeError, VectorEnv


class Echo:
    """Says what it was told; row["fault"] says what goes wrong, in turn row["at"]."""

    def reset(self, row):
        self.row, self.turn, self.invalid = row, 0, False
        if row.get("fault") == "reset":
            raise KeyError("no such map")
        return f"begin {row['question']}"

    def step(self, text):
        self.turn += 1
        fault = self.row.get("fault") if self.turn == self.row.get("at", 1) else None
        if callable(fault):
            return fault(self)
        self.invalid = text == "?"
        return f"you said {text}", 0.5, text == "bye"


ROWS = [{"question": "one"}, {"question": "two"}, {"question": "three"}]


def raises(_):
    raise ZeroDivisionError("division by zero")


FAULTS = {
    "raises": (raises, "ZeroDivisionError: division by zero"),
    "no reward": (lambda _: ("x", True), "has to give .observation, reward, done."),
    "nothing": (lambda _: None, "has to give"),
    "NaN": (lambda _: ("x", math.nan, False), "the reward is nan"),
    "infinite": (lambda _: ("x", math.inf, False), "the reward is inf"),
    "a word as reward": (lambda _: ("x", "much", False), "the reward is 'much'"),
    "bytes": (lambda _: (b"x", 0.0, False), "the observation is a bytes"),
    "leaves": (lambda _: sys.exit(3), "SystemExit: 3"),
    "huge": (lambda _: ("x" * (LONGEST + 1), 0.0, False), f"{LONGEST + 1} characters"),
}


def test_episodes_are_played_side_by_side_and_objects_used_again():
    world = VectorEnv(Echo)
    assert world.reset(ROWS) == ["begin one", "begin two", "begin three"]
    first = list(world._pool)
    found = world.step({0: "a", 2: "?"}, 1)
    assert [found[i].observation for i in (0, 2)] == ["you said a", "you said ?"]
    assert (found[0].invalid, found[2].invalid, found[0].done) == (False, True, False)
    found = world.step({2: "bye"}, 2)
    assert found[2].done and not found[2].invalid
    assert world.reset(ROWS[:2]) == ["begin one", "begin two"] and world._pool == first


@pytest.mark.parametrize("seconds", [None, 5.0], ids=["inline", "threads"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_breaks_the_contract_names_environment_row_and_turn(fault, seconds):
    what, said = FAULTS[fault]
    world = VectorEnv(Echo, seconds=seconds)
    world.reset([*ROWS[:2], {"question": "three", "fault": what, "at": 2}])
    world.step({0: "a", 1: "a", 2: "a"}, 1)
    with pytest.raises(EpisodeError, match=said) as error:
        world.step({0: "a", 1: "a", 2: "a"}, 2)
    told = str(error.value)
    assert (
        "environment Echo, row 'three' {" in told
        and '{"at": 2, ' in told
        and ", turn 2: " in told
    ), "rows may ask the same question"


@pytest.mark.parametrize("seconds", [None, 5.0], ids=["inline", "threads"])
def test_a_reset_that_raises_is_named_too(seconds):
    with pytest.raises(
        EpisodeError, match="row 'two' .*, reset: KeyError: 'no such map'"
    ) as error:
        VectorEnv(Echo, seconds=seconds).reset([ROWS[0], {"question": "two", "fault": "reset"}])
    assert isinstance(error.value.__cause__, KeyError)


def test_what_is_no_environment_is_refused():
    with pytest.raises(EpisodeError, match="environment dict has no reset"):
        VectorEnv(dict).reset(ROWS)
    with pytest.raises(EpisodeError, match="could not be made: ZeroDivisionError"):
        VectorEnv(lambda: 1 / 0).reset(ROWS)
    with pytest.raises(ValueError, match="seconds=0 must be above 0"):
        VectorEnv(Echo, seconds=0)


def test_one_that_hangs_is_named_when_its_time_is_over_and_python_can_end():
    # of other tests in this process
    release, others = threading.Event(), {*threading.enumerate()}
    world = VectorEnv(Echo, seconds=0.2)
    world.reset([*ROWS[:2], {"question": "stuck", "fault": lambda _: release.wait()}])
    begun = time.monotonic()
    with pytest.raises(EpisodeError, match="row 'stuck' .*, turn 1: no answer within 0.2 s"):
        world.step({0: "a", 1: "a", 2: "a"}, 1)
    assert time.monotonic() - begun < 2
    own = {*threading.enumerate()} - others
    assert own and all(thread.daemon for thread in own)
    release.set()
    assert world.reset(ROWS) == ["begin one", "begin two", "begin three"]  # with new objects


def test_slow_ones_wait_side_by_side():
    def slow(_):
        time.sleep(0.2)
        return "x", 0.0, False

    world = VectorEnv(Echo, seconds=5.0)
    world.reset([{"question": str(i), "fault": slow} for i in range(8)])
    begun = time.monotonic()
    world.step({i: "a" for i in range(8)}, 1)
    assert time.monotonic() - begun < 0.8  # one after the other: 1.6


def test_results_keep_their_order_whoever_answers_first():
    """Eight that wait 50 ms and more, the first the longest: side by side, each answer at its own episode's number."""

    class Mock:
        def reset(self, row):
            self.number = int(row["question"])
            return f"begin {self.number}"

        def step(self, text):
            time.sleep(0.05 + 0.01 * (8 - self.number))
            return f"{self.number} heard {text}", self.number / 8, self.number == 7

    found = {}
    for name, seconds in (("inline", None), ("threads", 5.0)):
        world = VectorEnv(Mock, seconds=seconds)
        begun = world.reset([{"question": str(i)} for i in range(8)])
        started = time.monotonic()
        outcomes = world.step({i: f"text {i}" for i in (3, 1, 0, 2, 7, 5, 6, 4)}, 1)
        found[name] = begun, list(outcomes.items()), time.monotonic() - started
    assert found["threads"][:2] == found["inline"][:2]
    assert found["threads"][1][0][1].observation == "3 heard text 3"
    assert found["inline"][2] >= 8 * 0.05 > found["threads"][2]


def test_what_is_still_to_be_paid_is_asked_for_at_the_last_turn():
    class Pays(Echo):
        def settle(self):
            return 0.25

    world = VectorEnv(Pays)
    world.reset(ROWS)
    plain = world.step({0: "a", 2: "bye"}, 1)
    found = world.step({0: "a", 2: "bye"}, 2, last=True)
    assert found[0].reward == plain[0].reward + 0.25 and not found[0].done
    assert found[2].done and found[2].reward == plain[2].reward, "one that ended has been paid"
