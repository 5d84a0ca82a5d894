"""The share of a float32 run's weight change that each optimizer keeps, at learning rates of 1e-6 to 1e-5.

    python -m benchmarks.precision                      # minutes on 2 cores
    python -m benchmarks.precision --no-flash --no-model

Four tables: weights drawn at random; a larger spread of weights; gradients from large to tiny; and the real weights
and policy gradients of SmolLM2-135M. flashoptim's rows come from its kernels under Triton's interpreter
(benchmarks/flash_on_cpu.py) and need `pip install --no-deps flashoptim triton`; otherwise they are left out.
Saves benchmarks/results/precision.json.
"""

from __future__ import annotations

import importlib.util
import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which others do

import torch

from benchmarks.result import RESULTS, WEIGHTS, command_line, origin, save
from grpo_kit.more.lab.rounding import ARMS, update_survival

MODEL = "smollm2-135m-instruct"
MATRICES = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.15.self_attn.q_proj.weight",
    "model.layers.29.mlp.down_proj.weight",
)


def policy_gradients(
    steps: int, elements: int, seed: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Name -> weights (elements,), gradients (steps, elements): first elements of MATRICES, clipped at norm 1.

    Two sampled completions of 16 tokens a step with advantages +1 and -1: GRPO's gradient on a group of two.
    """
    from grpo_kit.models import load_policy

    model, tokenizer = load_policy(MODEL, quiet=True)
    torch.manual_seed(seed)
    parameters = dict(model.named_parameters())
    found: dict[str, list[torch.Tensor]] = {name: [] for name in MATRICES}
    for step in range(steps):
        prompt = torch.tensor(
            [tokenizer(f"Write one line about the number {step}:").input_ids] * 2
        )
        with torch.no_grad():
            ids = model.generate(
                prompt, do_sample=True, top_k=0, min_new_tokens=16, max_new_tokens=16
            )
        logits = model(ids).logits[:, prompt.shape[1] - 1 : -1]
        # (2, 16)
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, prompt.shape[1] :, None])[..., 0]
        model.zero_grad()
        (-(torch.tensor([[1.0], [-1.0]]) * logprobs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for name, gradients in found.items():
            gradients.append(parameters[name].grad.flatten()[:elements].clone())
    return {
        n: (parameters[n].detach().flatten()[:elements], torch.stack(g))
        for n, g in found.items()
    }


def main() -> None:
    """Run, print, save."""
    parser = command_line(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-flash", action="store_true", help="leave flashoptim out")
    parser.add_argument(
        "--no-model", action="store_true", help="leave real weights and gradients out"
    )
    options = parser.parse_args()
    arms, packages = dict(ARMS), ["torch", "bitsandbytes"]
    flash = not options.no_flash and all(
        map(importlib.util.find_spec, ("flashoptim", "triton"))
    )
    if flash:
        from benchmarks.flash_on_cpu import flash_arm

        arms["flash-adamw, bfloat16 weights + 16 bits"] = flash_arm(32)
        arms["flashoptim's default, bfloat16 weights + 8 bits"] = flash_arm(24)
        packages += ["flashoptim", "triton"]

    common = {"arms": arms, "seed": options.seed}
    tables = {"weights N(0, 0.03)": update_survival(**common)}
    wide = 0.1 * torch.randn(2**15, generator=torch.Generator().manual_seed(options.seed))
    tables["weights N(0, 0.1)"] = update_survival([1e-6], weights=wide, **common)
    for rms in (1.0, 1e-5, 1e-6, 1e-7):
        tables[f"gradients of rms {rms:g}"] = update_survival(
            [1e-6], gradient_rms=rms, **common
        )
    if not options.no_model:
        for name, (weights, gradients) in policy_gradients(30, 2**15, options.seed).items():
            rms = float(gradients.square().mean().sqrt())
            title = f"SmolLM2-135M {name}, gradients of rms {rms:.1e}"
            tables[title] = update_survival(
                [1e-6], weights=weights, gradients=gradients, **common
            )
    for title, table in tables.items():
        print(
            f"\n{title}\n{table.to_string(index=False, float_format='{:.4g}'.format)}",
            flush=True,
        )

    left_out = " --no-flash" * options.no_flash + " --no-model" * options.no_model
    result = origin(
        f"python -m benchmarks.precision{left_out} --seed {options.seed}", *packages
    ) | {
        "model": WEIGHTS[MODEL],
        "seed": options.seed,
        "columns": "shares of a float32 AdamW run's weight change: kept by weights and optimizer state, already in the "
        "stored weights; error = norm of the difference over the norm of the change",
        "flashoptim": "its kernels under Triton's interpreter on a CPU" if flash else "not run",
        "tables": {
            title: json.loads(table.to_json(orient="records"))
            for title, table in tables.items()
        },
    }
    save(RESULTS, "precision", result)


if __name__ == "__main__":
    main()
