"""Tries each part of the kit on this machine and compares it with transformers, torch and its own plain ways.

The models are tiny or small, everything runs in float32, about 20 seconds in all on two CPU cores. A real run's
conditions on a card (memory, bfloat16) are not tried here.
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
from unittest import mock

from grpo_kit.doctor.report import Check
from grpo_kit.doctor.tiny_runs import (
    CLOSE,
    TINY,
    Skipped,
    engine_beside_transformers,
    loaded,
    same,
    small_trainer,
)


def checks(folder: Path) -> Iterator[tuple[Check, str]]:
    """Each part's outcome and, if it failed, its stack trace and output. folder: empty, for its files."""
    with _nothing_stays(folder):
        for part, attempt in PARTS.items():
            mine, began, printed = folder / part.replace(" ", "_"), time.perf_counter(), io.StringIO()
            mine.mkdir()
            outcome, trace = "ok", ""
            try:
                with _quiet(printed):
                    said = attempt(mine)
            except Skipped as why:
                outcome, said = "skipped", str(why)
            except Exception as error:  # any error belongs in the report
                outcome, said = "failed", f"{type(error).__name__}: {error}"
                trace = traceback.format_exc() + printed.getvalue()
            yield Check(part, outcome, said, round(time.perf_counter() - began, 2)), trace


def prompts(folder: Path) -> str:
    """A rendered prompt ends in its prefill, leaves the turn open, and comes back from its tokens."""
    from grpo_kit.tasks import largest

    _, tokenizer = loaded(TINY)
    data = largest(n_train=4, n_held_out=1).dataset(tokenizer)
    for prompt, prefill in zip(data["prompt"], data["prefill"], strict=True):
        back = tokenizer.decode(tokenizer(prompt)["input_ids"])
        same(back == prompt, f"prompt {prompt!r} comes back from its tokens as {back!r}")
        same(prefill and prompt.endswith(f"assistant\n{prefill}"), f"{prompt!r} does not end in {prefill!r}")
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
    same(scores == [1.0, 0.0], f"a right and a wrong answer earned {scores}, not [1.0, 0.0]")
    return "right 1, wrong 0"


def sandbox(folder: Path) -> str:
    """A program as a model might write it passes its tests in the sandbox; an endless one is stopped."""
    from grpo_kit.rewards import CodeTests
    from grpo_kit.rewards.code_runner import CodeRunner
    from grpo_kit.sandbox import isolation

    if isolation() is None:
        raise Skipped("nothing isolates programs here")
    blocks = ("return n + n", "return n * n", "while True: pass")
    texts = [f"```python\ndef double(n):\n    {body}\n```" for body in blocks]
    reward = CodeTests(CodeRunner(seconds=1.0))
    scores = reward(texts, tests=["[[[2], 4], [[3], 6]]"] * 3, entry_point=["double"] * 3)
    same(scores == [1.0, 0.5, 0.0], f"three programs earned {scores}, not [1.0, 0.5, 0.0]")
    return "right 1, half right 0.5, endless 0"


def rollout(folder: Path) -> str:
    """The engine's greedy tokens and its log-probabilities beside transformers' on the tiny model."""
    return engine_beside_transformers(*loaded(TINY))


def embedded(folder: Path) -> str:
    """The same on SmolLM2, if it was converted before: converting takes 20 seconds."""
    from grpo_kit.models.gguf_reader import EMBEDDED, embedded_cache

    if not embedded_cache()[1]:
        raise Skipped("not converted yet; its first use does it, in 20 s")
    return engine_beside_transformers(*loaded(EMBEDDED))


def update(folder: Path) -> str:
    """What kit.check_card finds: the packed update's gradient beside a padded one, the engine's numbers with it."""
    from grpo_kit.engine.check_card import check_card

    model, _ = loaded(TINY)
    found = check_card(model)
    wrong = [str(one) for one in found if one.outcome in ("differs", "failed")]
    same(not wrong, "; ".join(wrong))
    parts = [one.part for one in found]
    same(parts == ["engine", "packed update"], f"{parts} can do {TINY}, not the engine and the packed update")
    return "; ".join(map(str, found))


