"""Is a fault in a fast part caught in a run's first step, and does the run then end as TRL's own? Faults, put in.

    python -m benchmarks.first_contact                                # faults in a tiny random model: minutes
    python -m benchmarks.first_contact --model smollm2-135m-instruct  # how far apart right and wrong are

On a card a run checks itself (grpo_kit/training/first_contact.py); here a CPU is told to. Each fault is put into the
code that runs: a mask through which too much or too little is seen, another temperature, an exception, a NaN; in the
optimizer a sign and a scale. A faulty run has to say so, go on, and end in the weights of trl.GRPOTrainer's (the
other fast parts are off there). Clean runs have to say nothing but their one line, and end in the weights of a run that
does not check. With --model the numbers that are compared are measured in float32, bfloat16 autocast and bfloat16
weights, clean and faulty: the limits of grpo_kit/training/plain_pass.py lie between.
Saves benchmarks/results/first_contact.json, with --model first_contact_margins.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes
import torch
from trl import GRPOTrainer as PlainTrainer

from benchmarks.result import RESULTS, WEIGHTS, command_line, origin, save
from grpo_kit import cuda
from grpo_kit.engine.packing import PackedBatch
from grpo_kit.models import base_model, load_policy
from grpo_kit.profiles import profile
from grpo_kit.rollout.decode import Decoder
from grpo_kit.rollout.engine import RolloutEngine
from grpo_kit.rollout.kv_cache import KVCache
from grpo_kit.rollout.sampling import Sampler
from grpo_kit.rollout.tree_attention import Block
from grpo_kit.tasks.largest import largest
from grpo_kit.training.contact_findings import CHECKS
from grpo_kit.training.trainer import GRPOTrainer

STEPS = 3
CONSTANT = {
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
}  # the kit's warmup is another than transformers'


# ---- faults: f(trainer) patches what the trainer will run, or everybody's, inside the context --------------


@contextlib.contextmanager
def changed(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """owner.name is make(what it was)."""
    was = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    was = was.__func__ if isinstance(was, (classmethod, staticmethod)) else was
    with mock.patch.object(owner, name, make(was)):
        yield


def raising(*_: Any, **__: Any) -> Any:
    """What a kernel that cannot be compiled does."""
    raise RuntimeError("no valid triton configs for this card")


def _own_token_unseen(set_step: Callable) -> Callable:
    return lambda self, tokens, positions, column, width: set_step(
        self, tokens, positions, column, max(1, width - 1)
    )


def _unwritten_seen(begin_step: Callable) -> Callable:
    def begin(self: KVCache) -> None:
        begin_step(self)
        self._suffix_bias = torch.zeros_like(self._suffix_bias)

    return begin


@contextlib.contextmanager
def _as_on_a_card(trainer: Any) -> Iterator[None]:
    """Decoding over padded shapes, with the masks that a captured graph has."""
    with (
        changed(
            RolloutEngine,
            "_new_decoder",
            lambda _: lambda self: Decoder(base_model(self.model), bucketed=True),
        ),
        changed(KVCache, "begin_step", _unwritten_seen),
    ):
        yield


def _hotter(from_config: Callable) -> classmethod:
    def make(cls: type, *args: Any, **kwargs: Any) -> Sampler:
        sampler = from_config(cls, *args, **kwargs)
        return dataclasses.replace(sampler, temperature=1.25 * sampler.temperature)

    return classmethod(make)


def _siblings_seen(plan: Callable) -> Callable:
    """Every token sees all before it, other completions of its prompt too."""

    def wrong(self: PackedBatch) -> Any:
        made = plan(self)
        made.blocks = [Block("causal", 0, made.tokens, 0, made.tokens)]
        return made

    return wrong


def _scaled(factor: float) -> Callable:
    def wrap(inner: Callable) -> Callable:
        def scores(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            logprobs, entropies = inner(*args)
            return logprobs * factor, entropies

        return scores

    return wrap


@contextlib.contextmanager
def _temperature_of_packed(trainer: Any) -> Iterator[None]:
    def wrap(inner: Callable) -> Callable:
        def scores(*args: Any) -> Any:
            (head, *_), was = trainer.temperatures.heads, trainer.temperature
            head.cell_contents = 1.25 * was
            try:
                return inner(*args)
            finally:
                head.cell_contents = was

        return scores

    with changed(trainer.update, "_label_logprobs", wrap):
        yield


def _raises_from_step_two(inner: Callable, trainer: Any) -> Callable:
    def scores(*args: Any) -> Any:
        return raising() if trainer.state.global_step else inner(*args)

    return scores


def _kernel(change: Callable[[torch.Tensor, torch.Tensor], None]) -> Any:
    """bitsandbytes' update of float32 weights with 8-bit moments, then change(weights, what they were)."""

    def wrap(update: Callable) -> Callable:
        def wrong(
            name: str, gradient: torch.Tensor, weights: torch.Tensor, *rest: Any, **options: Any
        ) -> None:
            before = weights.detach().clone()
            update(name, gradient, weights, *rest, **options)
            change(weights.data, before)

        return wrong

    return changed(bitsandbytes.functional, "optimizer_update_8bit_blockwise", wrap)


