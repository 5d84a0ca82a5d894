"""GRPOTrainer as most runs want it: the loop, the fast ways through a step, and the standard hooks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_kit._support.argument_checks import check_choice, check_known, nearest
from grpo_kit._support.kernel import in_notebook
from grpo_kit.engine.fast import fast
from grpo_kit.loop.config import FIELDS, SETUP, Config
from grpo_kit.loop.grpo import Loop
from grpo_kit.loop.protocols import Hook, Task, optional
from grpo_kit.loop.run_checks import check_given
from grpo_kit.loop.run_settings import differences
from grpo_kit.models._model_facts import close_rows
from grpo_kit.record.files import next_run_folder
from grpo_kit.rewards._parts import with_parts
from grpo_kit.tasks._same_task import reward_digest, task_digest
from grpo_kit.trainer.control_folder import Autosave, ControlFolder
from grpo_kit.trainer.watch_run import OffScale, StillStep, Watchdog, WatchRun
from grpo_kit.watch.monitor import OnFlag

if TYPE_CHECKING:
    from grpo_kit.trainer.held_out import HeldOut


class GRPOTrainer(Loop):
    """The loop with engine, packed update, chart, red flags and controls; see grpo_kit.loop.Loop.

    task: a tasks.Task, or one that brings the seams it needs.
    folder: of the run; None: the next free one of runs/<task>, runs/<task>-2, ...
    held_out: measures a few held-out rows while it trains. keep: "best" ends with the best evaluation's weights.
    live, on_flag: see WatchRun. sample, update: None takes the fast ways, or the plain ones where a line says why.
    A sample with a method around(fast) is taken as what that returns, given the fast one: OlderWeights of examples/.
    hooks: more of them, called after the standard ones, but before those that obey requests and save.
    Raises ValueError, naming the argument, for what cannot be.
    """

    def __init__(
        self,
        model: Any,
        task: Task | None = None,
        config: Config | None = None,
        *,
        tokenizer: Any = None,
        folder: str | Path | None = None,
        held_out: HeldOut | None = None,
        keep: str = "last",
        live: bool | None = True,
        on_flag: OnFlag = "warn",
        sample: Any = None,
        update: Any = None,
        hooks: Sequence[Hook] = (),
        **unknown: Any,
    ) -> None:
        _check_unknown(unknown)
        check_given(model, task, config, tokenizer, sample, update, hooks)
        config = Config() if config is None else config
        folder = next_run_folder("runs", task.name) if folder is None else folder
        check_choice("keep", keep, ("last", "best"))
        if keep == "best" and held_out is None:
            raise ValueError(
                "keep='best' needs held_out, a grpo_kit.HeldOut(task), to judge by: give it, or keep='last'"
            )
        measuring = [] if held_out is None else [_held_out_hook(held_out, keep)]
        close_rows(model, tokenizer)
        seams = getattr(task, "seams", fast)(model, config)
        if seams.why_not and live is not None and not (sample and update):
            print(f"A slower, plain way is taken, since {seams.why_not}.", flush=True)
        watch_run = WatchRun(live, on_flag)
        standard = []
        if live is not None and not any(isinstance(hook, Watchdog) for hook in hooks):
            standard.append(Watchdog())
        standard += measuring
        if live is not None:
            standard += [OffScale(), StillStep(), ReboundConfig(config, task)]
        standard.append(watch_run)
        # Behind the user's hooks: a checkpoint's row is whole.
        last = [ControlFolder(watch_run.say), Autosave(quiet=live is None)]
        super().__init__(
            model,
            task,
            config,
            tokenizer=tokenizer,
            folder=folder,
            sample=optional(sample, "around", sample, seams.sample) or seams.sample,
            update=update or seams.update,
            hooks=[*standard, *hooks, *last],
        )
        if self.starts_from and live is not None and self.processes.is_main:
            print(
                f"This model was trained before: {self.starts_from}. The run goes on from those weights; for the base "
                "load it again.",
                flush=True,
            )

    def __getattr__(self, name: str) -> Any:
        """What a trainer of another library has under this name is called otherwise here."""
        raise AttributeError(
            f"GRPOTrainer has no {name!r}{nearest(name, dir(type(self)))}", name=name, obj=self
        )


def _check_unknown(arguments: dict[str, Any]) -> None:
    """Raises ValueError, with what would do, for arguments that GRPOTrainer does not take."""
    for name, value in arguments.items():
        if name in FIELDS:
            call = "kit.preset('auto', " if name in SETUP else "kit.Config("
            raise ValueError(
                f"{name} is a field of the config: config={call}{name}={value!r:.100})"
            )
    known = ["model", "task", "config", *GRPOTrainer.__init__.__kwdefaults__]
    check_known("GRPOTrainer has no such argument", arguments, known)


def _held_out_hook(held_out: Any, keep: str) -> Hook:
    # Evaluation is loaded where a run has held-out rows.
    from grpo_kit.trainer.held_out import HeldOut, HeldOutHook

    if not isinstance(held_out, HeldOut):
        raise ValueError(
            f"held_out={held_out!r:.100} must be a kit.HeldOut(task, rows=64, every=8), or None"
        )
    return HeldOutHook(held_out, keep)


class ReboundConfig(Hook):
    """As training begins, compares the trainer's config, task and rewards with what the notebook's variables hold."""

    def __init__(self, config: Config, task: Any) -> None:
        digests = {id(reward): reward_digest for reward in with_parts(task.rewards)}
        digests |= {id(task): task_digest, id(config): None}
        variables = [
            (name, value) for name, value in _variables().items() if id(value) in digests
        ]
        self._variables = {name: (value, digests[id(value)]) for name, value in variables}

    def begin(self, trainer: Any) -> None:
        """Say which differ: those of the trainer are obeyed."""
        variables = _variables()
        for name, (earlier, digest) in self._variables.items():
            value = variables.get(name)
            if value is earlier or value is trainer.config or type(value) is not type(earlier):
                continue
            cells = "cells that make task and"
            fields = ""
            if digest is None:  # the config
                cells, fields = "cell that makes", _differing_fields(trainer.config, value)
            if fields or digest and digest(value) != digest(earlier):
                print(
                    f"{name!r} was made again after this trainer, which goes by the earlier one{fields}. To train by "
                    f"the new {name!r}, run the {cells} the trainer again.",
                    flush=True,
                )


def _differing_fields(config: Config, other: Config) -> str:
    """The fields in which another config differs, in words; "" for none."""
    ours = config.values()
    theirs = other.values()
    # The trainer fills them in from its task.
    for name in ("task", "task_options", "max_completion_tokens"):
        if theirs.get(name) in (None, {}):
            theirs[name] = ours.get(name)
    fields = differences(ours, theirs)
    texts = [
        f"{name}={value!r}, not {other_value!r}"
        for name, (value, other_value) in fields.items()
    ]
    return f": {', '.join(texts)}" if texts else ""


def _variables() -> dict[str, Any]:
    """Of the notebook, outputs apart; none elsewhere."""
    if not in_notebook():
        return {}
    namespace = sys.modules["IPython"].get_ipython().user_ns
    return {name: value for name, value in namespace.items() if not name.startswith("_")}
