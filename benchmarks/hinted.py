"""Context distillation: episodes are sampled with a hint in the prompt, and trained without it.

    python -m benchmarks.hinted              # five arms, seeds 0 1 2, 2 minutes a run; goes on if stopped
    python -m benchmarks.hinted --table      # what is saved

The hint: three worked episodes of the grid, in front of every question. Arms, of 16 steps of 4 rows x 8 episodes each:
"weights on": GRPO whose old log-probabilities are those of sampling, behind the prompt with the hint, so that the
clipped ratio is that of two contexts; "weights off": GRPO as if the completions had been sampled without the hint;
"sft": the very samples of "weights off", of which the successful ones are imitated; "never hinted" and "hint kept":
sampled and trained both without, and both with it. All are evaluated without the hint, and with it.
Writes benchmarks/results/hinted_smollm2-135m-instruct.json: of 64 held-out rows the episodes of 4 that succeed, at
temperature 1; and how far the sampled tokens' log-probabilities with and without the hint lie apart, step by step.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import set_seed

from benchmarks.agents import MODEL, SAMPLES, STEPS, TASKS, difference, percent, share
from benchmarks.result import (
    RESULTS,
    ROOT,
    WEIGHTS,
    command_line,
    origin,
    read_result,
    write_result,
)
from grpo_kit import Config, GRPOTrainer, load_policy, next_run_folder, preset
from grpo_kit.evaluation.generate_and_score import Decoding, answer
from grpo_kit.loop.batch import Batch, padded
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.models._model_facts import end_ids
from grpo_kit.more.episodes import EpisodeTask
from grpo_kit.more.episodes._episode_sample import fast_episodes
from grpo_kit.more.episodes.observation import Renderer, View
from grpo_kit.more.lab.statistics import over_seeds
from grpo_kit.record.files import read_metrics

PATH = RESULTS / f"hinted_{MODEL}.json"
ARMS = ("never hinted", "hint kept", "weights on", "weights off", "sft")
CONTROL = "weights off"


def task_of(*, hint: bool) -> EpisodeTask:
    """The grid, with or without worked episodes in front."""
    task = TASKS["grid"]()
    return task if hint else replace(task, view=replace(task.view, examples=()))


class HintedSample:
    """Plays episodes with the task's view; the same completions are trained behind the prompts of another view.

    inner: who plays. plain: the view without the hint. weights: is the ratio that of both contexts? played: what a run
    before this one sampled, a Batch a step, to be imitated where it succeeded; None: this one plays, and keeps it.
    """

    def __init__(
        self, inner: Any, plain: View, *, weights: bool, played: list[Batch] | None = None
    ) -> None:
        self._inner, self._plain, self._weights, self._given = inner, plain, weights, played
        self.played: list[Batch] = []

    def measures(self, batch: Batch, task: EpisodeTask) -> dict[str, float]:
        """As the inner one's, and how far apart the tokens' log-probabilities are in both contexts."""
        return self._inner.measures(batch, task) | (
            {"contexts_apart": self._apart} if self._given is None else {}
        )

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        task: EpisodeTask,
        rows: Any,
        config: Config,
        numbers: Any,
    ) -> Batch:
        """The turns of the step's episodes."""
        if self._given is not None:
            return imitated(self._given[numbers.step], task.success)
        batch = self._inner(model, tokenizer, task, rows, config, numbers)
        renderer = Renderer(tokenizer, self._plain, tuple(end_ids(model, tokenizer)))
        seen = zip(batch.rows, batch.extra["observation"], strict=True)
        batch.prompt_ids = [
            list(renderer.first(row["question"], observation).ids) for row, observation in seen
        ]
        hinted = padded(batch.sampler_logprobs, batch.width)
        plain = PaddedUpdate(config).logprobs(model, batch, numbers.temperature)
        mask = batch.mask().bool()
        self._apart = (hinted - plain).abs()[mask].mean().item()
        if self._weights:
            batch.old_logprobs = hinted
        self.played.append(batch)
        return batch


def imitated(batch: Batch, success: float) -> Batch:
    """The batch with advantages that make its loss the mean over the tokens of episodes that succeeded alone."""
    right = [reward >= success for reward in batch.rewards]
    lengths = [len(ids) for ids in batch.completion_ids]
    kept = sum(n for n, one in zip(lengths, right, strict=True) if one) or 1
    return replace(
        batch, advantages=[one * sum(lengths) / kept for one in right], old_logprobs=None
    )


