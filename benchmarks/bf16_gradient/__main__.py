"""What bfloat16 does to GRPO's gradient: every precision beside float64, on real completions and on random words.

    python -m benchmarks.bf16_gradient                      # SmolLM2-135M-Instruct, three sets of groups
    python -m benchmarks.bf16_gradient --sets task --no-parts
    python -m benchmarks.bf16_gradient --seconds 3           # only how long forward and backward take, in turn
    python -m benchmarks.bf16_gradient --model FOLDER --name qwen2.5-coder-0.5b-instruct --profile gpu24 --sets task \
        --groups 3 --no-parts                               # a task with thoughts, and somebody's own weights

Sets: `task`, completions of the profile's task sampled at temperature 1 before training; `trained`, the same after
--steps steps of GRPO; `words`, the forced random words of `benchmarks.step`. A gradient is that of the first pass over
a rollout (ratio 1), summed over tokens and divided by their number (loss "dapo"). Cosine and norm are taken
against float64; per tensor, per layer and kind of parameter, per group and overall. Parts, one at a time in float32 or
bfloat16, are tried on the group that autocast computes worst.
`sinks`: positions whose hidden state is, in some layer, over 10 times the median one's norm; `forward error`: the
largest relative error of a position's hidden state under autocast, and where. Writes
results/bf16_gradient_<model>.json.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.bf16_gradient.likeness import Gradient, Likeness, kind_of, layer_of, place
from benchmarks.bf16_gradient.precisions import MAIN, PARTS, Arm, autocast, exact
from benchmarks.bf16_gradient.rows import Group, random_words, sampled
from benchmarks.result import RESULTS, WEIGHTS, command_line, origin, save, spread
from grpo_kit import GRPOTrainer, load_policy, preset
from grpo_kit.engine.packing import PackedBatch, pack_rows

SINK = 10  # times the median position's norm


def packed(group: Group) -> PackedBatch:
    """The group as the kit's update computes it, its prompt once."""
    return pack_rows([(group.prompt, written) for written in group.completions], torch.device("cpu"))


def hidden(model: Any, batch: PackedBatch, **options: Any) -> Any:
    """The backbone's output on a packed group."""
    return model.model(
        input_ids=batch.input_ids,
        attention_mask=batch.dense_mask(),
        position_ids=batch.position_ids,
        use_cache=False,
        **options,
    )


