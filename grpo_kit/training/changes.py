"""A tweak is obeyed or refused: what a user changes while a run goes on, and where it takes effect.

A change waits until the next rollout buffer begins, so that every rollout is sampled, scored and trained on under one
set of numbers. changes.jsonl in the run's folder keeps each with the first step that was trained with it; a run that
is resumed makes them again, each at its step.
Longer than 300 lines because what is asked, what takes effect and what the record has of it are read as a whole.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from grpo_kit.record.control import CHANGEABLE, CHANGES, check_change, in_a_file, read_changes
from grpo_kit.record.files import REDONE, write_whole
from grpo_kit.record.lines import LineFile
from grpo_kit.schedules import schedule_from
from grpo_kit.training.asked import CANNOT_TRAVEL, asked_of_any
from grpo_kit.training.knobs import asked_of, check_own_options, knob, why_not

# Fields of GRPOConfig that the running trainer reads when it needs them: assigning to them is enough.
_READ_LATE = {
    "save_total_limit", "save_only_model", "save_strategy", "eval_strategy", "eval_delay", "eval_on_start",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "per_device_eval_batch_size",
    "log_completions", "num_completions_to_print", "disable_tqdm", "logging_nan_inf_filter", "hub_strategy",
}  # fmt: skip
# What trl keeps beside args, and reads in place of it: its name -> the change that it is.
_ATTRIBUTES = {
    "temperature": "temperature",
    "beta": "beta",
    "epsilon_low": "epsilon",
    "epsilon_high": "epsilon_high",
}
_FIXED = (
    "num_generations", "max_completion_length", "num_iterations", "loss_type", "scale_rewards", "train_dataset",
    "eval_dataset", "reward_funcs", "top_p", "top_k", "min_p", "repetition_penalty",
)  # fmt: skip


class Changes:
    """The changes of one trainer.

    ask() takes one from any thread. Around train(): open() and prepare() before transformers' loop, begin() once a
    checkpoint is loaded, at_buffer() where a rollout buffer begins. told: f(step, text) for each change that took
    effect, and for a refusal.
    """

    def __init__(self, trainer: Any, told: Callable[[int, str], None], say: Callable[[str], None]) -> None:
        self.trainer, self._told, self._say = trainer, told, say
        self._asked: deque[tuple[dict[str, Any], str]] = deque()  # values, and who asked
        self._schedules: dict[str, Any] = {}  # by their text: those that no file can hold
        self._later: list[dict[str, Any]] = []  # lines of changes.jsonl of steps still to come
        self._file: LineFile | None = None
        self.begun_steps = 0  # that the run was begun with: its warmup stays as long as it was then
        self._first = {name: self.keep(knob(name).get(trainer)) for name in CHANGEABLE}  # as constructed
        self._seen = self._look()

    # ---- asking -------------------------------------------------------------------------------------------------

    def ask(self, values: Mapping[str, Any], by: str = "change") -> None:
        """Take effect at the next rollout buffer. Raises ValueError, and changes nothing, for what cannot be."""
        if not values:
            raise ValueError(f"no change was named; what can be changed: {', '.join(CHANGEABLE)}")
        for name, value in values.items():
            check_change(name, value)
            if reason := why_not(self.trainer, name, value):
                raise ValueError(f"{name}={value!r} cannot be: {reason}")
        self._asked.append(({name: self.keep(value) for name, value in values.items()}, by))

    def hear(self, request: Any) -> None:
        """A change that came by the control folder: taken, or refused in words and in changes.jsonl."""
        values = request.get("change") if isinstance(request, dict) else None
        try:
            if not isinstance(values, dict):
                raise ValueError(
                    f"request {request!r} is not known; write {{'change': {{'learning_rate': 1e-5}}}}"
                )
            self.ask(values, "control")
        except ValueError as error:
            step = self.trainer.state.global_step + 1
            self._write(
                {"step": step, "refused": values if isinstance(values, dict) else request, "why": str(error)}
            )
            self._told(step, f"refused: {error}")

    def waiting(self, name: str) -> Any:
        """The value that was asked for last and has not taken effect; None if there is none."""
        return next((values[name] for values, _ in reversed(self._asked) if name in values), None)

    def take_over_assigned(self, *, running: bool) -> None:
        """What was assigned to trainer.args or the trainer since the kit last looked becomes a change, or is refused.

        Raises ValueError where it can be neither; while the run goes on it is put back, and said.
        """
        for name, (before, now) in self._look_again().items():
            change = _ATTRIBUTES.get(name.removeprefix("trainer.")) or name.removeprefix("args.")
            owner = self.trainer if name.startswith("trainer.") else self.trainer.args
            if change in _READ_LATE:
                continue
            setattr(owner, name.partition(".")[2], before)
            try:
                if change not in CHANGEABLE:
                    raise ValueError(
                        f"{name} was changed after the trainer was made, from {_short(before)} to {_short(now)}, and a "
                        f"run cannot change it: it is back. For another make a new trainer, with a new folder"
                    )
                self.ask({change: now.tolist() if isinstance(now, torch.Tensor) else now}, "assigned")
            except ValueError as error:
                if not running:
                    raise
                self._say(f"Refused: {error}.")
        self._seen = self._look()

    # ---- around the steps ---------------------------------------------------------------------------------------

    def open(self, folder: Path) -> None:
        """A run begins in this folder, or goes on."""
        if self._file is None or self._file.path.parent != folder:
            self._file = LineFile(folder / CHANGES)

    def prepare(self, folder: Path, step: int, config: Mapping[str, Any] | None) -> None:
        """Before transformers' loop: the numbers of the next step as the run's record has them.

        step: steps done. config: its run.json where it goes on, else None. What this trainer was made with,
        and the run was not, is asked for anew. Raises ValueError for a schedule that no file holds and nobody gave.
        """
        if config is not None:
            check_own_options(config.get("trainer") or {}, self.trainer.own_options())
        begun = asked_of(config) if config is not None else {}
        self._share()
        lines = self._lines(folder)
        for line in lines:
            begun |= line["change"] if line.get("by") == "made so" else {}
        self.begun_steps = begun.get("max_steps", self._first["max_steps"])
        first = {name: value for name, value in self._first.items() if value is not None}
        anew = {name: value for name, value in first.items() if name in begun and begun[name] != value}
        if anew:
            self._asked.appendleft((anew, "made so"))
        wanted = {name for values, _ in self._asked for name in values}
        self._drop(
            folder, [line for line in lines if line["step"] > step and wanted & set(line["change"])], wanted
        )
        lines = self._lines(folder)
        self._later = [line for line in lines if line["step"] > step]
        held = {name: begun.get(name, value) for name, value in first.items()}
        for line in lines:
            held |= line["change"] if line["step"] <= step else {}
        for name, value in held.items():
            if self.keep(knob(name).get(self.trainer)) != value:
                knob(name).set(self.trainer, self._value(name, value))
        self._seen = self._look()
        if step >= self.trainer.args.max_steps > 0:  # else the loop would not begin
            self._lengthen(step)

    def begin(self) -> None:
        """A checkpoint may have been loaded, and its save_steps and eval_steps are the old ones."""
        self.trainer.state.compute_steps(self.trainer.args, self.trainer.state.max_steps)

    def at_the_end(self) -> bool:
        """The last step is done: are there more after all, asked for meanwhile or in the record of the next step?"""
        state = self.trainer.state
        self._share()
        self._lengthen(state.global_step)
        return state.global_step < state.max_steps

    def _lengthen(self, step: int) -> None:
        for line in self._later:
            if line["step"] == step + 1 and "max_steps" in line["change"]:
                self._apply({"max_steps": line["change"]["max_steps"]}, "change", step, again=True)
        for values, by in list(self._asked):  # another thread may add one
            if "max_steps" in values:
                self._apply({"max_steps": values.pop("max_steps")}, by, step)

    def at_buffer(self) -> None:
        """A rollout buffer begins: what was asked for takes effect, then what the record has of this step."""
        step = self.trainer.state.global_step
        self.take_over_assigned(running=True)
        self._share()
        for line in [line for line in self._later if line["step"] == step + 1]:
            self._apply(line["change"], line.get("by", "change"), step, again=True)
        self._later = [line for line in self._later if line["step"] > step + 1]
        while self._asked:
            values, by = self._asked.popleft()
            self._apply(values, by, step)

    def _share(self) -> None:
        """Of several processes: what any of them was asked for counts for all, in one order, from the same step on."""
        mine = [self._asked.popleft() for _ in range(len(self._asked))]  # another thread may add one
        asked, refused = asked_of_any(self.trainer.ranks, mine)
        self._asked.extendleft(reversed(asked))
        for values in refused:
            self._refuse(values, CANNOT_TRAVEL, self.trainer.state.global_step + 1)

    def _refuse(self, values: Mapping[str, Any], why: str, step: int) -> None:
        self._write({"step": step, "refused": values, "why": why})
        self._told(step, f"refused: {', '.join(f'{n}={_short(v)}' for n, v in values.items())}: {why}")

    def _apply(self, values: Mapping[str, Any], by: str, step: int, *, again: bool = False) -> None:
        trainer, made, was = self.trainer, {}, {}
        for name, value in values.items():
            value, before = self._value(name, value), self.keep(knob(name).get(trainer))
            if reason := why_not(trainer, name, value):
                self._refuse({name: self.keep(value)}, reason, step + 1)
                continue
            knob(name).set(trainer, value)
            if before != self.keep(value) or by == "made so":
                made[name], was[name] = self.keep(value), before
        self._seen = self._look()
        shown = {name: value for name, value in made.items() if value != was[name]}
        if made and not again:
            self._write({"step": step + 1, "change": made, "was": was, "by": by})
        if shown:
            self._told(step + 1, ", ".join(f"{n} {_short(was[n])} -> {_short(v)}" for n, v in shown.items()))

    # ---- records ------------------------------------------------------------------------------------------------

    def _write(self, line: Mapping[str, Any]) -> None:
        if not self.trainer.accelerator.is_main_process or self._file is None:
            return
        self._file.waiting.append((json.dumps(line, default=str) + "\n").encode())
        self.flush()

    def flush(self) -> bool:
        """Write what waits for room on the disk; True if nothing waits any more."""
        try:
            if self._file is not None:
                self._file.write()
        except OSError:
            return False
        return True

    def _lines(self, folder: Path) -> list[dict[str, Any]]:
        """The changes in the run's record, as the main process finds it."""
        lines = self.trainer.ranks.from_main(lambda: read_changes(folder))
        return [line for line in lines if "change" in line]

    def _drop(self, folder: Path, lines: list[dict[str, Any]], names: set[str]) -> None:
        """Later changes of what is changed anew move to redone/; nothing is deleted."""
        if not lines or not self.trainer.accelerator.is_main_process:
            return
        aside = LineFile(folder / REDONE / CHANGES)
        aside.path.parent.mkdir(exist_ok=True)
        aside.waiting += [(json.dumps(line) + "\n").encode() for line in lines]
        aside.write()
        kept = []
        for line in read_changes(folder):
            if line in lines:
                line["change"] = {name: value for name, value in line["change"].items() if name not in names}
            if line.get("change") != {}:
                kept.append((json.dumps(line) + "\n").encode())
        write_whole(folder / CHANGES, b"".join(kept))

    def keep(self, value: Any) -> Any:
        """As a file holds it; a function that no file can hold is kept here, by its text."""
        if not callable(value):
            return value
        try:
            return in_a_file(value)
        except ValueError:
            name = f"function {getattr(value, '__qualname__', type(value).__qualname__)}"
            self._schedules[name] = value
            return name

    def _value(self, name: str, kept: Any) -> Any:
        if name != "temperature" or not isinstance(kept, str):
            return kept
        if kept in self._schedules:
            return self._schedules[kept]
        if kept.startswith("function "):
            raise ValueError(
                f"temperature was changed to {kept.removeprefix('function ')} while the run went on, which "
                f"{CHANGES} cannot hold; call trainer.change(temperature=...) with it before train()"
            )
        return schedule_from(kept)

    # ---- what was assigned --------------------------------------------------------------------------------------

    def _look(self) -> dict[str, Any]:
        trainer = self.trainer
        seen = {f"args.{f.name}": getattr(trainer.args, f.name) for f in fields(trainer.args)}
        seen |= {f"trainer.{name}": getattr(trainer, name, None) for name in (*_ATTRIBUTES, *_FIXED)}
        return {name: _copy(value) for name, value in seen.items()}

    def _look_again(self) -> dict[str, tuple[Any, Any]]:
        now = self._look()
        # The kit itself sets it, where a rollout buffer begins.
        before = self._seen | {"trainer.temperature": self.trainer.temperatures.now}
        return {n: (old, now[n]) for n, old in before.items() if not _same(old, now[n])}


def _copy(value: Any) -> Any:
    """So that what is changed in place is seen."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(value) if type(value) in (list, dict, set) else value


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    plain = (type(None), bool, int, float, str, list, tuple, dict, set)
    return isinstance(a, plain) and isinstance(b, plain) and a == b


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:59] + "…"