def succeeded(model: Any, tokenizer: Any, *, hint: bool) -> list[int]:
    """Of each held-out row the episodes of SAMPLES that succeed."""
    found = answer(model, tokenizer, task_of(hint=hint), None, Decoding(SAMPLES, 1.0))
    return [sum(right) for right in found.by_row(found.right)]


def run(arm: str, seed: int, before: dict[str, list[int]] | None) -> dict[str, Any]:
    """Train one arm; its row."""
    set_seed(seed)
    model, tokenizer = load_policy(MODEL, quiet=True)
    ways = {"without": False, "with": True}
    before = before or {
        way: succeeded(model, tokenizer, hint=hint) for way, hint in ways.items()
    }
    folder = next_run_folder(ROOT / "runs", f"hinted_{arm.replace(' ', '_')}_seed{seed}")
    task = task_of(hint=arm != "never hinted")
    config = preset("cpu", seed=seed, steps=STEPS)
    kept = _kept(seed)
    set_seed(seed)
    sample = None
    if arm not in ("never hinted", "hint kept"):
        if arm == "sft" and not kept.exists():
            raise SystemExit(
                f'arm "sft" imitates what "{CONTROL}" played: run that first, with seed {seed}'
            )
        sample = HintedSample(
            fast_episodes(model, config).sample, task_of(hint=False).view, weights=arm == "weights on",
            played=pickle.loads(kept.read_bytes()) if arm == "sft" else None,
        )  # fmt: skip
    GRPOTrainer(
        model, task, config, tokenizer=tokenizer, folder=folder, live=None, sample=sample
    ).train()
    if arm == CONTROL:
        kept.write_bytes(pickle.dumps(sample.played))
    metrics = read_metrics(folder)
    return {
        "arm": arm,
        "seed": seed,
        "before": before,
        "after": {way: succeeded(model, tokenizer, hint=hint) for way, hint in ways.items()},
        "success": metrics["episodes/success"].tolist(),
        "contexts_apart": metrics["contexts_apart"].tolist()
        if "contexts_apart" in metrics
        else [],
        "step_seconds": metrics["step_seconds"].tolist(),
    }


def _kept(seed: int) -> Path:
    return ROOT / "runs" / f"hinted_samples_seed{seed}.pkl"


def table(saved: dict[str, Any]) -> str:
    """Each arm without and with the hint, and its difference to the control without it."""
    head = [
        "arm",
        "seeds",
        "in training",
        "without the hint",
        "with it",
        f'without, less "{CONTROL}"',
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    runs = {arm: [r for r in saved["runs"] if r["arm"] == arm] for arm in ARMS}
    if saved["runs"]:
        first = saved["runs"][0]["before"]
        shares = [f"{100 * fmean(share(first[way])):.1f} %" for way in ("without", "with")]
        lines.append(f"| before | | | {shares[0]} | {shares[1]} | |")
    control = {r["seed"]: r for r in runs[CONTROL]}
    for arm, found in runs.items():
        if not found:
            continue
        ways = [
            over_seeds([share(r["after"][way]) for r in found]) for way in ("without", "with")
        ]
        cells = [
            arm,
            str(len(found)),
            f"{100 * over_seeds([r['success'] for r in found]).value:.1f} %",
        ]
        cells += [percent(e) for e in ways]
        both = [
            (control[r["seed"]], r) for r in found if r["seed"] in control and arm != CONTROL
        ]
        pairs = [
            [share(r["after"]["without"]) for r in side] for side in zip(*both, strict=True)
        ]
        cells.append(difference(*pairs) if both else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is not there, save after each run."""
    parser = command_line(__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="print what is saved")
    options = parser.parse_args()
    saved = read_result(PATH, runs=[])
    if not options.table:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
        for seed, arm in ((seed, arm) for seed in options.seeds for arm in options.arms):
            if any((r["arm"], r["seed"]) == (arm, seed) for r in saved["runs"]):
                continue
            made = run(arm, seed, next((r["before"] for r in saved["runs"]), None))
            facts = origin("python -m benchmarks.hinted", "torch", "transformers")
            made["date"] = facts["date"]
            saved = facts | {"weights": WEIGHTS[MODEL], "runs": [*saved["runs"], made]}
            write_result(PATH, saved)
            print(arm, seed, fmean(share(made["after"]["without"])), flush=True)
    print(table(saved))


if __name__ == "__main__":
    main()
