"""What a decode step costs on a CPU by the number of rows, beside the floor, and where the time of a step goes.

    python -m benchmarks.decode
    python -m benchmarks.decode --rows 1 32 --before ../an_older_checkout

Rows are completions of up to four prompts of 160 to 350 tokens, sampled at temperature 1. A step is the time between
two calls of the sampler; --before measures another checkout of the kit in turn, in processes of its own. The floor is
the larger of weight bytes / bandwidth and 2 x parameters x rows / peak FLOP/s, both measured in the same run;
attention is not in it. The profile is torch's own time by operator at the largest number of rows up to 32. The least
and the median of all steps are given: on a busy machine the least says more. "rollouts" are whole ones, prompts
included, of what has little or nothing to share: few rows, prompts of their own, LoRA, a tiny model. Writes
results/decode.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.result import RESULTS, ROOT, WEIGHTS, command_line, origin, save
from benchmarks.step.floor import device_peaks

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64)
LENGTHS = (160, 350, 220, 280)
# Whole rollouts: (prompts, completions of each, model if not --model, tuning)
ROLLOUTS = {
    "one row": (1, 1, None, "full"),
    "4 prompts, 1 completion each": (4, 1, None, "full"),
    "4 prompts, 2 completions each": (4, 2, None, "full"),
    "32 prompts, 1 completion each": (32, 1, None, "full"),
    "4 prompts, 8 completions each, LoRA": (4, 8, None, "lora"),
    "4 prompts, 8 completions each, a tiny model": (4, 8, "tiny-random", "full"),
}
# Runs in another process, on whatever checkout lies in its folder.
MEASURE = """
import json, os, sys, time, torch
from transformers import GenerationConfig
from grpo_kit.models import load_policy
from grpo_kit.rollout import RolloutEngine
from grpo_kit.rollout.sampling import Sampler
asked = json.loads(sys.argv[1])
torch.set_num_threads(asked["threads"])
model, _ = load_policy(asked["model"], quiet=True)
model.eval()
clock, inner = [], Sampler.__call__
def timed(self, *args, **kwargs):
    clock.append(time.perf_counter())
    return inner(self, *args, **kwargs)
Sampler.__call__ = timed
draw = torch.Generator().manual_seed(0)
vocabulary = model.config.vocab_size
config = GenerationConfig(
    max_new_tokens=asked["tokens"], do_sample=True, top_k=0, eos_token_id=[], pad_token_id=0
)
def prompts(rows):
    lengths = asked["lengths"][:rows]
    some = [torch.randint(20, vocabulary - 20, (n,), generator=draw).tolist() for n in lengths]
    return [some[row * len(some) // rows] for row in range(rows)]
found = {}
for rows in asked["rows"]:
    clock.clear()
    RolloutEngine(model).generate(prompts(rows), config, seed=0)
    found[rows] = [b - a for a, b in zip(clock[1:], clock[2:])]
whole = {}
for name, (prompts_, completions, other, tuning) in asked["rollouts"].items():
    policy, _ = load_policy(other or asked["model"], tuning=tuning, quiet=True)
    engine, seconds = RolloutEngine(policy.eval()), []
    for _ in range(4):
        lengths = [asked["lengths"][i % len(asked["lengths"])] for i in range(prompts_)]
        own = [torch.randint(20, vocabulary - 20, (n,), generator=draw).tolist() for n in lengths]
        start = time.perf_counter()
        engine.generate([ids for ids in own for _ in range(completions)], config, seed=0)
        seconds.append(time.perf_counter() - start)
    whole[name] = seconds[1:]
profile = {}
if asked["profile"]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        RolloutEngine(model).generate(prompts(asked["profile"]), config, seed=0)
    for event in profiler.key_averages():
        profile[event.key] = [event.self_cpu_time_total / 1e3, event.count]
print(json.dumps({"steps": found, "rollouts": whole, "profile": profile, "parameters": model.num_parameters()}))
"""


def measure(kit: Path, **asked: object) -> dict:
    """Seconds of each step by rows, and milliseconds and calls by operator, of the kit in this checkout."""
    environment = os.environ | {"PYTHONPATH": str(kit)}
    how = {"cwd": kit, "env": environment, "capture_output": True, "text": True, "check": True}
    done = subprocess.run([sys.executable, "-c", MEASURE, json.dumps(asked)], **how)
    return json.loads(done.stdout.splitlines()[-1])


def shares(profile: dict[str, list[float]], least: float = 0.01) -> dict[str, dict[str, float]]:
    """Operators by their share of all time, those above `least`; "others" is the rest."""
    total = sum(ms for ms, _ in profile.values())
    table = {
        name: {"share": ms / total, "ms": ms, "calls": calls}
        for name, (ms, calls) in sorted(profile.items(), key=lambda item: -item[1][0])
        if ms >= least * total
    }
    table["others"] = {"share": 1 - sum(row["share"] for row in table.values())}
    return table


def main() -> None:
    """Measure in turn, save, print."""
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--before", type=Path, help="another checkout of the kit, measured in turn")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    kits = {"before": options.before.resolve()} if options.before else {}
    kits["now"] = ROOT
    steps: dict[str, dict[str, list[float]]] = {who: {} for who in kits}
    rollouts: dict[str, dict[str, list[float]]] = {who: {} for who in kits}
    profiles = {}
    asked = {name: getattr(options, name) for name in ("rows", "tokens", "threads", "model")}
    asked |= {"lengths": LENGTHS, "rollouts": ROLLOUTS}
    for number in range(options.rounds):
        for who, kit in kits.items():
            wanted = max((n for n in options.rows if n <= 32), default=0) if not number else 0
            said = measure(kit, **asked, profile=wanted)
            for all_of, some in ((steps, said["steps"]), (rollouts, said["rollouts"])):
                for name, seconds in some.items():
                    all_of[who].setdefault(name, []).extend(seconds)
            profiles |= {who: shares(said["profile"])} if wanted else {}
    peaks = device_peaks(False, torch.float32)
    floors = {
        rows: 1e3 * said["parameters"] * max(4 / peaks["bytes/s"], 2 * rows / peaks["FLOP/s"])
        for rows in options.rows
    }
    command = "python -m benchmarks.decode" + " --before <a checkout>" * bool(options.before)
    result = origin(command, "torch", "transformers", "peft")
    result |= {"weights": WEIGHTS.get(options.model, options.model), "threads": options.threads, "seed": 0}
    result |= {"n": {who: len(steps[who][str(options.rows[0])]) for who in steps}, "unit": "ms a step"}
    result |= {"load average before": load, "peaks": peaks, "floor": floors}
    for who, by_rows in steps.items():
        result[who] = {rows: _least_and_median(s, 1e3) for rows, s in by_rows.items()}
    result["seconds of a rollout"] = {
        who: {name: _least_and_median(s) for name, s in by_name.items()} for who, by_name in rollouts.items()
    }
    result["profile"] = profiles
    print(save(options.out, "decode", result))
    for rows in options.rows:
        cells = [
            f"{who} {result[who][str(rows)]['least']:6.1f} (median {result[who][str(rows)]['median']:6.1f})"
            for who in kits
        ]
        print(f"{rows:3} rows  floor {floors[rows]:5.1f}  " + "  ".join(cells))
    for name in ROLLOUTS:
        cells = [f"{who} {result['seconds of a rollout'][who][name]['median']:.3f} s" for who in kits]
        print(f"{name}: " + "  ".join(cells))


def _least_and_median(values: list[float], times: float = 1) -> dict[str, float]:
    return {"least": times * min(values), "median": times * sorted(values)[len(values) // 2]}


if __name__ == "__main__":
    main()
