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

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import set_seed

from benchmarks.agents import MODEL, SAMPLES, STEPS, TASKS, difference, percent, share
from benchmarks.result import RESULTS, ROOT, WEIGHTS, as_text, command_line, origin, six_digits
from grpo_kit import EpisodeTrainer, load_policy, next_run_folder, profile
from grpo_kit.episodes import Episode, EpisodeTask
from grpo_kit.episodes.observation import Renderer
from grpo_kit.evaluation.generate_and_score import answer
from grpo_kit.lab.statistics import over_seeds
from grpo_kit.record.files import read_metrics

PATH = RESULTS / f"hinted_{MODEL}.json"
ARMS = ("never hinted", "hint kept", "weights on", "weights off", "sft")
CONTROL = "weights off"


def task_of(*, hint: bool) -> EpisodeTask:
    """The grid, with or without worked episodes in front."""
    task = TASKS["grid"]()
    return task if hint else replace(task, view=replace(task.view, examples=()))


class HintedTrainer(EpisodeTrainer):
    """Plays with the task's view, trains the same completions behind the prompts of another.

    weights: is the ratio that of both contexts? episodes: what a run before this one played, one list a step, to be
    imitated where it succeeded; None: this one plays.
    """

    def __init__(self, *given: Any, plain: Any, weights: bool, episodes: list | None = None, **options: Any):
        super().__init__(*given, **options)
        self.weights, self.given_episodes = weights, episodes
        self.played: list[list[Episode]] = []
        self._without = Renderer(self.processing_class, plain, tuple(self._renderer.ends))

    def _play(self, inputs: list[dict[str, Any]]) -> tuple[list[Episode], Any]:
        if self.given_episodes is not None:
            return self.given_episodes[self.state.global_step], None
        episodes, _ = super()._play(inputs)
        for episode in episodes:
            prompts = [
                self._without.first(episode.row["question"], turn.observation) for turn in episode.turns
            ]
            episode.turns = [
                replace(t, prompt_ids=p.ids) for t, p in zip(episode.turns, prompts, strict=True)
            ]
        self.played.append(episodes)
        return episodes, None

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.given_episodes is not None:
            right = torch.tensor(
                [e.total >= self.task.success for e in self._turns.episodes for _ in e.turns]
            )
            right = torch.cat([right, torch.zeros(self._turns.fillers)]).float()
            # The mean over the tokens of those that are imitated, whatever the others hold.
            kept = (output["completion_mask"].sum(1) * right).sum().clamp(min=1)
            output["advantages"] = right * output["num_items_in_batch"] / kept
        elif self.weights:
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output


def succeeded(model: Any, tokenizer: Any, *, hint: bool) -> list[int]:
    """Of each held-out row the episodes of SAMPLES that succeed."""
    found = answer(model, tokenizer, task_of(hint=hint), samples=SAMPLES, temperature=1.0)
    return [sum(right) for right in found.by_row(found.right)]


def run(arm: str, seed: int, before: dict[str, list[int]] | None) -> dict[str, Any]:
    """Train one arm; its row."""
    set_seed(seed)
    model, tokenizer = load_policy(MODEL, quiet=True)
    ways = {"without": False, "with": True}
    before = before or {way: succeeded(model, tokenizer, hint=hint) for way, hint in ways.items()}
    folder = next_run_folder(ROOT / "runs", f"hinted_{arm.replace(' ', '_')}_seed{seed}")
    task = task_of(hint=arm != "never hinted")
    args = profile("cpu", seed=seed, steps=STEPS).grpo_config(folder, task=task)
    kept = _kept(seed)
    set_seed(seed)
    if arm in ("never hinted", "hint kept"):
        trainer = EpisodeTrainer(model, task, args, processing_class=tokenizer, live=None)
    else:
        if arm == "sft" and not kept.exists():
            raise SystemExit(f'arm "sft" imitates what "{CONTROL}" played: run that first, with seed {seed}')
        trainer = HintedTrainer(
            model, task, args, processing_class=tokenizer, live=None, plain=task_of(hint=False).view,
            weights=arm == "weights on", episodes=pickle.loads(kept.read_bytes()) if arm == "sft" else None,
        )  # fmt: skip
    trainer.train()
    if arm == CONTROL:
        kept.write_bytes(pickle.dumps(trainer.played))
    metrics = read_metrics(folder)
    return {
        "arm": arm,
        "seed": seed,
        "before": before,
        "after": {way: succeeded(model, tokenizer, hint=hint) for way, hint in ways.items()},
        "success": metrics["episodes/success"].tolist(),
        "contexts_apart": metrics["rollout/logprob_gap"].tolist() if "rollout/logprob_gap" in metrics else [],
        "step_seconds": metrics["step_seconds"].tolist(),
    }


def _kept(seed: int) -> Path:
    return ROOT / "runs" / f"hinted_samples_seed{seed}.pkl"


def table(saved: dict[str, Any]) -> str:
    """Each arm without and with the hint, and its difference to the control without it."""
    head = ["arm", "seeds", "in training", "without the hint", "with it", f'without, less "{CONTROL}"']
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
        ways = [over_seeds([share(r["after"][way]) for r in found]) for way in ("without", "with")]
        cells = [arm, str(len(found)), f"{100 * over_seeds([r['success'] for r in found]).value:.1f} %"]
        cells += [percent(e) for e in ways]
        both = [(control[r["seed"]], r) for r in found if r["seed"] in control and arm != CONTROL]
        pairs = [[share(r["after"]["without"]) for r in side] for side in zip(*both, strict=True)]
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
    saved = json.loads(PATH.read_text()) if PATH.exists() else {"runs": []}
    if not options.table:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
        for seed, arm in ((seed, arm) for seed in options.seeds for arm in options.arms):
            if any((r["arm"], r["seed"]) == (arm, seed) for r in saved["runs"]):
                continue
            made = run(arm, seed, next((r["before"] for r in saved["runs"]), None))
            facts = origin("python -m benchmarks.hinted", "torch", "transformers", "trl")
            made["date"] = facts["date"]
            saved = facts | {"weights": WEIGHTS[MODEL], "runs": [*saved["runs"], six_digits(made)]}
            PATH.write_text(as_text(saved))
            print(arm, seed, fmean(share(made["after"]["without"])), flush=True)
    print(table(saved))


if __name__ == "__main__":
    main()
