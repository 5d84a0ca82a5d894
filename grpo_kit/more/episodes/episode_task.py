"""EpisodeTask: rows, an environment, the model's view of it, and the scores of policies without a model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

from grpo_kit._support.argument_checks import check_whole
from grpo_kit.loop.protocols import Task
from grpo_kit.more.episodes.environment import (
    PART,
    Environment,
    VectorEnv,
    _check_credit,
    row_key,
)
from grpo_kit.more.episodes.observation import View
from grpo_kit.more.episodes.recorded_env import RecordedEnv

# (row, generator) -> f(observation) -> response
Policy = Callable[[Mapping[str, Any], random.Random], Callable[[str], str]]
_LONGEST_EXAMPLE = 100  # turns
_MOST_PLANS = 4096  # largest number of action sequences to try


@dataclass(frozen=True)
class EpisodeTask(Task):
    """A task of several turns.

    train, held_out: rows with "question" (the goal, as the model reads it) and the columns that the environment's reset
    needs; no row is in both.
    environment: returns a new one, such as its class. view: the model's input each turn. max_turns: an episode ends
    there at the latest. max_completion_tokens: of each turn.
    success: an episode is right if its rewards sum to at least this value.
    credit: what a turn is credited with. "episode": the episode's advantage in its group (rewards summed). "return":
    what was earned from that turn on, against the other episodes' at that turn. "state": the episode's advantage, plus
    that of the return among turns of the group with the same prompt (GiGPO, arXiv:2505.10978).
    discount: of later rewards, a turn, in (0, 1]; for "return" and "state".
    seconds: limit for a reset or step, with all episodes in threads; None: a step takes microseconds.
    optimum: a policy that plays perfectly, if there is one.
    actions: all actions, for policies that read no observation: see blind. "ask {person}" is filled from the row by
    str.format(**row), so that such a policy may know the goal; double a brace that is not part of a field.
    file: "path:name", where tasks.from_file found it.
    Raises ValueError naming the field that does not fit.
    """

    name: str
    train: list[dict]
    held_out: list[dict]
    environment: Callable[[], Environment]
    view: View = field(default_factory=View)
    max_turns: int = 4
    max_completion_tokens: int = 16
    success: float = 1.0
    credit: str = "episode"
    discount: float = 1.0
    seconds: float | None = None
    optimum: Policy | None = None
    actions: tuple[str, ...] = ()
    file: str | None = None

    answers_are, is_correct = "actions", "by the sum of its rewards"
    rewards, paid_parts = (), (PART,)  # its environment pays
    system = property(lambda self: self.view.system)
    prefill = property(lambda self: self.view.prefill)
    examples = property(lambda self: tuple(self.view.example_pairs()))

    def __post_init__(self) -> None:
        if not isinstance(self.view, View):
            raise ValueError(
                f"view={self.view!r:.80} is a {type(self.view).__name__}; give an episodes.View(...)"
            )
        for split in ("train", "held_out"):
            rows = getattr(self, split)
            if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
                raise ValueError(
                    f"task {self.name!r}: {split} is a {type(rows).__name__}; give a list of dicts, such as "
                    "frame.to_dict('records')"
                )
            if not rows:
                raise ValueError(f"task {self.name!r}: {split} is empty; give at least one row")
            for place, row in enumerate(rows):
                question = row.get("question")
                if not isinstance(question, str) or not question.strip():
                    raise ValueError(
                        f"task {self.name!r}: {split} row {place} has the question {question!r}; give the goal as text"
                    )
        shared = {row_key(row) for row in self.train} & {row_key(row) for row in self.held_out}
        if shared:
            raise ValueError(
                f"task {self.name!r}: {len(shared)} rows are in train and held_out, such as {min(shared):.200}; the "
                "model would be tested on what it trained on"
            )
        for name in ("max_turns", "max_completion_tokens"):
            check_whole(name, getattr(self, name))
        _check_credit(self.credit, self.discount)

    def world(self) -> VectorEnv:
        """Environments for a rollout."""
        return VectorEnv(self.environment, seconds=self.seconds)

    def seams(self, model: Any, config: Any) -> Any:
        """An EpisodeSample, by the engine where it knows the model, and the update."""
        from grpo_kit.more.episodes._episode_sample import fast_episodes

        return fast_episodes(model, config)

    def play(
        self,
        model: Any,
        tokenizer: Any,
        rows: Sequence[dict],
        asked: Any,
    ) -> Any:
        """Episodes of the rows, judged: episodes.episode_answers.Played."""
        from grpo_kit.more.episodes._episode_answers import play

        return play(self, model, tokenizer, rows, asked)

    def questions(self, rows: Sequence[dict]) -> list[str]:
        """The messages of the rows' first turns; of slow environments, which are called only when played, the goals."""
        goals = [row["question"] for row in rows]
        observations = goals if self.seconds else self.world().reset(rows)
        pairs = zip(goals, observations, strict=True)
        return [
            self.view.message(goal, [], observation or goal).strip()
            for goal, observation in pairs
        ]

    def made_of(self) -> dict[str, Any]:
        """The parts of its digest besides name, rows and length."""
        parts = {"view": asdict(self.view), "turns": self.max_turns, "success": self.success}
        if self.credit != "episode":
            parts |= {"credit": self.credit, "discount": self.discount}
        return parts

    @property
    def strategies(self) -> tuple[str, ...]:
        """The actions of policies without observations; none if a step costs time, or if a RecordedEnv counts steps."""
        if self.seconds or isinstance(self.environment, RecordedEnv):
            return ()
        return self.actions

    def best_constant(self, rows: Sequence[dict] | None = None) -> tuple[str, float]:
        """Name and success, in [0, 1], of the best policy that reads no observation, on the rows (default held_out)."""
        return next(iter(self.blind(rows).items()))

    # ---- without a model ------------------------------------------------------------------------------------------

    def score(
        self, policy: Policy, rows: Sequence[dict] | None = None, *, seed: int = 0
    ) -> float:
        """Share of the rows (default held_out) on which the policy succeeds."""
        rows = self.held_out if rows is None else rows
        return fmean(self._successes(policy, rows, seed))

    def _successes(self, policy: Policy, rows: Sequence[dict], seed: int = 0) -> list[bool]:
        rng, world = random.Random(seed), self.world()
        observations = dict(enumerate(world.reset(rows)))
        players = [policy(row, rng) for row in rows]
        totals = [0.0] * len(rows)
        for turn in range(1, self.max_turns + 1):
            texts = {}
            for i, observation in observations.items():
                completion = self.view.completion_saying(players[i](observation))
                texts[i] = self.view.said(self.view.prefill + completion)
            outcomes = world.step(texts, turn, last=turn == self.max_turns)
            for i, outcome in outcomes.items():
                totals[i] += outcome.reward
            observations = {i: o.observation for i, o in outcomes.items() if not o.done}
            if not observations:
                break
        return [total >= self.success for total in totals]

    def blind(self, rows: Sequence[dict] | None = None, *, seed: int = 0) -> dict[str, float]:
        """Scores of policies that read no observation, best first: "random", and the best fixed sequence of actions.

        Sequences: all those of up to n actions, each repeated until the episode ends. n: the largest for
        which there are at most 4,096, from 1 to max_turns. random: the mean of 8 plays. {} for a task without actions.
        Raises ValueError for an action with a field that a row lacks.
        """
        if not self.actions:
            return {}
        rows = self.held_out if rows is None else rows
        key = (seed, *map(row_key, rows))
        if key not in self._blind_scores:
            plans: list[tuple[str, ...]] = []
            for length in range(1, self._longest_plan() + 1):
                plans += itertools.product(self.actions, repeat=length)
            n_right = [sum(successes) for successes in self._plan_successes(plans, rows)]
            best = max(n_right)
            name = f"always {', '.join(plans[n_right.index(best)])}"
            chance = _at_random(self.actions)
            plays = [self.score(chance, rows, seed=seed + k) for k in range(8)]
            scores = {name: best / len(rows), "random": fmean(plays)}
            ranked = sorted(scores.items(), key=lambda item: -item[1])
            self._blind_scores[key] = dict(ranked)
        return dict(self._blind_scores[key])

    @cached_property
    def _blind_scores(self) -> dict[tuple, dict[str, float]]:
        """The results of blind, by seed and rows: every evaluation needs them."""
        return {}

    @cached_property
    def _row_successes(self) -> dict[str, tuple[bool, ...]]:
        """Of each row that was played: the success of every plan."""
        return {}

    def _plan_successes(
        self, plans: Sequence[Sequence[str]], rows: Sequence[dict]
    ) -> Iterator[tuple[bool, ...]]:
        """Of each plan: its success on each of the rows. A row is played once, whatever rows it is among later."""
        new = [row for row in rows if row_key(row) not in self._row_successes]
        if new:
            by_plan = [self._successes(_planned(plan), new) for plan in plans]
            for row, successes in zip(new, zip(*by_plan, strict=True), strict=True):
                self._row_successes[row_key(row)] = successes
        return zip(*(self._row_successes[row_key(row)] for row in rows), strict=True)

    def _longest_plan(self) -> int:
        """The longest length at which all sequences of actions are tried."""
        length = 1
        while length < self.max_turns and len(self.actions) ** (length + 1) <= _MOST_PLANS:
            length += 1
        return length

    def __repr__(self) -> str:
        return f"EpisodeTask({self.name!r}, train={len(self.train)}, held_out={len(self.held_out)})"


