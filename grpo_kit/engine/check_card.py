"""check_card: does this machine compute by the fast ways what it computes by the plain ones? Asked once a machine.

The engine's log-probabilities and the packed update's gradients are compared with padded forwards of the model on four
short completions, the optimizer's steps with AdamW's. How far two right ways may be apart is measured too: the plain
way on the same rows, moved to other positions. Where that rounding alone would hide an error, the outcome says so.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.engine.packing import why_not_packed
from grpo_kit.loop.grpo_config import Config, StepNumbers
from grpo_kit.loop.padded_update import PaddedUpdate, autocast
from grpo_kit.loop.policy_loss import PolicyLoss
from grpo_kit.loop.step_batch import Batch
from grpo_kit.models.gguf_reader import cache_folder
from grpo_kit.models.model_facts import base_model, hardware
from grpo_kit.optim.check_adamw import MOST, beside_adamw
from grpo_kit.optim.choose import choose_optimizer
from grpo_kit.record.files import write_whole
from grpo_kit.rollout import RolloutEngine
from grpo_kit.rollout.compare_logprobs import SHIFT, gap, limits
from grpo_kit.rollout.supported_models import decode_by_modules
from grpo_kit.version import __version__

FILE = "checked_cards.json"
FEW_KERNELS = "decoding in few kernels"  # the part of the engine that gives way to the model's modules
_TOKENS, _PROMPTS, _GROUP = 12, (9, 14), 2
_WEIGHTS = 2**16  # of each tensor that the optimizer is tried on
_CANNOT_TELL = (
    0.4  # a limit above this, in nats or as a share of the gradient, would let a wrong mask through
)


@dataclass(frozen=True)
class Finding:
    """One part beside its plain way. outcome: "equal", "differs", "cannot tell" or "failed".

    apart: nats a token of the worst completion (engine), the norm of the difference by the gradient's norm (update), or
    by the norm of AdamW's change (optimizer; torch's own AdamW is not compared with itself).
    most: what two right ways may be apart. why: what failed, or what hides a difference.
    """

    part: str
    outcome: str
    apart: float = math.nan
    most: float = math.nan
    why: str = ""

    def __str__(self) -> str:
        if self.outcome in ("equal", "differs"):
            return f"{self.part}: {self.outcome} (off by {self.apart:.2g}, at most {self.most:.2g})"
        return f"{self.part}: {self.outcome} ({self.why})"


def check_card(model: Any, config: Config | None = None) -> list[Finding]:
    """Compare the fast ways with the plain ones for this model, as it is now; its weights and modes stay.

    A part that cannot do this model at all is left out. Takes seconds.

    >>> [str(finding) for finding in check_card(model)]  # doctest: +SKIP
    ['engine: equal (off by 3e-06, at most 0.0001)', 'packed update: equal (off by 2e-06, at most 0.001)']
    """
    config = Config() if config is None else config
    found = []
    with _as_it_was(model):
        how = GenerationConfig(
            max_new_tokens=_TOKENS, do_sample=True, temperature=1.0, top_k=0, eos_token_id=[], pad_token_id=0
        )
        batch = _random_batch(model)
        if RolloutEngine.unsupported(model, how) is None:
            engine = RolloutEngine(model)
            try:
                one = _guarded("engine", lambda: _engine(model, engine, config, how, batch))
                if one.outcome == "differs" and engine.in_few_kernels:
                    found.append(replace(one, part=FEW_KERNELS))
                    decode_by_modules(model, str(one))
                    one = _guarded("engine", lambda: _engine(model, engine, config, how, batch))
            finally:
                engine.release()
            found.append(one)
        if why_not_packed(model) is None:
            found.append(_guarded("packed update", lambda: _update(model, config, batch)))
        name = choose_optimizer(config.optimizer, model)
        if name != "adamw":
            found.append(_guarded("optimizer", lambda: _optimizer(model, name)))
    return found


def checked(model: Any, config: Config, folder: Path | None = None) -> list[Finding]:
    """What check_card found for this card, these versions and this kind of model before; else it is found and kept.

    folder: of the cache; default GRPO_KIT_CACHE. A cache that cannot be read or written is done without.
    """
    path = (cache_folder() if folder is None else folder) / FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    key = _key(model, config)
    if key not in known:
        known[key] = [asdict(finding) for finding in check_card(model, config)]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, (json.dumps(known, indent=1) + "\n").encode())
        except OSError:
            pass
    return [Finding(**finding) for finding in known[key]]


def _key(model: Any, config: Config) -> str:
    base = base_model(model)
    kinds = sorted({str(p.dtype) for p in model.parameters()})
    facts = [hardware(), base.config.model_type, kinds, base.config._attn_implementation, config.autocast]
    facts += [config.optimizer]
    facts += [version(name) for name in ("torch", "transformers", "peft")] + [__version__]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16] + f" {facts[0]}, {facts[1]}"


def _guarded(part: str, work: Any) -> Finding:
    try:
        return work()
    except Exception as error:  # of a kernel, a driver, a compiler: any
        first = next(iter(str(error).splitlines()), "")
        return Finding(part, "failed", why=f"{type(error).__name__}: {first}")


def _judged(part: str, apart: float, rounding: float, least: float) -> Finding:
    most = max(least, 2.5 * rounding)
    if apart <= most and most > _CANNOT_TELL:
        why = f"rounding alone is {rounding:.2g}, so that off by {apart:.2g} says nothing"
        return Finding(part, "cannot tell", apart, most, why)
    return Finding(part, "equal" if apart <= most else "differs", apart, most)


def _engine(
    model: Any, engine: RolloutEngine, config: Config, how: GenerationConfig, batch: Batch
) -> Finding:
    with autocast(config, next(model.parameters()).device):
        made = engine.generate(batch.prompt_ids, how, seed=0)
    batch.completion_ids = made.completion_ids  # what the update is compared on, too
    plain, moved = (PaddedUpdate(config, shift=shift).logprobs(model, batch, 1.0) for shift in (0, SHIFT))
    found = [torch.tensor(row) for row in made.policy_logprobs]
    wanted, others = (
        [row[: len(one)] for row, one in zip(table, found, strict=True)] for table in (plain, moved)
    )
    least = limits(model, autocast=config.autocast != "none").logprobs
    return _judged("engine", gap(found, wanted), gap(others, wanted), least)


def _update(model: Any, config: Config, batch: Batch) -> Finding:
    plain = Config(autocast=config.autocast, max_completion_tokens=_TOKENS)

    def gradient(update: Any) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        loss = PolicyLoss(
            batch, plain, StepNumbers(0, 0.0, 1.0, 0.0, 0.0), device=next(model.parameters()).device
        )
        update.gradients(model, batch, loss, 1.0, lambda share: share.backward())
        return [p.grad.float().cpu() for p in model.parameters() if p.grad is not None]

    wanted = gradient(PaddedUpdate(plain))
    rounding = _relative(gradient(PaddedUpdate(plain, shift=SHIFT)), wanted)
    least = limits(model, autocast=config.autocast != "none").gradient
    return _judged("packed update", _relative(gradient(PackedUpdate(model, plain)), wanted), rounding, least)


def _optimizer(model: Any, name: str) -> Finding:
    """Two steps on copies of a matrix and a vector of the trained weights, with drawn gradients."""
    trained = sorted((p for p in model.parameters() if p.requires_grad), key=lambda p: -p.ndim)
    weights = [p.detach().flatten()[:_WEIGHTS] for p in (trained[0], trained[-1])]
    draw = torch.Generator().manual_seed(0)
    gradients = [(1e-3 * torch.randn(len(w), generator=draw)).to(w) for w in weights]
    how = {"learning_rate": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": [0.1, 0.0]}
    return _judged("optimizer", beside_adamw(name, weights, gradients, **how), 0.0, MOST)


def _relative(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    apart = sum((a - b).double().square().sum().item() for a, b in zip(found, wanted, strict=True))
    size = sum(b.double().square().sum().item() for b in wanted)
    error = math.sqrt(apart / size) if size else math.inf
    return error if math.isfinite(error) else math.inf


def _random_batch(model: Any) -> Batch:
    """Two groups of two on random tokens: what rows share, and what lies between groups, are both there."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = base_model(model).config.vocab_size

    def draw(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    prompts = [prompt for prompt in map(draw, _PROMPTS) for _ in range(_GROUP)]
    return Batch(
        rows=[{}] * len(prompts),
        groups=[i // _GROUP for i in range(len(prompts))],
        prompt_ids=prompts,
        completion_ids=[draw(_TOKENS) for _ in prompts],
        completions=[""] * len(prompts),
        cut_off=[True] * len(prompts),
        advantages=[1.0, -1.0] * (len(prompts) // 2),
    )


@contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """No dropout and no gradients inside; modes and random numbers are as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model.eval()
        try:
            yield
        finally:
            model.zero_grad(set_to_none=True)
            for module, training in modes:
                module.training = training
