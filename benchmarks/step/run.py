"""The measurements themselves: wait for a quiet machine, measure in a process of its own, check, keep."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.result import ROOT
from benchmarks.step.busy import MOST, is_busy, wait_until_quiet
from benchmarks.step.phases import Step
from benchmarks.step.processes import code_state, in_a_child
from benchmarks.step.unfinished import Unfinished
from benchmarks.step.workload import Workload

# Relative, for loss and gradient norm. Rounding alone: on this work SmolLM2's gradient of layer 0's v_proj is off by
# 0.2 to 0.3 % of the float64 one, packed or padded, and it carries the norm; the other parameters by 0.002 %.
TOLERANCE = {"float32": 5e-3, "bfloat16": 5e-2}
BEFORE = "kit-before"


@dataclass
class Measured:
    """A step, the share of the cores that others took before it, the code's state, and the arm's round."""

    step: Step
    before: float | None
    code: dict[str, str | None]
    round: int

    @property
    def busy(self) -> bool:
        return is_busy(self.before, self.step.others)


class Runner:
    """Measures arms on one piece of work.

    options: of the command line (seed, cuda, dtype, busy, before, ...). prepared: what child.prepare answered.
    """

    def __init__(self, options: Namespace, prepared: dict[str, Any], kept: Unfinished) -> None:
        self.options, self.prepared, self.kept = options, prepared, kept
        self.work = Workload(**prepared["work"])
        self._seconds: list[float] = []  # of each measurement with all that belongs to it
        self._states: dict[Path, dict[str, str | None]] = {}

    def measure(
        self, arm: str, tuned: tuple[int, bool], round_: int = 0, what: str = ""
    ) -> Measured | str:
        """One measurement, or why there is none. what: more of its name.

        Raises SystemExit on a busy machine that --busy does not allow.
        """
        options = self.options
        kit = Path(options.before).resolve() if arm == BEFORE else ROOT
        if kit not in self._states:
            self._states[kit] = code_state(kit)
        code = self._states[kit]
        name = f"{what} {round_} {arm} {tuned}"
        found = self.kept.get(name, code)
        if found is None:
            begin = time.perf_counter()
            before = self._quiet(arm)
            request = {
                "do": "measure",
                "model": model_of(options),
                "work": self.prepared["work"],
                "arm": arm,
            }
            # A run has many steps: what its first two pay (memory, optimizer state, captures) is in no arm's time.
            request |= {"tuned": tuned, "warmup": 0 if options.size == "smoke" else 2}
            answer = in_a_child(request, kit, fork=not options.before)
            found = {"answer": answer, "before": before}
            self.kept.add(name, found, code)
            self._seconds.append(time.perf_counter() - begin)
        if "error" in found["answer"]:
            return found["answer"]["error"]
        measured = Measured(Step(**found["answer"]), found["before"], code, round_)
        if is_busy(measured.step.others):
            print(
                f"  {arm}: WARNING: others took {measured.step.others:.0%} of the cores meanwhile; the "
                "measurement is marked",
                flush=True,
            )
        return measured

    @property
    def seconds_a_measurement(self) -> float:
        """The mean of those that this call made, loading and waiting included; 0 before the first."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else 0.0

    def _quiet(self, arm: str) -> float | None:
        """The share of others now; smoke sizes say nothing about speed and wait for nobody."""
        if self.options.size == "smoke":
            return None
        share = wait_until_quiet(0.0 if self.options.busy else 60.0)
        if is_busy(share) and not self.options.busy:
            raise SystemExit(
                f"before {arm}: other processes take {share:.0%} of the cores, for a minute now, above {MOST:.0%}: "
                "seconds would say little. What was measured is kept: run the same command again on a quiet machine, "
                "or with --busy to go on and have it noted."
            )
        return share


def check_same_work(steps: dict[str, Step], work: Workload, tolerance: float) -> None:
    """Stop unless all did the same: the work's tokens, equal rewards, loss and gradient norm within the tolerance.

    Loss is a mean over tokens of numbers around 1, so below 0.1 it is compared with 0.1.
    Raises SystemExit that shows both.
    """
    (arm, one), (other, two) = list(steps.items())[0], list(steps.items())[-1]
    for name, step in steps.items():
        if step.completion_ids != work.completion_ids:
            counts = [sum(map(len, ids)) for ids in (step.completion_ids, work.completion_ids)]
            raise SystemExit(
                f"{name} trained on other completions: {counts[0]} tokens, the work has {counts[1]}"
            )
    if one.rewards != two.rewards:
        raise SystemExit(f"rewards differ: {arm} {one.rewards}, {other} {two.rewards}")
    for name, least in (("loss", 0.1), ("grad_norm", 0.0)):
        a, b = getattr(one, name), getattr(two, name)
        if not abs(a - b) <= tolerance * max(abs(b), least):
            raise SystemExit(
                f"{name} differs by more than {tolerance:g} of its size: {arm} {a!r}, {other} {b!r}"
            )


def model_of(options: Namespace) -> dict[str, Any]:
    """Which weights, for child.py."""
    return {
        "name": None if options.random_weights else options.model,
        "tiny": options.size == "smoke",
        "dtype": options.dtype,
        "tuning": options.tuning,
        "seed": options.seed,
        "cuda": options.cuda,
        "memory_cap": options.memory_cap_gib,
    }
