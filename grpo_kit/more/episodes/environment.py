"""Environments: text in, text out. VectorEnv runs and checks many, slow ones in threads with a time limit."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from grpo_kit.rewards.scoring import RewardError

PART = "episode_return"  # the one part of an episode's reward, by its name in the record
LONGEST = 20_000  # characters of an observation; a longer one is no text for a model


class Environment(Protocol):
    """A world of text. One object plays one episode at a time, and many episodes one after another.

    reset(row): begin the episode of this row of the task, a dict; returns the first observation. All randomness
    must derive from the row, so that the episodes of a group meet the same world.
    step(text): the model's response to the last observation, with the prefill, without a thought; returns (observation,
    reward, done). An unreadable action raises no exception: report it in the observation, and set `self.invalid =
    True` for that step. The rewards of an episode are added up; at best the sum lies in [0, 1].
    settle() -> reward: optional, for an episode that the turn limit ends and not step.
    """

    def reset(self, row: Mapping[str, Any]) -> str: ...

    def step(self, text: str) -> tuple[str, float, bool]: ...


class EpisodeError(RewardError, RuntimeError):
    """An environment raised or broke its contract; the message names the environment, the row and the turn."""


class Outcome(NamedTuple):
    """The result of a step. invalid: the environment could not read the action."""

    observation: str
    reward: float
    done: bool
    invalid: bool


class VectorEnv:
    """The environments of a rollout: one per episode, reused in the next rollout.

    make: returns a new environment, such as its class. seconds: limit for a reset or step; the episodes then run in
    parallel threads. None: one after the other in this thread, for environments that take microseconds.
    Raises EpisodeError.
    """

    def __init__(self, make: Callable[[], Environment], *, seconds: float | None = None) -> None:
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds={seconds!r} must be above 0, or None for no threads")
        self.make, self.seconds = make, seconds
        self._pool: list[Environment] = []
        self._playing: list[Environment] = []
        self._rows: list[Mapping[str, Any]] = []

    def reset(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Begin one episode a row; returns the first observations."""
        while len(self._pool) < len(rows):
            try:
                self._pool.append(self.make())
            except Exception as error:
                raise EpisodeError(f"the environment could not be made: {_said(error)}") from error
        self._playing, self._rows = self._pool[: len(rows)], list(rows)
        for i, environment in enumerate(self._playing):
            for method in ("reset", "step"):
                if not callable(getattr(environment, method, None)):
                    raise EpisodeError(
                        f"{self._name(i)} has no {method}(); see grpo_kit.more.episodes.Environment"
                    )
        everyone = range(len(rows))
        calls = [lambda i=i: self._playing[i].reset(dict(self._rows[i])) for i in everyone]
        found = self._call(calls, list(everyone), turn=0)
        for i, observation in enumerate(found):
            self._check_text(observation, i, turn=0)
        return found

    def step(self, texts: Mapping[int, str], turn: int, *, last: bool = False) -> dict[int, Outcome]:
        """One turn (from 1) of the episodes: {episode number: the model's text} -> {episode number: Outcome}.

        last: this is the last possible turn; if an environment has settle(), its reward is added.
        """
        who = list(texts)
        for i in who:
            if getattr(self._playing[i], "invalid", False):
                self._playing[i].invalid = False
        calls = [lambda i=i: self._playing[i].step(texts[i]) for i in who]
        made = {
            i: self._checked(found, i, turn)
            for i, found in zip(who, self._call(calls, who, turn), strict=True)
        }
        open_still = (
            [i for i in who if not made[i].done and hasattr(self._playing[i], "settle")] if last else []
        )
        settled = self._call([lambda i=i: self._playing[i].settle() for i in open_still], open_still, turn)
        for i, earned in zip(open_still, settled, strict=True):
            made[i] = made[i]._replace(reward=made[i].reward + self._reward(earned, i, turn))
        return made

    def _reward(self, given: Any, i: int, turn: int) -> float:
        try:
            reward = float(given)
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise EpisodeError(
                f"{self.where(i, turn)}: the reward is {given!r:.200}; it has to be a finite number"
            )
        return reward

    def _checked(self, found: Any, i: int, turn: int) -> Outcome:
        if not isinstance(found, tuple) or len(found) != 3:
            raise EpisodeError(
                f"{self.where(i, turn)}: step() gave {found!r:.200}; it has to give (observation, reward, done)"
            )
        observation, reward, done = found
        self._check_text(observation, i, turn)
        reward = self._reward(reward, i, turn)
        return Outcome(observation, reward, bool(done), bool(getattr(self._playing[i], "invalid", False)))

    def _check_text(self, observation: Any, i: int, turn: int) -> None:
        if not isinstance(observation, str):
            raise EpisodeError(
                f"{self.where(i, turn)}: the observation is a {type(observation).__name__}; it has to be text"
            )
        if len(observation) > LONGEST:
            raise EpisodeError(
                f"{self.where(i, turn)}: the observation has {len(observation)} characters, more than {LONGEST}; let "
                f"the environment shorten it. It begins {observation[:80]!r}"
            )

    def _call(self, calls: Sequence[Callable[[], Any]], who: Sequence[int], turn: int) -> list[Any]:
        if self.seconds is None:
            return [self._one(call, i, turn) for call, i in zip(calls, who, strict=True)]
        made: list[list[Any]] = [[] for _ in calls]
        threads = []
        try:
            for call, box in zip(calls, made, strict=True):
                # Daemons: a thread that never returns must not keep Python from ending.
                threads.append(threading.Thread(target=_into, args=(call, box), daemon=True))
                threads[-1].start()
            end = time.monotonic() + self.seconds
            for thread, box, i in zip(threads, made, who, strict=True):
                thread.join(max(0.0, end - time.monotonic()))
                if not box:
                    raise EpisodeError(f"{self.where(i, turn)}: no answer within {self.seconds:g} s")
        except BaseException:  # including the stop button
            self._pool = []  # its objects may still be running
            raise
        return [self._one(lambda box=box: _out(box), i, turn) for box, i in zip(made, who, strict=True)]

    def _one(self, call: Callable[[], Any], i: int, turn: int) -> Any:
        try:
            return call()
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            raise EpisodeError(f"{self.where(i, turn)}: {_said(error)}") from error

    def _name(self, i: int) -> str:
        return f"environment {type(self._playing[i]).__name__}"

    def where(self, i: int, turn: int) -> str:
        """The environment, row and turn in words."""
        row = self._rows[i]
        told = row.get("question", row) if isinstance(row, Mapping) else row
        others = {k: v for k, v in row.items() if k != "question"} if isinstance(row, Mapping) else {}
        rest = f" {row_key(others):.160}" if others else ""
        return f"{self._name(i)}, row {told!r:.120}{rest}, {'reset' if turn == 0 else f'turn {turn}'}"


def _into(call: Callable[[], Any], box: list[Any]) -> None:
    try:
        box.append((call(), None))
    except BaseException as error:  # raised in the waiting thread
        box.append((None, error))


def _out(box: list[Any]) -> Any:
    value, error = box[0]
    if error is not None:
        raise error
    return value


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def row_key(row: Mapping[str, Any]) -> str:
    """The row as text, equal for equal rows."""
    return json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
