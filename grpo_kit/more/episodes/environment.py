"""Environments: text in, text out. VectorEnv runs and checks many, slow ones in threads with a time limit."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple, Protocol

from grpo_kit._support.argument_checks import check_choice, is_number
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

    def __init__(
        self, make: Callable[[], Environment], *, seconds: float | None = None
    ) -> None:
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
                raise EpisodeError(
                    f"the environment could not be made: {_described(error)}"
                ) from error
        self._playing, self._rows = self._pool[: len(rows)], list(rows)
        for i, environment in enumerate(self._playing):
            for method in ("reset", "step"):
                if not callable(getattr(environment, method, None)):
                    raise EpisodeError(
                        f"{self._name(i)} has no {method}(); see grpo_kit.more.episodes.Environment"
                    )
        observations = self._call(
            "reset", {i: (dict(row),) for i, row in enumerate(rows)}, turn=0
        )
        for i, observation in observations.items():
            self._check_text(observation, i, turn=0)
        return list(observations.values())

    def step(
        self, texts: Mapping[int, str], turn: int, *, last: bool = False
    ) -> dict[int, Outcome]:
        """One turn (from 1) of the episodes: {episode number: the model's text} -> {episode number: Outcome}.

        last: this is the last possible turn; if an environment has settle(), its reward is added.
        """
        for i in texts:
            if getattr(self._playing[i], "invalid", False):
                self._playing[i].invalid = False
        results = self._call("step", {i: (text,) for i, text in texts.items()}, turn)
        outcomes = {i: self._outcome(result, i, turn) for i, result in results.items()}
        if last:
            unfinished = [i for i, outcome in outcomes.items() if not outcome.done]
            unpaid = [i for i in unfinished if hasattr(self._playing[i], "settle")]
            for i, settled in self._call("settle", dict.fromkeys(unpaid, ()), turn).items():
                reward = outcomes[i].reward + self._reward(settled, i, turn)
                outcomes[i] = outcomes[i]._replace(reward=reward)
        return outcomes

    def _outcome(self, result: Any, i: int, turn: int) -> Outcome:
        if not isinstance(result, tuple) or len(result) != 3:
            raise EpisodeError(
                f"{self.where(i, turn)}: step() gave {result!r:.200}; it has to give (observation, reward, done)"
            )
        observation, reward, done = result
        self._check_text(observation, i, turn)
        reward = self._reward(reward, i, turn)
        invalid = bool(getattr(self._playing[i], "invalid", False))
        return Outcome(observation, reward, bool(done), invalid)

    def _reward(self, value: Any, i: int, turn: int) -> float:
        try:
            reward = float(value)
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise EpisodeError(
                f"{self.where(i, turn)}: the reward is {value!r:.200}; it has to be a finite number"
            )
        return reward

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

    def _call(self, method: str, arguments: Mapping[int, tuple], turn: int) -> dict[int, Any]:
        """The results of a method, by episode number; arguments: by episode number."""
        calls = {
            i: partial(getattr(self._playing[i], method), *args)
            for i, args in arguments.items()
        }
        if self.seconds is not None:
            calls = self._in_threads(calls, turn)
        results = {}
        for i, call in calls.items():
            try:
                results[i] = call()
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                raise EpisodeError(f"{self.where(i, turn)}: {_described(error)}") from error
        return results

    def _in_threads(
        self, calls: Mapping[int, Callable[[], Any]], turn: int
    ) -> dict[int, Callable[[], Any]]:
        """Functions that return, or raise, what the calls did: these have all ended."""
        futures: dict[int, Future] = {i: Future() for i in calls}
        try:
            for i, call in calls.items():
                # Daemons: a thread that never returns must not keep Python from ending.
                threading.Thread(target=_resolve, args=(futures[i], call), daemon=True).start()
            wait(futures.values(), timeout=self.seconds)
            for i, future in futures.items():
                if not future.done():
                    raise EpisodeError(
                        f"{self.where(i, turn)}: no answer within {self.seconds:g} s"
                    )
        except BaseException:  # including the stop button
            self._pool = []  # its objects may still be running
            raise
        return {i: future.result for i, future in futures.items()}

    def _name(self, i: int) -> str:
        return f"environment {type(self._playing[i]).__name__}"

    def where(self, i: int, turn: int) -> str:
        """The environment, row and turn in words."""
        row = self._rows[i]
        columns = {name: value for name, value in row.items() if name != "question"}
        row_text = f"row {row.get('question', row)!r:.120}"
        if columns:
            row_text += f" {row_key(columns):.160}"
        moment = "reset" if turn == 0 else f"turn {turn}"
        return f"{self._name(i)}, {row_text}, {moment}"


def _resolve(future: Future, call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # raised in the waiting thread
        future.set_exception(error)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def row_key(row: Mapping[str, Any]) -> str:
    """The row as text, equal for equal rows."""
    return json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)


def _check_credit(credit: str, discount: float) -> None:
    """Raises ValueError for an unknown credit, a discount outside (0, 1], and one that credit="episode" leaves out."""
    check_choice("credit", credit, ("episode", "return", "state"))
    if not is_number(discount) or not 0 < discount <= 1:
        raise ValueError(f"discount={discount!r} must lie in (0, 1], such as 0.9")
    if credit == "episode" and discount != 1:
        raise ValueError(
            f"discount={discount!r} is not used by credit='episode'; use credit='return' or 'state'"
        )