FAULTS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("engine", "wrong mask"): lambda t: changed(KVCache, "set_step", _own_token_unseen),
    ("engine", "wrong mask, shapes of a card"): _as_on_a_card,
    ("engine", "wrong temperature"): lambda t: changed(Sampler, "from_config", _hotter),
    ("engine", "exception"): lambda t: changed(Decoder, "_step", lambda _: raising),
    ("engine", "NaN"): lambda t: changed(Decoder, "_step", lambda step: lambda self: step(self) * torch.nan),
    ("update", "wrong mask"): lambda t: changed(PackedBatch, "plan", _siblings_seen),
    ("update", "wrong temperature"): _temperature_of_packed,
    ("update", "exception"): lambda t: changed(t.update, "_label_logprobs", lambda _: raising),
    ("update", "NaN"): lambda t: changed(t.update, "_label_logprobs", _scaled(torch.nan)),
    ("update", "exception at step 2"): lambda t: changed(
        t.update, "_label_logprobs", lambda inner: _raises_from_step_two(inner, t)
    ),
    ("optimizer", "wrong sign"): lambda t: _kernel(lambda p, was: p.copy_(2 * was - p)),
    ("optimizer", "wrong scale"): lambda t: _kernel(lambda p, was: p.copy_(was + 3 * (p - was))),
    ("optimizer", "exception"): lambda t: _kernel(raising),
    ("optimizer", "NaN"): lambda t: _kernel(lambda p, was: p.fill_(torch.nan)),
}
# Only the part with the fault is the kit's; the others are TRL's, so that the whole run must end as TRL's.
ALONE: dict[str, dict[str, Any]] = {
    "engine": {"rollout": "kit", "pack": False},
    "update": {"rollout": "hf", "pack": True},
    "optimizer": {"rollout": "hf", "pack": False, "optimizer": "adamw-8bit"},
}
CLEAN: dict[str, dict[str, Any]] = {
    "full, float32": {},
    "LoRA, float32": {"tuning": "lora"},
    "LoRA with dropout, float32": {"tuning": "lora", "lora": {"lora_dropout": 0.3}},
    "full, bfloat16 weights": {"dtype": "bfloat16"},
    "full, bfloat16 autocast": {"bf16": True},
    "LoRA, bfloat16 weights and autocast": {"tuning": "lora", "dtype": "bfloat16", "bf16": True},
    "beta 0.1": {"beta": 0.1},
    "beta 0.1, LoRA": {"beta": 0.1, "tuning": "lora"},
    "num_iterations 2": {"num_iterations": 2},
    "num_iterations 2 over two steps, beta 0.1": {
        "num_iterations": 2,
        "beta": 0.1,
        "steps_per_generation": 2,
        "per_device_train_batch_size": 4,
    },
    "8-bit moments": {"optimizer": "adamw-8bit"},
}


# ---- runs --------------------------------------------------------------------------------------------------


def letters(completions: list[str], **columns: Any) -> list[float]:
    """Share of characters that are letters: differs inside a group of a random model."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def trainer_of(which: type, folder: str, model: str = "tiny-random", **options: Any) -> Any:
    """A trainer of the smoke profile: options of GRPOConfig, of load_policy, and of the kit's trainer."""
    cfg = dataclasses.replace(profile("smoke"), model=model)
    loads = {name: options.pop(name) for name in ("tuning", "lora", "dtype") if name in options}
    kit = {name: options.pop(name) for name in ("rollout", "pack", "optimizer") if name in options}
    policy, tokenizer = load_policy(model, quiet=True, seed=0, **loads)
    tokens = options.pop("max_completion_tokens", 8)  # the smoke profile's
    options = {
        "max_steps": STEPS,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        **CONSTANT,
        **options,
    }
    args = cfg.grpo_config(folder, max_completion_length=tokens, **options)
    args.bf16_on_cpu = bool(options.get("bf16"))
    kit = {"warmup": 0, "live": None, **kit} if which is GRPOTrainer else {}
    data = largest(n_train=8, n_held_out=1).dataset(tokenizer)
    torch.manual_seed(0)
    return which(policy, letters, args, data, processing_class=tokenizer, **kit)