def worked(
    environment: Environment, policy: Policy, row: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """The (observation, response) turns of a policy's episode, for a worked example."""
    respond = policy(row, random.Random(0))
    turns: list[tuple[str, str]] = []
    observation, done = environment.reset(row), False
    while not done:
        if len(turns) == _LONGEST_EXAMPLE:
            raise ValueError(
                f"row={row!r:.200}: the policy did not end the episode in {_LONGEST_EXAMPLE} turns"
            )
        response = respond(observation)
        turns.append((observation, response))
        observation, _, done = environment.step(response)
    return turns


def _planned(plan: Sequence[str]) -> Policy:
    def policy(row: Mapping[str, Any], rng: random.Random) -> Callable[[str], str]:
        actions = itertools.cycle([_filled(action, row) for action in plan])
        return lambda observation: next(actions)

    return policy


def _at_random(actions: Sequence[str]) -> Policy:
    def policy(row: Mapping[str, Any], rng: random.Random) -> Callable[[str], str]:
        filled = [_filled(action, row) for action in actions]
        return lambda observation: rng.choice(filled)

    return policy


def _filled(action: str, row: Mapping[str, Any]) -> str:
    """The action with its fields filled from the row."""
    if "{" not in action and "}" not in action:
        return action
    try:
        return action.format_map(row)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"action {action!r} has a field ({error}) that a row lacks, which has {', '.join(row)}; write {{{{ or }}}} "
            "for a brace that is none of a field's"
        ) from error
