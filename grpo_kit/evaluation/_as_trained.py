"""The sampling of a model's run, beside the sampling that an evaluation asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from grpo_kit.loop.config import Config
from grpo_kit.loop.run_checks import trained_in
from grpo_kit.models._model_facts import model_name
from grpo_kit.record._run_folder import path_of
from grpo_kit.record.files import has_metrics, read_metrics, run_settings

_OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
SAMPLING = tuple(_OFF)
_printed: set[tuple[str, str]] = set()  # a line comes once a process


def run_of(model: Any) -> Path | None:
    """The run folder that a model was trained into, or that its folder lies in (save_model); None for another model."""
    path = path_of(trained_in(model)[0] or model_name(model))
    folders = (path, path.parent) if path.is_dir() else ()
    return next((folder for folder in folders if has_metrics(folder)), None)


def trained_sampling(model: Any, sampling: str | Config) -> dict[str, float]:
    """temperature, top_p, top_k, min_p and repetition_penalty of a run's last step, as complete() takes them.

    sampling: "as trained", by the folder of the model's run; or a Config, as for the base beside it.
    Raises ValueError where the model's run is not known, and for anything else.
    """
    if isinstance(sampling, Config):
        numbers = {name: getattr(sampling, name) for name in SAMPLING}
        return {"temperature": sampling.at(sampling.steps - 1).temperature} | numbers
    if sampling != "as trained":
        raise ValueError(
            f'sampling={sampling!r} must be "as trained", a Config, or None for greedy alone'
        )
    trained = _trained(run_of(model))
    if trained is None:
        raise ValueError(
            'sampling="as trained": no run folder says how this model was trained; give the Config of its run'
        )
    return {name: trained[name] for name in ("temperature", *SAMPLING)}


def _trained(run: Path | None) -> dict[str, Any] | None:
    """Sampling, lengths and prompt of a run's last step; None where its folder does not say."""
    if run is None:
        return None
    settings = run_settings(run)
    if settings is None or "config" not in settings:
        return None
    temperatures = read_metrics(run)["temperature"].dropna()
    if not len(temperatures):
        return None
    trained = {"temperature": float(temperatures.iloc[-1])} | _OFF
    for name in (*SAMPLING, "max_completion_tokens", "autocast"):
        if settings["config"].get(name) is not None:
            trained[name] = settings["config"][name]
    for name in ("system", "prefill"):
        if name in settings.get("task", {}):
            trained[name] = settings["task"][name]
    return trained


def say_difference(
    model: Any,
    task: Any,
    *,
    caller: str,
    temperature: float,
    tokens: int | None,
    run: Path | None = None,
    **sampling: Any,
) -> None:
    """Print one line, once, where completions are sampled otherwise than in the model's run; nothing without a run.

    caller: begins the line, such as "evaluate". temperature: 0 is greedy. tokens: the most a completion has; None: not
    compared. task: with its prompt; None: that of the run. sampling: top_p and the like, where they are not off.
    run: its folder, where known.
    """
    trained = _trained(run or run_of(model))
    if trained is None:
        return
    settings = {"temperature": temperature} | _OFF | sampling
    if tokens is not None:
        settings["max_completion_tokens"] = tokens
    if temperature == 0:  # the most likely token is the same under all of these
        settings |= {name: trained[name] for name in SAMPLING}
    if task is not None:
        settings |= {"system": task.system, "prefill": task.prefill}
    device = next(model.parameters()).device.type
    settings["autocast"] = "none"
    if torch.is_autocast_enabled(device):
        settings["autocast"] = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    names = [name for name in settings if name in trained and trained[name] != settings[name]]
    here, there = (
        ", ".join(_words(name, numbers[name]) for name in names)
        for numbers in (settings, trained)
    )
    if names and (here, there) not in _printed:
        _printed.add((here, there))
        print(
            f"{caller} asks with {here}; training had {there}. This is no error: the result is right for what was "
            f"asked. To ask as in training: {_cure(caller, names, trained)}.",
            flush=True,
        )


def _cure(caller: str, names: Iterable[str], trained: Mapping[str, Any]) -> str:
    """What to give to the caller, so that it asks as in training."""
    cures = []
    for name in names:
        if caller.startswith("evaluate") and name in ("temperature", *SAMPLING):
            cures.append('sampling="as trained"')
        elif name in ("temperature", "max_completion_tokens"):
            cures.append(f"{name}={trained[name]:g}")
        else:
            cures.append(
                f"no argument sets {name}" if name in SAMPLING else f"the run's {name}"
            )
    return ", ".join(dict.fromkeys(cures))


def _words(name: str, value: Any) -> str:
    if name == "temperature" and value == 0:
        return "greedy decoding"
    if name in ("system", "prefill") and not value:
        return f"no {name}"
    if isinstance(value, str):
        return f"{name} {value!r}"
    return f"{name} {value:g}"