@dataclasses.dataclass
class Run:
    """How a run ended: its weights, what it printed, what it wrote of its checks."""

    weights: dict[str, torch.Tensor]
    said: str
    found: list[dict[str, Any]]

    @property
    def off(self) -> list[str]:
        """Parts that were put off."""
        return [line["part"] for line in self.found if line["outcome"] == "off"]


def trained(
    which: type = GRPOTrainer, *, checks: bool = True, fault: Callable | None = None, **options: Any
) -> Run:
    """A whole run in a folder of its own, on a CPU that is taken for a card."""
    said = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(said),
        mock.patch.object(cuda, "may_fail", lambda device: checks),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        trainer = trainer_of(which, folder, **options)
        with fault(trainer) if fault else contextlib.nullcontext():
            trainer.train()
        path = Path(folder) / CHECKS
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return Run(weights, said.getvalue(), found)


def apart(one: Run, other: Run) -> float:
    """The largest difference of a weight; NaN counts as infinite."""
    most = max((one.weights[n].float() - other.weights[n].float()).abs().max().item() for n in other.weights)
    return most if most == most else float("inf")


def fault_row(part: str, name: str, plain: Run, **options: Any) -> dict[str, Any]:
    """One fault: was it caught, what was said, and how far from TRL's run its weights are."""
    run = trained(fault=FAULTS[part, name], **ALONE[part], **options)
    words = [line.strip() for line in run.said.splitlines() if line.startswith(("  found:", "  instead:"))]
    unchecked = trained(checks=False, **ALONE[part], **options)
    return {
        "part": part, "fault": name, "caught": bool(run.off), "off": run.off, "said": words,
        "largest difference from TRL's weights": apart(run, plain),
        "the same of the part without a fault": apart(unchecked, plain),
    }  # fmt: skip


def clean_row(name: str) -> dict[str, Any]:
    """A run without a fault: nothing is put off, and its weights are those of a run that does not check."""
    checked, unchecked = (trained(checks=checks, **CLEAN[name]) for checks in (True, False))
    lines = [line for line in checked.said.splitlines() if line.startswith("First step checked")]
    return {
        "run": name, "off": checked.off, "not checked": [f for f in checked.found if f["outcome"] == "not checked"],
        "said": lines, "largest difference from the run without checks": apart(checked, unchecked),
    }  # fmt: skip


# ---- how near right and wrong are --------------------------------------------------------------------------

ARITHMETIC = {
    "float32": {},
    "bfloat16 autocast": {"bf16": True},
    "bfloat16 weights": {"dtype": "bfloat16", "bf16": True},
}


def margins(model: str, seeds: range) -> list[dict[str, Any]]:
    """The numbers that the first step compares, clean and with each fault that computes something wrong."""
    rows = []
    wrong = {key: fault for key, fault in FAULTS.items() if "wrong" in key[1]}
    for arithmetic, options in ARITHMETIC.items():
        for (part, fault), put_in in {("", "none"): None, **wrong}.items():
            for seed in seeds if not part else seeds[:1]:
                own = {"optimizer": "adamw-8bit"} if "dtype" not in options else {}
                run = trained(
                    fault=put_in, model=model, max_steps=1, seed=seed, learning_rate=1e-6,
                    max_completion_tokens=24, **own, **options,
                )  # fmt: skip
                numbers = {
                    f"{line['part']} {n}": v
                    for line in run.found
                    for n, v in line.get("numbers", {}).items()
                    if not part or line["part"] == part
                } | {
                    f"{line['part']} {n}, at most": v
                    for line in run.found
                    for n, v in line.get("most", {}).items()
                    if not part or line["part"] == part
                }
                rows.append(
                    {"arithmetic": arithmetic, "fault": f"{part} {fault}".strip(), "seed": seed} | numbers
                )
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", help="the margins on these weights, in place of the table")
    parser.add_argument("--seeds", type=int, default=2, help="of clean runs of the margins")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    packages = "torch", "transformers", "trl", "peft", "bitsandbytes"
    if options.model:
        result = origin(f"python -m benchmarks.first_contact --model {options.model}", *packages) | {
            "weights": WEIGHTS.get(options.model, options.model), "seeds": options.seeds,
            "margins": margins(options.model, range(options.seeds)),
        }  # fmt: skip
        print(save(options.out, "first_contact_margins", result))
        return
    plain = trained(PlainTrainer)
    result = origin("python -m benchmarks.first_contact", *packages)
    result |= {"weights": "tiny-random", "steps": STEPS, "seed": 0, "faults": [], "clean": []}
    for part, name in FAULTS:
        result["faults"].append(fault_row(part, name, plain))
        print(result["faults"][-1], flush=True)
    for name in CLEAN:
        result["clean"].append(clean_row(name))
        print(result["clean"][-1], flush=True)
    print(save(options.out, "first_contact", result))


if __name__ == "__main__":
    main()
