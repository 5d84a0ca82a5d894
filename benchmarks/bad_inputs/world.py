"""What the lines of cases.txt may use: a tiny model, small tasks, files of rows, and the command line in words."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import datasets
import numpy
import pandas
import torch

import grpo_kit as kit
from grpo_kit.__main__ import main
from grpo_kit.loop.config import Preset
from grpo_kit.models.loading import load_policy

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(10)]
GSM8K = "".join(
    f'{{"question": "{n} + 1?", "answer": "So.\\n#### {n + 1}"}}\n' for n in range(10)
)


def world(folder: Path) -> dict:
    """The names of the cases. Files go below folder, which is the working directory's stand-in."""
    model, tokenizer = load_policy("tiny-random", quiet=True)
    task = kit.tasks.largest(n_train=8, n_held_out=4, max_completion_tokens=4)
    made = SimpleNamespace(number=0)

    def new() -> str:
        """A path where nothing is."""
        made.number += 1
        return str(folder / f"new-{made.number}")

    def file(data: bytes | str, name: str = "rows.jsonl", encoding: str = "utf-8") -> str:
        """The path of a file with this in it."""
        path = Path(new()) / name
        path.parent.mkdir()
        path.write_bytes(data if isinstance(data, bytes) else data.encode(encoding))
        return str(path)

    def fresh() -> torch.nn.Module:
        return copy.deepcopy(model)

    def trainer(
        task=task,
        model=None,
        tokenizer=tokenizer,
        folder=None,
        config=None,
        hooks=(),
        live=None,
        **values,
    ):  # noqa: ANN001, ANN202, ANN003
        small = {"steps": 1, "prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 4}
        config = Preset(**(small | values)) if config is None else config
        given = fresh() if model is None else model
        return kit.GRPOTrainer(
            given,
            task,
            config,
            tokenizer=tokenizer,
            folder=folder or new(),
            live=live,
            hooks=hooks,
        )

    def train(*args, **values) -> Path:  # noqa: ANN002, ANN003
        """A trainer that has trained; its folder."""
        one = trainer(*args, **values)
        one.train()
        return one.folder

    def own(rows=ROWS, held_out=None, reward=None, **more):  # noqa: ANN001, ANN202, ANN003
        """A task of the user's own rows."""
        reward = kit.rewards.ExactAnswer() if reward is None else reward
        more = {"max_completion_tokens": 4} | more
        return kit.tasks.from_rows("own", rows, held_out, reward=reward, **more)

    def cli(*words: str) -> str:
        """What a command prints; ValueError with its message where it refuses."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
        if code:
            raise ValueError(err.getvalue() or out.getvalue())
        return out.getvalue()

    def inside(path: str, do):  # noqa: ANN001, ANN202
        """do() with that working directory."""
        with contextlib.chdir(path):
            return do()

    @contextlib.contextmanager
    def home(path: str):  # noqa: ANN202
        was = os.environ.get("HOME")
        os.environ["HOME"] = path
        try:
            yield
        finally:
            os.environ.update({} if was is None else {"HOME": was})

    def at_home(do):  # noqa: ANN001, ANN202
        """do(home) with a home folder of its own."""
        path = new()
        Path(path).mkdir()
        with home(path):
            return do(Path(path))

    def longer_tokenizer():  # noqa: ANN202
        other = copy.deepcopy(tokenizer)
        other.add_tokens(["<one>", "<two>"])
        return other

    def without_template():  # noqa: ANN202
        other = copy.deepcopy(tokenizer)
        other.chat_template = None
        return other

    def template(text: str):  # noqa: ANN202
        other = copy.deepcopy(tokenizer)
        other.chat_template = text
        return other

    def args(**values):  # noqa: ANN003, ANN202
        from trl import GRPOConfig

        return GRPOConfig(new(), use_cpu=True, bf16=False, **values)

    def trl(
        model=None,
        reward=None,
        config=None,
        rows=({"prompt": "1?"},) * 8,
        processing_class=tokenizer,
        **more,
    ):  # noqa: ANN001, ANN003, ANN202
        """kit.from_trl on a CPU."""
        model = fresh() if model is None else model
        reward = (
            (lambda completions, **columns: [1.0] * len(completions))
            if reward is None
            else reward
        )
        config = args() if config is None else config
        rows = list(rows) if isinstance(rows, tuple) else rows
        return kit.from_trl(
            model, reward, config, rows, processing_class=processing_class, **more
        )

    qwen3 = (
        "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n{{ m.content }}<|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return {
        "kit": kit, "Config": kit.Config, "Preset": Preset, "preset": kit.preset, "tasks": kit.tasks, "R": kit.rewards,
        "model": model, "tok": tokenizer, "task": task, "rows": ROWS, "GSM8K": GSM8K, "Path": Path, "os": os,
        "new": new, "file": file, "fresh": fresh, "trainer": trainer, "train": train, "own": own, "cli": cli,
        "inside": inside, "at_home": at_home, "longer": longer_tokenizer, "without_template": without_template,
        "template": template, "qwen3": qwen3, "Mock": Mock, "MagicMock": MagicMock, "np": numpy, "pd": pandas,
        "torch": torch, "datasets": datasets, "replace": replace, "policy": (model, tokenizer), "folder": folder,
        "load": lambda *a, **k: load_policy(*a, quiet=True, **k), "NAN": float("nan"), "INF": float("inf"),
        "sys": sys, "args": args, "trl": trl, "pays": lambda completions, **columns: [1.0] * len(completions),
    }  # fmt: skip


def temporary() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="bad-inputs-", ignore_cleanup_errors=True)
