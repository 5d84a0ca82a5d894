"""The numbers that a running trainer can change: where trl and transformers keep each, read and set in one place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from grpo_kit.schedules import schedule_from


@dataclass(frozen=True)
class Knob:
    """get(trainer) -> its value; set(trainer, value), wherever it is kept."""

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], None]


def knob(name: str) -> Knob:
    """The knob of a name in record.control.CHANGEABLE."""
    return _KNOBS[name]


def why_not(trainer: Any, name: str, value: Any) -> str | None:
    """Why this trainer cannot take the value, with what would do; None if it can."""
    state, args = trainer.state, trainer.args
    if name == "learning_rate":
        scheduler, optimizer = _scheduler(trainer), trainer.optimizer
        if scheduler is not None and not isinstance(scheduler, LambdaLR):
            return f"the schedule of the rate is a {type(scheduler).__name__}, which sets it by itself"
        if scheduler is not None and len(set(scheduler.base_lrs)) > 1:
            return f"the optimizer's groups have rates of their own, {sorted(set(scheduler.base_lrs))}"
        if optimizer is None and str(getattr(args.lr_scheduler_type, "value", "")) in (
            "reduce_lr_on_plateau",
            "greedy",
        ):
            return f"lr_scheduler_type={args.lr_scheduler_type!r} sets it by itself"
    if name == "temperature" and (callable(value) or isinstance(value, str)):
        schedule = schedule_from(value) if isinstance(value, str) else value
        low = min(schedule(progress) for progress in (0.0, 0.5, 1.0))
        return None if low > 0 else f"it goes down to {low:g}; a temperature is above 0"
    if name == "max_steps" and value < state.global_step:
        return f"{state.global_step} steps are done already; give more, or stop"
    if name == "beta" and value > 0 and not trainer.has_reference:
        return "the trainer was made with beta=0, so it has no reference model; make it with a small beta above 0"
    if name == "beta" and (value == 0) != (trainer.beta == 0) and getattr(trainer, "buffer", None):
        return "rollouts that wait in the buffer were scored for the other case; make a new trainer"
    if name == "reward_weights" and len(value) != len(trainer.reward_funcs):
        return f"there are {len(trainer.reward_funcs)} rewards; give one number each"
    if name == "eval_steps" and trainer.eval_dataset is None and trainer.held_out is None:
        return "there is nothing to evaluate on; give the trainer held_out or eval_dataset"
    return None


def asked_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a run.json (Recorder.open) says it was begun with."""
    args = config.get("args") or {}
    found = {name: args.get(name) for name in _IN_ARGS}
    found["temperature"] = config.get("temperature_schedule") or found["temperature"]
    for kind in ("save", "eval"):
        if args.get(f"{kind}_strategy") == "no":
            found[f"{kind}_steps"] = None
    found["reward_weights"] = _rounded(config.get("reward_weights") or [])
    return {name: value for name, value in found.items() if value not in (None, [])}


