"""How the run of a model sampled, beside how the model is asked now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from grpo_kit.loop.config import Config
from grpo_kit.loop.run_checks import trained_in
from grpo_kit.models._model_facts import model_name
from grpo_kit.record.files import has_metrics, read_metrics, run_settings
from grpo_kit.record.run_path import path_of

_ALSO = ("max_completion_tokens", "autocast")
_OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
SAMPLING = tuple(_OFF)
_said: set[str] = set()  # a line comes once a process


def run_of(model: Any) -> Path | None:
    """The run folder that a model was trained into, or that its folder lies in (save_model); None for another model."""
    found = trained_in(model)[0]
    path = path_of(found or model_name(model))
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
        raise ValueError(f'sampling={sampling!r} must be "as trained", a Config, or None for greedy alone')
    trained = _trained(run_of(model))
    if trained is None:
        raise ValueError(
            'sampling="as trained": no run folder says how this model was trained; give the Config of its run'
        )
    return {name: trained[name] for name in ("temperature", *SAMPLING)}


def _trained(run: Path | None) -> dict[str, Any] | None:
    """What a run sampled with in its last step, and its prompt; None where its folder does not say."""
    settings = run_settings(run) if run is not None else None
    temperatures = read_metrics(run)["temperature"].dropna() if settings else ()
    if settings is None or "config" not in settings or not len(temperatures):
        return None
    config = {name: value for name, value in settings["config"].items() if value is not None}
    numbers = _OFF | {name: config[name] for name in (*SAMPLING, *_ALSO) if name in config}
    prompt = {
        name: settings["task"][name] for name in ("system", "prefill") if name in settings.get("task", {})
    }
    return {"temperature": float(temperatures.iloc[-1])} | numbers | prompt


def say_difference(
    model: Any,
    task: Any,
    *,
    what: str,
    temperature: float,
    tokens: int | None,
    run: Path | None = None,
    **sampling: Any,
) -> None:
    """Print one line, once, where the model is asked otherwise than its run sampled; nothing where no run is known.

    what: what asks, such as "evaluate". temperature: 0 is greedy. tokens: the most a completion has; None: not
    compared. task: with its prompt; None: that of the run. sampling: top_p and the like, where they are not off.
    run: its folder, where known.
    """
    trained = _trained(run or run_of(model))
    if trained is None:
        return
    asked = {"temperature": temperature} | _OFF | sampling
    if tokens is not None:
        asked["max_completion_tokens"] = tokens
    if temperature == 0:  # the most likely token is the same under all of these
        asked |= {name: trained[name] for name in SAMPLING}
    if task is not None:
        asked |= {"system": task.system, "prefill": task.prefill}
    device = next(model.parameters()).device.type
    now = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "none"
    asked["autocast"] = now.removeprefix("torch.")
    line = _words([name for name in asked if trained.get(name, asked[name]) != asked[name]], asked, trained)
    if line and line not in _said:
        _said.add(line)
        print(f"{what}: asked otherwise than trained: {line}.", flush=True)


def _words(names: list[str], asked: Mapping[str, Any], trained: Mapping[str, Any]) -> str:
    def of(name: str, value: Any) -> str:
        if name == "temperature" and value == 0:
            return "greedy"
        if name in ("system", "prefill") and not value:
            return f"no {name}"
        return f"{name} {value!r}" if isinstance(value, str) else f"{name} {value:g}"

    return "; ".join(f"{of(name, asked[name])} (trained: {of(name, trained[name])})" for name in names)
