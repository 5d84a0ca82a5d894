"""Does the engine compute a model as its own forward pass does? Asked of each new type of model, and on each card.

A few rows are sampled by the engine and scored by the model alone. They are longer than a sliding window of the model,
where it has one small enough. Equal within rounding: the engine is in use. This is done at the first use, and kept for
the machine, the versions and the kind of model. No list of names says what is fast.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from transformers import GenerationConfig, PreTrainedModel

from grpo_kit._support import __version__, cuda
from grpo_kit.engine._supported_models import (
    decode_by_modules,
    is_tested,
    layer_kinds,
    window_of,
)
from grpo_kit.models._gguf_reader import cache_folder
from grpo_kit.models._model_facts import (
    base_model,
    context_length,
    evaluating,
    hardware,
    token_rows,
)
from grpo_kit.models._precision import Finding, is_narrow, judged
from grpo_kit.models.token_lists import left_pad, logits_of
from grpo_kit.record._lines import read_json
from grpo_kit.record.files import write_whole

FILE = "checked_cards.json"
# the part of the engine that gives way to the model's modules
FEW_KERNELS = "decoding in few kernels"
# Outcomes that leave a part out, by whether the model is tested: of one that is, rounding may hide a difference.
WRONG = {True: ("differs", "failed"), False: ("differs", "failed", "cannot tell")}
TOKENS, GROUP = 12, 2
SHIFT = 8  # positions that rows are moved by
_SHORT = (9, 14)  # tokens of the prompts
_LONGEST = 1024  # a window that is larger is not filled: that would take minutes on a CPU


@torch.no_grad()
def compared(model: Any, prompts: Sequence[list[int]], rollouts: Any) -> Finding:
    """The engine beside the plain model, in nats a token of the worst completion.

    rollouts: the engine's, sampled at temperature 1. Two right ways are the plain one and its rows moved: rotary
    positions encode differences only, so that these are equal in exact numbers.
    """
    error = rounding = 0.0
    for prompt, completion, logprobs in zip(
        prompts, rollouts.completion_ids, rollouts.policy_logprobs, strict=True
    ):
        plain = _plain(model, prompt, completion)
        error = max(error, _gap(torch.tensor(logprobs, dtype=torch.float64), plain))
        rounding = max(rounding, _gap(_plain(model, prompt, completion, SHIFT), plain))
    autocast = torch.is_autocast_enabled(next(model.parameters()).device.type)
    return judged("engine", error, rounding, is_narrow(model, autocast=autocast))


def _gap(logprobs: torch.Tensor, plain: torch.Tensor) -> float:
    """Mean absolute difference in nats a token; infinite for a NaN."""
    difference = (logprobs.double().cpu() - plain.double().cpu()).abs().mean().item()
    return difference if math.isfinite(difference) else math.inf


def _plain(
    model: Any, prompt: list[int], completion: list[int], shift: int = 0
) -> torch.Tensor:
    """(T,) of one completion, by the model's own forward pass. shift: positions that the row is moved by."""
    ids, mask = left_pad([[*prompt, *completion]], 0, next(model.parameters()).device)
    logits = logits_of(model, ids, mask, len(completion) + 1, shift)[0, :-1]
    table = logits.float().log_softmax(-1)  # (T, V)
    return table.gather(-1, ids[0, -len(completion) :, None])[:, 0]


def guarded(part: str, work: Callable[[], Finding]) -> Finding:
    """work(), or that it failed. A card without memory for it says nothing of the part: that error is raised."""
    try:
        return work()
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, LookupError, NotImplementedError):
        # The modules are of another architecture.
        return Finding(part, "failed", why="the model's modules do not run in it")
    except Exception as error:  # of a kernel, a driver, a compiler: any
        first_line = str(error).partition("\n")[0]
        return Finding(part, "failed", why=f"{type(error).__name__}: {first_line}")


def remembered(
    find: Callable[[], list[Finding]], model: Any, facts: list[Any], folder: Path | None = None
) -> list[Finding]:
    """find(), or what it gave before for this machine, these versions, this kind of model and these facts.

    Where decoding in few kernels was off, the model's modules decode from here on. folder: of the cache; default
    GRPO_KIT_CACHE. A cache that cannot be read or written is done without, and nothing is kept of a class that is not
    transformers' own: it may be another one under its name tomorrow.
    """
    base = base_model(model)
    if not type(base).__module__.startswith("transformers."):
        return find()
    path = (folder or cache_folder()) / FILE
    try:
        cache = read_json(path)
    except (OSError, ValueError):
        cache = {}
    key = _key(base, facts)
    if key not in cache:
        cache[key] = [asdict(finding) for finding in find()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, (json.dumps(cache, indent=1) + "\n").encode())
        except OSError:
            pass
    findings = [Finding(**values) for values in cache[key]]
    for finding in findings:
        if finding.part == FEW_KERNELS:
            decode_by_modules(base, str(finding))
    return findings


