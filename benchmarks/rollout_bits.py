"""Rollouts in fewer bits on a CPU: seconds of decoding, how far the sampler is from the trainer, and what is learnt.

    python -m benchmarks.rollout_bits learn                # the main job, three seeds an arm; goes on
    python -m benchmarks.rollout_bits learn --task countdown --arms 32 16 --model FILE --name NAME  # thoughts
    python -m benchmarks.rollout_bits gap                  # on prompts in words; --model FILE --name NAME
    python -m benchmarks.rollout_bits seconds --rounds 3  # 2 prompts of 256 tokens, 4 completions of 512 each
    python -m benchmarks.rollout_bits --table

Arms: 32 bits, exact; 16 (Config(rollout_bits=16)): bfloat16; 8: weights by output and inputs by token as whole numbers,
by torch's quantized.linear_dynamic, which stands here alone. 16 and 8 learn with importance_sampling_cap=2. Seconds
are of the rollout, quantising with it, the arms in turn; processor seconds beside them are not those of other
processes. The gap is of the sampled tokens: log-probability to the trainer less to the sampler; KL is
E[exp(gap) - 1 - gap]. Writes results/rollout_bits.json.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.result import (
    RESULTS,
    ROOT,
    WEIGHTS,
    command_line,
    origin,
    read_result,
    write_result,
)
from grpo_kit import GRPOTrainer, evaluate, load_policy, next_run_folder, preset, read_metrics
from grpo_kit.engine import RolloutEngine, _decode
from grpo_kit.engine.cpu import _layers as layers
from grpo_kit.engine.cpu._matmul import Projection

PATH = RESULTS / "rollout_bits.json"
ARMS = (32, 16, 8)
TEXTS = (
    "Tell me a long story about a fox, a well and three numbers.",
    "Explain how to add fractions, with many examples, step by step.",
)


@dataclass(frozen=True)
class EightBits(Projection):
    """A linear layer whose weight is there in 8 bits besides; called as Projection is."""

    packed: Any = None

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Each row is scaled by its own largest number, so that it does not depend on the rows beside it."""
        rows, width = x.shape
        top = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).clamp_(min=1e-30)
        scaled = x.new_zeros(rows + 1, width)
        torch.div(x, top, out=scaled[:rows])
        # the kernel has one range for all rows: this row's
        scaled[rows, 0], scaled[rows, 1] = 1, -1
        return torch.ops.quantized.linear_dynamic(scaled, self.packed)[:rows].mul_(top)


def _in_eight_bits(one: Projection) -> EightBits:
    """The layer with its weight as it is now, symmetric, a scale an output."""
    weight = one.weight.detach()
    scales = weight.abs().amax(1).clamp_(min=1e-30).div_(127).double()
    zeros = torch.zeros(len(weight), dtype=torch.long)
    quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantised, None)
    return EightBits(one.weight, one.bias, one.adapters, packed=packed)


def in_eight_bits(**linears: Projection) -> dict[str, EightBits]:
    """Takes the place of _layers._rounded."""
    return {name: _in_eight_bits(linear) for name, linear in linears.items()}


@contextmanager
def sampling_in(bits: int) -> Iterator[int]:
    """The engine's bits inside: 8 takes the place of 16, by torch's layers, since C has no product of it."""
    sixteen, in_c = layers._rounded, _decode.CompiledStep
    if bits == 8:
        layers._rounded = in_eight_bits
        _decode.CompiledStep = SimpleNamespace(of=lambda _: None)
    try:
        yield min(32, max(16, bits))
    finally:
        layers._rounded, _decode.CompiledStep = sixteen, in_c


def config_of(task: str, **more: Any) -> Any:
    """The main job's, or 15 steps of two numbers to combine after a thought: by LoRA, all weights in float32."""
    if task == "largest":
        return preset("cpu", **more)
    thinks = {"numbers": (2, 2), "balanced": True, "think": True}
    more |= {
        "tuning": "lora",
        "dtype": "float32",
        "optimizer": "adamw",
        "learning_rate": 1e-4,
        "steps": 15,
    }
    return preset(
        "gpu24", task=task, task_options=thinks, prompts_per_step=4, held_out=128, **more
    )


def learn(bits: int, seed: int, task: str, model: str) -> dict[str, Any]:
    """One run: held-out accuracy before and after, seconds of its rollouts."""
    with sampling_in(bits) as engine_bits:
        more = (
            {} if bits == 32 else {"rollout_bits": engine_bits, "importance_sampling_cap": 2.0}
        )
        config = config_of(task, model=model, seed=seed, **more)
        model, tokenizer = load_policy(
            config.model, tuning=config.tuning, dtype="float32", seed=seed, quiet=True
        )
        task, folder = (
            config.make_task(),
            next_run_folder(ROOT / "runs", f"rollout_bits-{bits}-{seed}"),
        )
        before = evaluate(model, tokenizer, task)
        GRPOTrainer(model, task, config, tokenizer=tokenizer, folder=folder, live=None).train()
        after, metrics = evaluate(model, tokenizer, task), read_metrics(folder)
    shutil.rmtree(folder)
    # none where no group had a signal
    gaps = metrics.get("rollout/logprob_gap", metrics["reward"] * float("nan"))
    return {
        "bits": bits, "seed": seed, "steps": len(metrics), "n": len(task.held_out),
        "before": before.sentence, "after": after.sentence, "accuracy": after.strict.value,
        "gap": float(gaps.mean()), "gap last 8 steps": float(gaps[-8:].mean()),
        "reward last 8 steps": metrics["reward"][-8:].mean(),
        "seconds of steps": float(metrics["step_seconds"].sum()),
    }  # fmt: skip