def gradient(model: Any, group: Group, tokens: int, arm: Arm) -> Gradient:
    """Gradient of one group's share of the loss, by parameter, kept in float32."""
    batch = packed(group)
    scored = batch.labels != -100
    model.zero_grad(set_to_none=True)
    with arm(model):
        logits = model.lm_head(hidden(model, batch).last_hidden_state[scored])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logprobs = logits.log_softmax(-1).gather(-1, batch.labels[scored][:, None])[:, 0]
        scores = torch.zeros(scored.shape, dtype=logprobs.dtype).masked_scatter(scored, logprobs)
        by_row = batch.unpack(scores, max(map(len, group.completions))).sum(1)  # (G,)
        (-(by_row * group.advantages.to(by_row.dtype)).sum() / tokens).backward()
        found = {name: weight.grad.float() for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def sinks(model: Any, group: Group) -> dict[str, Any]:
    """Positions with a huge hidden state (float64), and the worst of the forward pass under autocast."""
    batch, states = packed(group), []
    with torch.no_grad():
        for arm in (exact, MAIN["bf16 autocast"]):
            with arm(model):
                states.append(
                    torch.stack(hidden(model, batch, output_hidden_states=True).hidden_states[1:-1])[:, 0]
                )
    true, rounded = states[0], states[1].double()  # (layers - 1, T, hidden)
    norms = true.norm(dim=-1)
    ratio = (norms / norms.median(-1, keepdim=True).values).amax(0)  # (T,)
    error = (true - rounded).norm(dim=-1) / norms
    worst = error.amax(0)
    return {
        "sinks": {int(i): round(ratio[i].item(), 1) for i in (ratio > SINK).nonzero().flatten()},
        "forward error": worst.max().item(),
        "at position": int(worst.argmax()),
        "median forward error": error[-1].median().item(),
    }


def measure(model: Any, groups: list[Group], clip: float, *, parts: bool) -> dict[str, Any]:
    """Every arm beside float64: the main ones on all groups, `parts` on the worst of these."""
    tokens = sum(len(written) for group in groups for written in group.completions)
    references = [gradient(model, group, tokens, exact) for group in groups]
    found = beside(model, groups, references, MAIN, clip, tokens)
    if parts:
        cosines = found["bf16 autocast"]["cosine of each group"]
        worst = cosines.index(min(cosines))
        print(f"parts, on group {worst} alone:")
        alone = [groups[worst]], [references[worst]]
        found["parts"] = {"group": worst} | beside(
            model, *alone, {"bf16 autocast": autocast} | PARTS, clip, tokens
        )
    return found


def beside(
    model: Any,
    groups: list[Group],
    references: list[Gradient],
    arms: dict[str, Arm],
    clip: float,
    divisor: int,
) -> dict[str, Any]:
    """Each arm's gradient of these groups, their loss divided by `divisor`, beside the reference."""
    tokens = sum(len(written) for group in groups for written in group.completions)
    whole = {name: sum(reference[name] for reference in references) for name in references[0]}
    found: dict[str, Any] = {"groups": len(groups), "completion tokens": tokens}
    if arms is MAIN:
        found["per group"] = [
            sinks(model, group) | {"norm": Likeness(reference, reference).of()["reference norm"]}
            for group, reference in zip(groups, references, strict=True)
        ]
    for name, arm in arms.items():
        total: Gradient = {}
        cosines = []
        for group, reference in zip(groups, references, strict=True):
            made = gradient(model, group, divisor, arm)
            cosines.append(Likeness(made, reference).of()["cosine"])
            for tensor, value in made.items():
                total[tensor] = total[tensor].add_(value) if tensor in total else value
        like = Likeness(total, whole)
        overall = like.of()
        norm, true = overall["norm"] * overall["reference norm"], overall["reference norm"]
        scales = [min(1.0, clip / value) for value in (norm, true)]
        products = overall["cosine"] * norm * true
        square = (scales[0] * norm) ** 2 + (scales[1] * true) ** 2 - 2 * scales[0] * scales[1] * products
        tensors = {n: like.of([n])["cosine"] for n in like.sums}
        worst = min(tensors, key=tensors.__getitem__)
        found[name] = {
            "overall": overall,
            "places": like.table(place),
            "median tensor": float(torch.tensor(list(tensors.values())).median()),
            "worst tensor": {worst: tensors[worst]},
            "cosine of each group": cosines,
            "relative error, clipped": max(square, 0) ** 0.5 / (scales[1] * true),
            "clip scale": {"here": scales[0], "float64": scales[1]},
        }
        if arms is MAIN:
            found[name] |= {"layers": like.table(layer_of), "kinds": like.table(kind_of)}
        print(row(name, found[name]), flush=True)
    return found


def row(name: str, found: dict[str, Any]) -> str:
    """One line of the table."""
    places = " ".join(
        f"{found['places'][p]['cosine']:8.4f}" for p in ("embeddings", "layer 0", "other layers")
    )
    return (
        f"{name:44} {found['overall']['cosine']:8.4f} x{found['overall']['norm']:6.3f} {places} "
        f"median {found['median tensor']:7.4f} worst group {min(found['cosine of each group']):8.4f}"
    )


def train(model: Any, tokenizer: Any, task: Any, cfg: Any, steps: int) -> None:
    """The profile's GRPO for some steps, quietly, in a folder that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        config = preset(cfg, steps=steps)
        GRPOTrainer(model, task, config, tokenizer=tokenizer, folder=Path(folder) / "run", live=None).train()
    model.train()


def bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The CPU's flag for bfloat16 products: "amx_bf16" (Intel's tiles), else "avx512_bf16", else None.

    None too where the system does not tell its flags.
    """
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    return next((name for name in ("amx_bf16", "avx512_bf16") if name in flags), None)


def seconds_of(model: Any, groups: list[Group], rounds: int) -> dict[str, Any]:
    """Forward and backward pass of these groups in each main precision, in turn, after one that does not count."""
    tokens = sum(len(written) for group in groups for written in group.completions)
    found: dict[str, list[float]] = {name: [] for name in MAIN}
    for number in range(rounds + 1):
        for name, arm in MAIN.items():
            with arm(model):  # casting the weights is not timed
                began = time.perf_counter()
                for group in groups:
                    gradient(model, group, tokens, lambda model: nullcontext())
                found[name] += [time.perf_counter() - began] * (number > 0)
    return {name: spread(values) | {"all": values} for name, values in found.items()}


def main() -> None:
    """Measure the sets in turn, print, save."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as load_policy takes it")
    parser.add_argument("--name", help="of the model in the file's name, where --model is a path")
    parser.add_argument("--weights", help="what the weights are, for the record, where --model is a path")
    parser.add_argument("--profile", default="cpu", help="whose task and group size are taken")
    parser.add_argument(
        "--sets", nargs="+", choices=("task", "trained", "words"), default=["task", "trained", "words"]
    )
    parser.add_argument("--no-parts", action="store_true", help="leave out the parts, one at a time")
    parser.add_argument("--seconds", type=int, default=0, help="rounds; nothing else is measured then")
    parser.add_argument("--groups", type=int, default=6, help="groups with a signal, of 8 completions")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps before the set `trained`")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    cfg = preset(options.profile, seed=options.seed)
    task = cfg.make_task()
    model, tokenizer = load_policy(options.model, dtype="float32", quiet=True)
    model.train()
    how = {"groups": options.groups, "group_size": cfg.group_size, "seed": options.seed}
    command = f"python -m benchmarks.bf16_gradient --sets {' '.join(options.sets)} --groups {options.groups}"
    command += " --no-parts" * options.no_parts + f" --steps {options.steps} --seed {options.seed}"
    name = options.name or Path(options.model).name
    command += f" --model {name} --profile {options.profile}" * (options.profile != "cpu")
    result: dict[str, Any] = origin(command, "torch", "transformers")
    result |= {
        "weights": options.weights or WEIGHTS.get(options.model, name),
        "task": f"{task.name} {cfg.task_options}",
        "seed": options.seed,
        "sets": {},
    }
    if options.seconds:
        del result["sets"]
        groups = sampled(model, tokenizer, task, skip=0, **how)
        result["command"] = (
            f"python -m benchmarks.bf16_gradient --seconds {options.seconds} --groups {options.groups}"
        )
        result |= {"n": len(groups), "unit": "seconds", "instructions": bf16_instructions()} | seconds_of(
            model, groups, options.seconds
        )
        print(save(RESULTS, f"bf16_seconds_{name}", result))
        print({name: round(result[name]["median"], 2) for name in MAIN})
        return
    for kind in options.sets:
        if kind == "words":
            groups = random_words(tokenizer, group_size=cfg.group_size, seed=options.seed)
        else:
            if kind == "trained":
                train(model, tokenizer, task, cfg, options.steps)
            skip = 256 if kind == "trained" else 0
            groups = sampled(model, tokenizer, task, skip=skip, **how)
        print(f"\n{kind}: {len(groups)} groups\n{'':44} {'overall':>8} {'norm':>7} embeddings layer0  others")
        result["sets"][kind] = measure(model, groups, cfg.max_grad_norm, parts=not options.no_parts)
        print(save(RESULTS, f"bf16_gradient_{name}", result))  # after each set


if __name__ == "__main__":
    main()
