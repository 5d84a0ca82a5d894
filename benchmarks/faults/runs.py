"""What is trained, and what of a run must be equal: weights, rows, completions, the last checkpoint."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import grpo_kit as kit
from grpo_kit.loop.batch import generate
from grpo_kit.loop.checkpoint import read_state
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.more.episodes.episode_task import EpisodeTask
from grpo_kit.more.episodes.observation import View
from grpo_kit.record._digests import what_is_wrong
from grpo_kit.record._lines import COMPLETIONS_LINES, METRICS_LINES, RUN_ID, lines_of
from grpo_kit.record.files import KEPT

STEPS, EVERY = 6, 2  # a checkpoint and an evaluation every so many steps


class Arm(NamedTuple):
    """config: fields of Config beside those of all arms. plain: by generate and padded forwards."""

    config: dict[str, Any]
    tuning: str = "full"
    keep: str = "last"
    processes: int = 1
    plain: bool = False
    episodes: bool = False


ARMS = {  # a fault's arm goes by its number
    "full": Arm({}),
    "full, 2 iterations, KL": Arm({"iterations": 2, "beta": 0.04}),
    "plain way, 2 minibatches": Arm(
        {"minibatches": 2, "temperature": kit.linear(1.2, 0.8)}, plain=True
    ),
    "LoRA": Arm({}, tuning="lora"),
    "LoRA, 2 iterations": Arm({"iterations": 2}, tuning="lora"),
    "groups drawn again": Arm({"dynamic_sampling": 1, "positive_weight": 2.0}),
    "episodes": Arm({}, episodes=True),
    "episodes, 2 iterations": Arm({"iterations": 2}, episodes=True),
    "best kept": Arm({}, keep="best"),
    "LoRA, best kept": Arm({}, tuning="lora", keep="best"),
    "two processes": Arm({}, processes=2),
    "two processes, LoRA, 2 iterations": Arm({"iterations": 2}, tuning="lora", processes=2),
}


def letters(completions: list[str], **columns: Any) -> list[float]:
    """Share of characters that are letters: it differs inside a group on a random model."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


class Letters:
    """An environment that pays for letters, and a little by chance; over after two or three turns."""

    def reset(self, row: dict[str, Any]) -> str:
        """The row's question."""
        self._row, self._turn = row, 0
        return f"Say {row['question']}."

    def step(self, text: str) -> tuple[str, float, bool]:
        """What it says, what it pays, whether it is over."""
        self._turn += 1
        return (
            f"You wrote {len(text)}.",
            letters([text])[0] + random.random() / 10,
            self._turn == self._row["turns"],
        )


@functools.cache
def task_of(arm: str) -> Any:
    """Rows, prompts and rewards of the arm."""
    if ARMS[arm].episodes:
        rows = [{"question": f"row {i}", "turns": 2 + i % 2} for i in range(12)]
        credit = "return" if ARMS[arm].config else "episode"
        numbers = {"max_turns": 3, "max_completion_tokens": 5, "credit": credit}
        return EpisodeTask("letters", rows[:8], rows[8:], Letters, View(), **numbers)
    if ARMS[arm].keep == "best":  # judged by its reward, which moves in six steps
        named = [{"question": f"Say {i} and {'more ' * (i % 3)}"} for i in range(20)]
        return kit.tasks.from_rows(
            "letters", named[:16], named[16:], reward=letters, max_completion_tokens=6
        )
    made = kit.tasks.largest(n_train=16, n_held_out=4, max_completion_tokens=6)
    weights = [weight / 2 for weight in made.reward_weights] + [0.5]
    return replace(made, rewards=[*made.rewards, letters], reward_weights=weights)


@functools.cache
def policy(arm: str) -> tuple[Any, Any]:
    """The weights that every run of the arm begins with. Several processes refuse dropout."""
    of = ARMS[arm]
    lora = {"lora_dropout": 0.1 if of.processes == 1 else 0.0} if of.tuning == "lora" else None
    return kit.load_policy("tiny-random", tuning=of.tuning, lora=lora, quiet=True)


class Change(kit.Hook):
    """A number that is changed while the run trains. A new process makes the change again by the record."""

    def before_step(self, trainer: Any) -> None:
        """Half the rate from the third step on."""
        if trainer.step == 2:
            trainer.config.learning_rate = 2e-3


def make(arm: str, folder: Path) -> Any:
    """A fresh trainer of the arm on fresh weights. The change is made unless the folder has it on record."""
    record = folder / METRICS_LINES
    changes = (
        []
        if record.exists() and any("changes" in line for line in lines_of(record))
        else [Change()]
    )
    of, task = ARMS[arm], task_of(arm)
    model, tokenizer = policy(arm)
    values = {
        "steps": STEPS,
        "prompts_per_step": 2,
        "group_size": 4,
        "learning_rate": 3e-3,
        "warmup": 0,
    }
    values |= {"seed": 3, "optimizer": "adamw", "save_steps": EVERY, "save_total_limit": 2}
    config = kit.Config(**(values | of.config))
    plain = {"sample": generate, "update": PaddedUpdate(config)} if of.plain else {}
    held_out = kit.HeldOut(task, rows=4, every=EVERY)
    return kit.GRPOTrainer(
        copy.deepcopy(model), task, config, tokenizer=tokenizer, folder=folder, held_out=held_out, keep=of.keep,
        live=None, hooks=changes, **plain,
    )  # fmt: skip


def result_of(trainer: Any) -> dict[str, str]:
    """Digests of the weights, of both tables without their clocks, and of what the folder keeps of the last step."""
    weights = hashlib.sha256()
    for name, parameter in trainer.model.named_parameters():
        weights.update(name.encode() + parameter.detach().numpy().tobytes())
    rows: dict[int, dict[str, Any]] = {}
    for line in lines_of(trainer.folder / METRICS_LINES):
        rows.setdefault(line["step"], {}).update(
            {k: v for k, v in line.items() if "seconds" not in k}
        )
    last = trainer.folder / f"checkpoint-{STEPS}"
    kept = trainer.folder / KEPT
    return {
        "weights": weights.hexdigest()[:16],
        "rows": _digest([rows[step] for step in sorted(rows)]),
        "completions": _digest(list(lines_of(trainer.folder / COMPLETIONS_LINES))),
        "last checkpoint": _of_checkpoint(last),
        "kept": kept.read_text() if kept.exists() else "the last",
    }


def _of_checkpoint(folder: Path) -> str:
    if not folder.exists():
        return "missing"
    if wrong := what_is_wrong(folder):
        return wrong
    files = sorted(path for path in folder.glob("*.safetensors"))
    state = {
        name: value
        for name, value in read_state(folder).items()
        if name not in ("seconds", RUN_ID)
    }
    return _digest([[hashlib.sha256(path.read_bytes()).hexdigest() for path in files], state])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
