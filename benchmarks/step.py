"""One GRPO step, plain TRL beside the kit: same weights, prompts, seed, rewards and lengths, in turn, in one process.

    python -m benchmarks.step --rounds 3

Each round builds a fresh trainer of each arm on the same weights and times one step after a warm-up step of its own
(learning rate 0, so both steps see the same weights). Both arms must have done the same work: equal token counts,
rewards, and gradient norms within 1 %; otherwise it stops. Saves benchmarks/results/step_<profile>.json.

Simplifications: two arms, the profile's own task (short prompts), no phases, no memory.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
import trl

from benchmarks.main_job import ROOT, WEIGHTS, hardware
from grpo_kit import GRPOTrainer, load_policy, profile


def measure(arm: str, model, tokenizer, task, cfg) -> dict[str, float]:
    """Seconds, tokens, reward and gradient norm of one step of the arm, the warm-up step left out."""
    with tempfile.TemporaryDirectory() as folder:
        args = cfg.grpo_config(folder, reward_weights=task.reward_weights, max_steps=2, learning_rate=0.0)
        kit = arm == "kit"
        torch.manual_seed(cfg.seed)
        trainer = (GRPOTrainer if kit else trl.GRPOTrainer)(
            model=copy.deepcopy(model),
            reward_funcs=list(task.rewards),
            args=args,
            train_dataset=task.dataset(tokenizer),
            processing_class=tokenizer,
            **({"live": False} if kit else {}),
        )
        trainer.train()
        steps = [row for row in trainer.state.log_history if "step_time" in row]
    names = {"seconds": "step_time", "tokens": "num_tokens", "reward": "reward", "grad_norm": "grad_norm"}
    return {name: steps[-1][key] for name, key in names.items()}


def main() -> None:
    """Run the rounds, check that the work was the same, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", default="cpu")
    options = parser.parse_args()
    cfg = profile(options.profile)
    task = cfg.make_task()
    model, tokenizer = load_policy(cfg.model, dtype=cfg.dtype)
    rounds = []
    for number in range(options.rounds):
        arms = {arm: measure(arm, model, tokenizer, task, cfg) for arm in ("trl-hf", "kit")}
        rounds.append(arms)
        plain, kit = arms["trl-hf"], arms["kit"]
        print(f"round {number + 1}: trl-hf {plain['seconds']:.1f} s, kit {kit['seconds']:.1f} s", flush=True)
        if plain["tokens"] != kit["tokens"] or plain["reward"] != kit["reward"]:
            raise SystemExit(f"the arms sampled differently, so their times do not compare: {arms}")
        if abs(plain["grad_norm"] / kit["grad_norm"] - 1) > 0.01:
            raise SystemExit(f"the arms' gradient norms differ, so one of them is wrong: {arms}")
    seconds = {arm: statistics.median(r[arm]["seconds"] for r in rounds) for arm in ("trl-hf", "kit")}
    result = {
        "command": f"python -m benchmarks.step --rounds {options.rounds} --profile {cfg.name}",
        "hardware": hardware(),
        "weights": WEIGHTS.get(cfg.model, cfg.model),
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "work": f"{cfg.prompts_per_step} prompts x {cfg.group_size} completions of {task.name}",
        "median seconds": seconds,
        "ratio": seconds["trl-hf"] / seconds["kit"],
        "rounds": rounds,
    }
    path = Path(ROOT, "benchmarks", "results", f"step_{cfg.name}.json")
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({"median seconds": seconds, "ratio": result["ratio"]}))


if __name__ == "__main__":
    main()