def check_own_options(begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """A run goes on with the options of its kind of trainer that it was begun with, such as credit and view.

    Raises ValueError naming those that are others.
    """
    now = json.loads(json.dumps(now))
    others = [
        f"{name} was {begun[name]!r} and is {now[name]!r}"
        for name in now
        if name in begun and begun[name] != now[name]
    ]
    if others:
        raise ValueError(
            f"the run was begun with other options: {'; '.join(others)}. Give it those, or a new output_dir"
        )


_IN_ARGS = (
    "learning_rate", "temperature", "max_steps", "beta", "epsilon", "epsilon_high", "max_grad_norm", "save_steps",
    "eval_steps",
)  # fmt: skip


# ---- each knob ---------------------------------------------------------------------------------------------------


def _scheduler(trainer: Any) -> Any:
    return trainer.lr_scheduler


def _set_rate(trainer: Any, value: float) -> None:
    """The height of the schedule; what the schedule makes of it at this step stands in the optimizer."""
    trainer.args.learning_rate = value
    scheduler = _scheduler(trainer)
    if not isinstance(scheduler, LambdaLR) or len(set(scheduler.base_lrs)) > 1:
        return
    scheduler.base_lrs = [value] * len(scheduler.base_lrs)
    _stand_at_its_step(scheduler)


def _stand_at_its_step(scheduler: LambdaLR) -> None:
    """The optimizer's groups get the rates that the schedule has for its step."""
    rates = [
        base * rate(scheduler.last_epoch)
        for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    groups = scheduler.optimizer.param_groups
    for group, rate, base in zip(groups, rates, scheduler.base_lrs, strict=True):
        group["lr"], group["initial_lr"] = rate, base
    scheduler._last_lr = rates


def _set_max_steps(trainer: Any, value: int) -> None:
    """The schedules' progress is that of the new length from here on; the warmup stays as long as it was."""
    args, before = trainer.args, trainer.args.max_steps
    if value == before:
        return
    args.max_steps = value
    if not trainer.is_training_now:
        return
    trainer.state.max_steps = value
    schedule_anew(trainer, value)


def schedule_anew(trainer: Any, steps: int) -> bool:
    """transformers' schedule of so many steps, over the optimizer as it is, stands where the old one stood.

    False, and nothing is done, for a schedule that is none of transformers' functions of the step.
    """
    old = trainer.lr_scheduler
    if not isinstance(old, LambdaLR) or not trainer._created_lr_scheduler:
        return False
    trainer.lr_scheduler = None
    new = trainer.create_scheduler(steps)
    same = len(old.base_lrs) == len(new.base_lrs)
    new.base_lrs = old.base_lrs if same else old.base_lrs[:1] * len(new.base_lrs)
    new.last_epoch, new._step_count = old.last_epoch, old._step_count
    trainer.callback_handler.lr_scheduler = new
    _stand_at_its_step(new)
    return True


def _set_temperature(trainer: Any, value: Any) -> None:
    trainer.temperatures.change(value)


def _rounded(weights: list[float]) -> list[float]:
    """As they were given: in float32 0.3 is 0.30000001."""
    return [round(weight, 6) for weight in weights]


def _set_weights(trainer: Any, value: Any) -> None:
    weights = [float(weight) for weight in value]
    trainer.args.reward_weights = weights
    trainer.reward_weights = torch.tensor(weights, dtype=torch.float32, device=trainer.reward_weights.device)
    trainer.recorder.weights_changed(weights)


def _set_in_args_and(attribute: str, name: str) -> Callable[[Any, Any], None]:
    def put(trainer: Any, value: Any) -> None:
        setattr(trainer.args, name, value)
        setattr(trainer, attribute, value)

    return put


def _every(name: str, strategy: str, on: Any, off: Any) -> Knob:
    """save_steps and eval_steps: None while args do not save or evaluate by steps; a number turns it on."""

    def get(trainer: Any) -> Any:
        return getattr(trainer.args, name) if getattr(trainer.args, strategy) != off else None

    def put(trainer: Any, value: Any) -> None:
        args = trainer.args
        if getattr(args, strategy) == off:
            setattr(args, strategy, on)
        setattr(args, name, value)
        trainer.state.compute_steps(args, max(args.max_steps, trainer.state.max_steps, 1))

    return Knob(get, put)


def _in_args(name: str) -> Callable[[Any], Any]:
    return lambda trainer: getattr(trainer.args, name)


_KNOBS = {
    "learning_rate": Knob(_in_args("learning_rate"), _set_rate),
    "temperature": Knob(lambda trainer: trainer.temperatures.asked, _set_temperature),
    "max_steps": Knob(_in_args("max_steps"), _set_max_steps),
    "beta": Knob(lambda trainer: trainer.beta, _set_in_args_and("beta", "beta")),
    "epsilon": Knob(lambda trainer: trainer.epsilon_low, _set_in_args_and("epsilon_low", "epsilon")),
    "epsilon_high": Knob(
        lambda trainer: trainer.epsilon_high, _set_in_args_and("epsilon_high", "epsilon_high")
    ),
    "max_grad_norm": Knob(
        _in_args("max_grad_norm"), lambda trainer, value: setattr(trainer.args, "max_grad_norm", value)
    ),
    "reward_weights": Knob(lambda trainer: _rounded(trainer.reward_weights.tolist()), _set_weights),
    "save_steps": _every("save_steps", "save_strategy", SaveStrategy.STEPS, SaveStrategy.NO),
    "eval_steps": _every("eval_steps", "eval_strategy", IntervalStrategy.STEPS, IntervalStrategy.NO),
}