def _key(base: PreTrainedModel, more_facts: list[Any]) -> str:
    machine, model_type = hardware(), base.config.model_type
    dtypes = sorted({str(p.dtype) for p in base.parameters()})
    facts = [machine, model_type, dtypes, base.config._attn_implementation, *more_facts]
    if not is_tested(base):
        facts += [type(base).__name__, sorted(set(layer_kinds(base))), window_of(base)]
    facts += [version(name) for name in ("torch", "transformers", "peft")] + [__version__]
    return (
        hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        + f" {machine}, {model_type}"
    )


def random_prompts(model: Any) -> list[list[int]]:
    """Two groups of two on random tokens: what rows share, and what lies between groups, are both there.

    The first group's are longer than the model's sliding window, if that is not too large.
    """
    generator = torch.Generator().manual_seed(0)
    window = window_of(model) or 0
    longest = context_length(base_model(model)) - TOKENS - SHIFT
    lengths = list(_SHORT)
    if window <= _LONGEST:
        lengths[0] = min(window + _SHORT[0], longest)
    prompts = []
    for length in lengths:
        prompt = torch.randint(token_rows(model), (length,), generator=generator).tolist()
        prompts += [prompt] * GROUP
    return prompts


_problems: WeakKeyDictionary[PreTrainedModel, str | None] = WeakKeyDictionary()
_on_trial: WeakSet[PreTrainedModel] = WeakSet()  # the engine may run, whatever its problem


def engine_findings(
    model: Any, engine: Callable[[Any], Any], prompts: list[list[int]]
) -> list[Finding]:
    """The engine beside the model's own forward pass, on completions that it samples now.

    engine: RolloutEngine. If it is off in few kernels that is the first finding, and the engine without them the last.
    """
    sampling = GenerationConfig(
        max_new_tokens=TOKENS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        eos_token_id=[],
        pad_token_id=0,
    )
    trial = engine(model)
    _on_trial.add(base_model(model))

    def compare() -> Finding:
        return compared(model, prompts, trial.generate(prompts, sampling, seed=0))

    try:
        finding = guarded("engine", compare)
        if finding.outcome != "differs" or not trial.in_few_kernels:
            return [finding]
        decode_by_modules(model, str(finding))
        return [replace(finding, part=FEW_KERNELS), guarded("engine", compare)]
    finally:
        _on_trial.discard(base_model(model))
        trial.release()


def has_finite_logits(model: Any, prompt: list[int]) -> bool:
    """Does the model itself give finite logits here? Otherwise no engine is to blame."""
    ids = torch.tensor([prompt], device=next(model.parameters()).device)
    return bool(model(input_ids=ids).logits.isfinite().all())


def why_unproven(model: Any, engine: Callable[[Any], Any]) -> str | None:
    """None if the engine computes this model as the model itself does, else one sentence that says why not.

    engine: RolloutEngine. Takes seconds at the first use on a card, and of a model type that is not one of MODEL_TYPES;
    on a CPU minutes where a window is long.
    """
    base = base_model(model)
    device, tested = next(model.parameters()).device, is_tested(base)
    if tested and not cuda.may_fail(device):
        return None
    if base in _on_trial:
        return None
    if base in _problems:
        return _problems[base]
    prompts = random_prompts(model)
    fork = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with fork, torch.no_grad(), evaluating(model):
        if tested and not has_finite_logits(model, prompts[-1]):
            return None  # generating says so
        facts = ["first use", torch.is_autocast_enabled(device.type)]
        finding = remembered(lambda: engine_findings(model, engine, prompts), model, facts)[-1]
    _problems[base] = None
    if finding.outcome in WRONG[tested]:
        problem = f"model_type {base.config.model_type!r} was compared with its own forward pass: {finding}"
        _problems[base] = problem
        if tested:
            warnings.warn(
                f"The rollout engine is left out on this machine: {problem}. Completions come from transformers' "
                "generate: slower, other random numbers. Please paste this and `python -m grpo_kit doctor` into an "
                "issue of grpo_kit.",
                stacklevel=2,
            )
    return _problems[base]
