"""What first_contact.py found: one line where all agrees, else lines for an issue; the run folder has them too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from grpo_kit.models import base_model
from grpo_kit.record.lines import LineFile

CHECKS = "first_step.jsonl"  # in the run folder: a line a finding
_PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "grpo-kit")
_LONGEST = 400  # characters of an error that are shown
_NAMES = {
    "engine": "the rollout engine",
    "scores": "packed log-probabilities",
    "flex": "FlexAttention in the packed update",
    "update": "the packed update",
    "optimizer": "the optimizer",
}


class Findings:
    """What the checks of one trainer's runs say and write."""

    def __init__(self, trainer: Any, say: Callable[[str], None]) -> None:
        self.trainer, self.say = trainer, say
        self._equal: dict[str, dict[str, float]] = {}  # by part
        self._rows = 0
        self._file: LineFile | None = None

    def begin(self) -> None:
        """A run begins: nothing is known of it."""
        self._equal, self._rows = {}, 0

    def judged(self, part: str, numbers: dict[str, float], most: dict[str, float], rows: int) -> str | None:
        """None if all numbers are at most what they may be; else what was compared, in words."""
        over = [name for name, value in numbers.items() if not value <= most[name]]
        self._write(part, "differs" if over else "equal", numbers=numbers, most=most)
        if over:
            said = "; ".join(f"{name} off by {numbers[name]:.2g}, at most {most[name]:g}" for name in over)
            return f"{rows} {'slices of weights' if part == 'optimizer' else 'completions'} computed both ways: {said}"
        self._equal[part] = numbers
        self._rows = max(self._rows, 0 if part == "optimizer" else rows)
        return None

    def not_checked(self, part: str, error: Exception) -> None:
        """The plain side cannot be computed, which says nothing of the fast one."""
        why = f"{type(error).__name__}: {error}"
        self._write(part, "not checked", why=why)
        self.say(f"First step: {_NAMES[part]} could not be checked ({_short(why)}) and is in use.")

    def off(self, part: str, why: str | Exception) -> None:
        """The part failed, and another way takes its place."""
        why = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
        facts = machine(self.trainer)
        self._equal.pop(part, None)
        self._write(part, "off", why=why, machine=facts)
        lines = [
            f"First contact with this machine: {_NAMES[part]} failed beside TRL's plain path and is off for this run.",
            *(
                f"  {name}: {text}"
                for name, text in {"found": _short(why), "instead": self._instead(part), **facts}.items()
            ),
            f"  Please paste these lines into an issue of grpo_kit; {CHECKS} in the run folder has them too.",
        ]
        self.say("\n".join(lines))

    def all_checked(self) -> None:
        """Nothing is left to check: one line, once a run, says how near and what is in use."""
        if self._equal:
            self.say(equal_line(self._equal, self._rows))
        self.begin()

    def was_off(self, part: str) -> bool:
        """Does the run folder's record say that the part was off in this run?"""
        path = Path(self.trainer.args.output_dir) / CHECKS
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return any({"part": part, "outcome": "off"}.items() <= json.loads(line).items() for line in lines)

    def _write(self, part: str, outcome: str, **more: Any) -> None:
        path = Path(self.trainer.args.output_dir) / CHECKS
        if self._file is None or self._file.path != path:
            self._file = LineFile(path)
        if not self.trainer.ranks.main:
            return
        line = {"step": self.trainer.state.global_step + 1, "part": part, "outcome": outcome, **more}
        self._file.waiting.append((json.dumps(line) + "\n").encode())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file.write()
        except OSError:
            pass  # a full disk: it waits for the next line

    def _instead(self, part: str) -> str:
        optim = getattr(self.trainer.args.optim, "value", self.trainer.args.optim)
        narrow = any(p.requires_grad and p.dtype == torch.bfloat16 for p in self.trainer.model.parameters())
        if part == "optimizer" and narrow:
            return (
                f"transformers' {optim}, which on bfloat16 weights rounds most of each update away at small learning "
                "rates: for a run that learns load the model with dtype='float32', or take LoRA"
            )
        return {
            "engine": "completions by transformers' generate (rollout='hf'), in evaluations too: slower, the same "
            "training. What was evaluated before with this model may be wrong: do it again",
            "flex": "packed rows under a dense mask (SDPA), which are checked in turn: more memory",
            "optimizer": f"transformers' {optim}: more memory, the same update",
        }.get(part, "log-probabilities and update are TRL's own (pack=False): slower, the same training")


def machine(trainer: Any) -> dict[str, str]:
    """What an issue needs to know: card, model, precision, versions."""
    device, args = trainer.accelerator.device, trainer.args
    config, cuda = base_model(trainer.model).config, device.type == "cuda"
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in trainer.model.parameters()})
    facts = {"device": torch.cuda.get_device_name(device) if cuda else device.type}
    if cuda:
        facts["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return facts | {
        "model": config.model_type,
        "weights": ", ".join(dtypes),
        "autocast": "bfloat16" if args.bf16 else "float16" if args.fp16 else "none",
        "attention": f"{config._attn_implementation}, packed {trainer.update.memory.attention}",
        "versions": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
    }


def equal_line(equal: Mapping[str, Mapping[str, float]], rows: int) -> str:
    """How near each part is, and what is in use.

    >>> equal_line({"engine": {"logprobs": 3e-7}, "optimizer": {"change": 0.02}}, 4)
    "First step checked beside TRL's plain path (4 completions): log-probabilities within 3e-07, optimizer 0.02 off. \
In use: rollout engine, optimizer."
    """
    near = [numbers["logprobs"] for numbers in equal.values() if "logprobs" in numbers]
    said = [f"log-probabilities within {max(near):.1g}"] if near else []
    for part, name, text in (
        ("update", "loss", "loss within {:.1g}"),
        ("update", "gradient", "gradient {:.1g} off"),
        ("optimizer", "change", "optimizer {:.1g} off"),
    ):
        said += [text.format(equal[part][name])] if part in equal else []
    used = [_NAMES[part].removeprefix("the ") for part in ("engine", "update", "optimizer") if part in equal]
    counted = f" ({rows} completions)" if rows else ""
    return (
        f"First step checked beside TRL's plain path{counted}: {', '.join(said)}. In use: {', '.join(used)}."
    )


def _short(text: str) -> str:
    """A compiler's message may go over pages; the file keeps it whole."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