def optimizer(folder: Path) -> str:
    """SplitAdamW8bit on bfloat16 weights beside torch's AdamW on float32 ones, at a rate that bfloat16 rounds away."""
    import torch

    if importlib.util.find_spec("bitsandbytes") is None:
        raise Skipped('bitsandbytes is not installed; 8-bit optimizers need it: pip install "grpo-kit[cuda]"')
    from grpo_kit.optim.split_adamw import SplitAdamW8bit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    drawn = torch.Generator().manual_seed(0)
    start = (0.03 * torch.randn(64, 128, generator=drawn)).bfloat16().to(device)  # over 4096: 8-bit moments
    wide, narrow = torch.nn.Parameter(start.float()), torch.nn.Parameter(start.clone())
    options = {"lr": 1e-6, "weight_decay": 0.0}
    reference, ours = torch.optim.AdamW([wide], **options), SplitAdamW8bit([narrow], **options)
    steady = torch.randn(64, 128, generator=drawn)
    for _ in range(20):
        gradient = (steady + 0.3 * torch.randn(64, 128, generator=drawn)).to(device) * 1e-3
        wide.grad, narrow.grad = gradient, gradient.bfloat16()
        reference.step()
        ours.step()
    moved, kept = wide.detach() - start.float(), ours.master(narrow) - start.float()
    share = ((kept * moved).sum() / (moved * moved).sum()).item()
    same(abs(share - 1) < 0.03, f"20 steps at 1e-6 kept {share:.1%} of what float32 keeps")
    return f"20 steps at 1e-6 kept {share:.1%} of float32's change"


def save_and_resume(folder: Path) -> str:
    """Two steps, and the second from the checkpoint of the first by another trainer: equal weights."""
    import torch

    from grpo_kit.record.files import read_metrics

    whole = small_trainer(folder / "whole", steps=2)
    whole.train()
    small_trainer(folder / "run", steps=1).train()
    again = small_trainer(folder / "run", steps=2)
    again.train(resume=True)
    rows = read_metrics(folder / "run")
    same(rows.step.tolist() == [1, 2], f"metrics.jsonl has steps {rows.step.tolist()}, not [1, 2]")
    same(
        (rows["grad_norm"] > 0).all(), f"gradients of norm {rows['grad_norm'].tolist()}: nothing was trained"
    )
    pairs = zip(whole.model.parameters(), again.model.parameters(), strict=True)
    off = max((one - other).abs().max().item() for one, other in pairs)
    exact = off == 0
    # A card adds up in another order each time.
    same(exact or torch.cuda.is_available() and off < CLOSE, f"weights differ by up to {off:.1e}")
    return "resumed to the same weights" + ("" if exact else f", within {off:.0e}")


PARTS: dict[str, Callable[[Path], str]] = {
    "prompts": prompts,
    "rewards": rewards,
    "sandbox": sandbox,
    "rollout": rollout,
    "update": update,
    "optimizer": optimizer,
    "save and resume": save_and_resume,
    "smollm2 rollout": embedded,
}


@contextlib.contextmanager
def _nothing_stays(folder: Path) -> Iterator[None]:
    """Conversions and compilations go to `folder`, not to the user's cache; torch's precision is restored."""
    caches = [name for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR") if name not in os.environ]
    environment, precision = {name: str(folder / name.lower()) for name in caches}, None
    with contextlib.suppress(Exception):  # a part that needs it reports the error
        import torch

        from grpo_kit.models.gguf_reader import embedded_cache

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
def _quiet(into: io.StringIO) -> Iterator[None]:
    """Library output goes to `into`; logs and warnings are dropped."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(into), contextlib.redirect_stderr(into), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