def gap(model: Any, tokenizer: Any, name: str, tokens: int) -> dict[str, Any]:
    """Nats a token between the trainer's log-probabilities and the sampler's, over 4 completions of each text."""
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    prompts = [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)
        for c in chats
    ]
    prompts = [list(p) for p in prompts for _ in range(4)]
    found: dict[str, Any] = {"model": name, "tokens": tokens * len(prompts)}
    for bits in ARMS:
        with sampling_in(bits) as engine_bits, torch.no_grad():
            made = RolloutEngine(model, bits=engine_bits).generate(
                prompts, _sampled(tokens), seed=1
            )
            apart = []
            for prompt, completion, sampler in zip(
                prompts, made.completion_ids, made.policy_logprobs, strict=True
            ):
                logits = (
                    model(torch.tensor([prompt + completion]))
                    .logits[0, len(prompt) - 1 : -1]
                    .float()
                )
                own = torch.log_softmax(logits, -1).gather(
                    1, torch.tensor(completion)[:, None]
                )[:, 0]
                apart.append(own - torch.tensor(sampler))
        d = torch.cat(apart)
        found[str(bits)] = {
            "mean |gap|": d.abs().mean().item(), "largest |gap|": d.abs().max().item(),
            "KL a token": (d.exp() - 1 - d).mean().item(),
            "share of weights above 2": (d.exp() > 2).float().mean().item(),
        }  # fmt: skip
    return found


def seconds(model: Any, name: str, rounds: int, tokens: int) -> dict[str, Any]:
    """Seconds of a rollout, each arm once a round, after one that is not counted."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(20, 40_000, (256,), generator=draw).tolist() for _ in range(2)]
    prompts = [p for p in prompts for _ in range(4)]
    took: dict[str, list[dict[str, float]]] = {str(bits): [] for bits in ARMS}
    for number in range(rounds + 1):
        for bits in ARMS:
            with sampling_in(bits) as engine_bits:
                engine = RolloutEngine(model, bits=engine_bits)
                begin, cpu = time.perf_counter(), time.process_time()
                made = engine.generate(prompts, _sampled(tokens if number else 8), seed=number)
                one = {
                    "wall": time.perf_counter() - begin,
                    "processor": time.process_time() - cpu,
                    **made.seconds,
                }
            if number:
                took[str(bits)].append(one)
                print(number, bits, {k: round(v, 1) for k, v in one.items()}, flush=True)
    least = {
        bits: {k: min(one[k] for one in all_) for k in all_[0]} for bits, all_ in took.items()
    }
    return {
        "model": name, "threads": torch.get_num_threads(), "load": os.getloadavg()[0], "rounds": rounds,
        "tokens": tokens, "took": took, "least": least,
        "times faster": {b: {k: least["32"][k] / least[b][k] for k in ("wall", "processor", "decode")} for b in least},
    }  # fmt: skip


def _sampled(tokens: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=tokens, do_sample=True, top_k=0, eos_token_id=[], pad_token_id=0
    )


def main() -> None:
    """See the module's docstring."""
    parser = command_line(__doc__)
    parser.add_argument("what", nargs="?", choices=("learn", "gap", "seconds"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--task", choices=("largest", "countdown"), default="largest")
    parser.add_argument("--arms", type=int, nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--name", default=None)
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    commands = [
        f"python -m benchmarks.rollout_bits {what}"
        for what in ("learn", "gap", "seconds --rounds 2")
    ]
    result = read_result(PATH, commands=commands, learn=[], gap=[], seconds=[])
    name = options.name or WEIGHTS.get(options.model, options.model)
    about = origin(
        f"python -m benchmarks.rollout_bits {options.what}", "torch", "transformers"
    ) | {"weights": name}
    if options.what == "learn":
        there = {
            (row.get("task", "largest"), row["bits"], row["seed"]) for row in result["learn"]
        }
        for seed in options.seeds:
            for bits in options.arms:
                if (options.task, bits, seed) not in there:
                    made = learn(bits, seed, options.task, options.model)
                    result["learn"].append(about | {"task": options.task} | made)
                    write_result(PATH, result)
    elif options.what:
        model, tokenizer = load_policy(options.model, quiet=True)
        model.eval()
        if options.what == "gap":
            made = gap(model, tokenizer, name, options.tokens or 96)
        else:
            made = seconds(model, name, options.rounds, options.tokens or 512)
        kept = [one for one in result[options.what] if one["model"] != name]
        write_result(PATH, result | {options.what: [*kept, about | made]})
    table()


def table() -> None:
    """What is saved."""
    result = read_result(PATH, learn=[], gap=[], seconds=[])
    for task, bits in ((task, bits) for task in ("largest", "countdown") for bits in ARMS):
        rows = [
            r for r in result["learn"] if (r.get("task", "largest"), r["bits"]) == (task, bits)
        ]
        if rows:
            after = ", ".join(f"{row['accuracy']:.1%}" for row in rows)
            print(
                f"{task}, {bits} bits: {after}; gap {statistics.mean(row['gap'] for row in rows):.3g} nats a token"
            )
    for one in result["gap"]:
        print(one["model"], *(f"\n  {bits}: {one[str(bits)]}" for bits in ARMS))
    for one in result["seconds"]:
        print(one["model"], "times faster", one["times faster"])


if __name__ == "__main__":
    main()
