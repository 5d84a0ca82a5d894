"""Small copies of runs for the tests of the red flags: what the flags read of a run, in a few kB.

    python -m benchmarks.flag_fixtures healthy runs/main_job_cpu_seed0
    python -m benchmarks.flag_fixtures induced runs/induced/*

Writes tests/fixtures/flags/<kind>/<name>/metrics.csv (with the measures of the completions in `extra`; numbers to 4
digits) and config.json (reward parts, weights, the best constant strategy and the few settings that the flags look at).
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from benchmarks.induced_failures import FAILURES
from benchmarks.result import ROOT, command_line
from grpo_kit import read_completions, read_metrics
from grpo_kit.record.files import METRIC_COLUMNS, run_settings
from grpo_kit.watch._red_flag import Setup, arguments_of
from grpo_kit.watch.monitor import completion_measures

# What the flags read of a run's metrics; a name that ends in / stands for all that begin with it.
COLUMNS = (
    "step", "loss", "learning_rate", "kl", "grad_norm", "entropy", "completion_length", "completion_cut_off",
    "clip_ratio", "reward", "reward/", "frac_reward_zero_std", "frac_cancelled_groups",
    "completions/max_terminated_length", "rollout/logprob_gap", "rollout/age", "diversity/", "script/", "groups/",
    "scale/", "eval/",
)  # fmt: skip
PREFIXES = tuple(name for name in COLUMNS if name.endswith("/"))
FOLDER = ROOT / "tests" / "fixtures" / "flags"
_KEPT = ("reward_parts", "reward_weights", "answer_parts", "best_constant")
_ARGS = (
    "learning_rate", "beta", "temperature", "max_steps", "num_generations", "max_completion_length",
    "steps_per_generation", "num_iterations", "gradient_accumulation_steps", "scale_rewards",
)  # fmt: skip


def copy(run: Path, target: Path) -> None:
    """One run folder; a measure that the run recorded itself is kept as it is."""
    config = run_settings(run)
    config = {
        **{name: config.get(name) for name in _KEPT},
        "model": Path(config["model"]).name.removesuffix(
            "-float32"
        ),  # of a model from a cache its name, not its path
        "args": {name: value for name, value in arguments_of(config).items() if name in _ARGS},
    }
    table, completions = read_metrics(run), read_completions(run)
    if len(completions):
        measured = completion_measures(completions, weights=Setup.of(config).weights).set_index(
            "step"
        )
        table = table.join(
            measured[[name for name in measured if name not in table]], on="step"
        )
    kept = [name for name in table if name in COLUMNS or str(name).startswith(PREFIXES)]
    named = [name for name in METRIC_COLUMNS if name in kept] + [
        n for n in kept if n.startswith("reward/")
    ]
    rows = []
    for row in table.to_dict("records"):
        extra = {
            name: float(f"{row[name]:.4g}")
            for name in kept
            if name not in named and row[name] == row[name]
        }
        cells = {name: "" if row[name] != row[name] else f"{row[name]:.4g}" for name in named}
        rows.append(cells | {"extra": json.dumps(extra)})
    target.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(target / "metrics.csv", index=False, lineterminator="\n")
    (target / "config.json").write_text(json.dumps(config) + "\n")
    if (run / "induced.json").exists():
        name = json.loads((run / "induced.json").read_text())["name"]
        about = {"what": FAILURES[name].what, "flags": FAILURES[name].flags}
        (target / "induced.json").write_text(json.dumps(about, indent=2) + "\n")


def main() -> None:
    """Copy the runs named."""
    parser = command_line(__doc__)
    parser.add_argument("kind", choices=["healthy", "induced"])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--names", nargs="*", help="of the copies; default: the folders' own")
    options = parser.parse_args()
    for run, name in zip(
        options.runs, options.names or [run.name for run in options.runs], strict=True
    ):
        copy(run, FOLDER / options.kind / name)


if __name__ == "__main__":
    main()
