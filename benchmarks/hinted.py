"""Context distillation: episodes are sampled with a hint in the prompt, and trained without it.

    python -m benchmarks.hinted              # five arms, seeds 0 1 2, 2 minutes a run; goes on if stopped
    python -m benchmarks.hinted --one-turn   # three arms of one turn, seeds 0 1 2
    python -m benchmarks.hinted --table      # what is saved (--one-turn --table: of those)

The hint: three worked episodes of the grid, in front of every question. Arms, of 16 steps of 4 rows x 8 episodes each:
"weights on": GRPO whose old log-probabilities are those of sampling, behind the prompt with the hint, so that the
clipped ratio is that of two contexts; "weights off": GRPO as if the completions had been sampled without the hint;
"sft": the very samples of "weights off", of which the successful ones are imitated; "never hinted" and "hint kept":
sampled and trained both without, and both with it. All are evaluated without the hint, and with it.
Writes benchmarks/results/hinted_smollm2-135m-instruct.json: of 64 held-out rows the episodes of 4 that succeed, at
temperature 1; and how far the sampled tokens' log-probabilities with and without the hint lie apart, step by step.

--one-turn: the largest of some numbers, with a prefill and no worked example, so that an answer rarely closes its tag.
The hint: three examples, as text in the system message. "no hint": neither sampled nor trained with it;
"hint while sampling": examples.hinted.Hinted; "hint that stays": in the task's own system message. 16 steps
of 4 rows x 8 completions, rate 2e-5, importance_sampling_cap 2, of 64 held-out rows 4 completions, temperature 1.
Writes benchmarks/results/hinted_one_turn_smollm2-135m-instruct.json.
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
from examples.hinted import Hinted
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
from grpo_kit.tasks import Task, largest

PATH = RESULTS / f"hinted_{MODEL}.json"
ARMS = ("never hinted", "hint kept", "weights on", "weights off", "sft")
CONTROL = "weights off"
PATH_ONE_TURN = RESULTS / f"hinted_one_turn_{MODEL}.json"
ONE_TURN = ("no hint", "hint while sampling", "hint that stays")
HINT = "\n".join(
    f"User: Which number is the largest: {numbers}?\nAssistant: <answer>{answer}</answer>"
    for numbers, answer in (("47, 82, 15", 82), ("91, 33, 12, 58", 91), ("20, 64", 64))
)


def task_of(*, hint: bool) -> EpisodeTask:
    """The grid, with or without worked episodes in front."""
    task = TASKS["grid"]()
    return task if hint else replace(task, view=replace(task.view, examples=()))


def one_turn(*, hint: bool) -> Task:
    """The largest of some numbers, without a worked example; with the hint in its own system message or not."""
    task = largest(n_train=512, n_held_out=64)
    system = f"{task.system} Such as <answer>82</answer>."
    return replace(task, examples=(), system=f"{system}\n{HINT}" if hint else system)


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


def succeeded(model: Any, tokenizer: Any, task_of: Any) -> dict[str, list[int]]:
    """Without and with the hint: of each held-out row the completions, or episodes, of SAMPLES that succeed."""
    counts = {}
    for way, hint in (("without", False), ("with", True)):
        found = answer(model, tokenizer, task_of(hint=hint), None, Decoding(SAMPLES, 1.0))
        counts[way] = [sum(right) for right in found.by_row(found.right)]
    return counts


def run(arm: str, seed: int, before: dict[str, list[int]] | None) -> dict[str, Any]:
    """Train one arm; its row."""
    set_seed(seed)
    model, tokenizer = load_policy(MODEL, quiet=True)
    before = before or succeeded(model, tokenizer, task_of)
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
        "after": succeeded(model, tokenizer, task_of),
        "success": metrics["episodes/success"].tolist(),
        "contexts_apart": metrics["contexts_apart"].tolist()
        if "contexts_apart" in metrics
        else [],
        "step_seconds": metrics["step_seconds"].tolist(),
    }


def run_one_turn(arm: str, seed: int, before: dict[str, list[int]] | None) -> dict[str, Any]:
    """Train one arm of one turn; its row."""
    set_seed(seed)
    model, tokenizer = load_policy(MODEL, quiet=True)
    before = before or succeeded(model, tokenizer, one_turn)
    folder = next_run_folder(ROOT / "runs", f"hinted_{arm.replace(' ', '_')}_seed{seed}")
    config = preset(
        "cpu", seed=seed, steps=STEPS, learning_rate=2e-5, importance_sampling_cap=2.0
    )
    set_seed(seed)
    GRPOTrainer(
        model,
        one_turn(hint=arm == "hint that stays"),
        config,
        tokenizer=tokenizer,
        folder=folder,
        live=None,
        sample=Hinted(HINT) if arm == "hint while sampling" else None,
    ).train()
    metrics = read_metrics(folder)
    columns = {
        "success": "reward/exact_answer",
        "contexts_apart": "rollout/logprob_gap",
        "capped": "rollout/capped",
        "step_seconds": "step_seconds",
    }
    return {
        "arm": arm,
        "seed": seed,
        "before": before,
        "after": succeeded(model, tokenizer, one_turn),
        **{name: metrics[column].tolist() for name, column in columns.items()},
    }


def _kept(seed: int) -> Path:
    return ROOT / "runs" / f"hinted_samples_seed{seed}.pkl"


def table(saved: dict[str, Any], arms: tuple[str, ...], control_arm: str) -> str:
    """Each arm without and with the hint, and its difference to the control without it."""
    head = [
        "arm",
        "seeds",
        "in training",
        "without the hint",
        "with it",
        f'without, less "{control_arm}"',
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    runs = {arm: [r for r in saved["runs"] if r["arm"] == arm] for arm in arms}
    if saved["runs"]:
        first = saved["runs"][0]["before"]
        shares = [f"{100 * fmean(share(first[way])):.1f} %" for way in ("without", "with")]
        lines.append(f"| before | | | {shares[0]} | {shares[1]} | |")
    control = {r["seed"]: r for r in runs[control_arm]}
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
            (control[r["seed"]], r)
            for r in found
            if r["seed"] in control and arm != control_arm
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
    parser.add_argument(
        "--arms", nargs="+", choices=(*ARMS, *ONE_TURN), metavar="ARM", help="default: all"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--one-turn", action="store_true", help="the task of one turn")
    parser.add_argument("--table", action="store_true", help="print what is saved")
    options = parser.parse_args()
    path, arms, control, train = PATH, ARMS, CONTROL, run
    command = "python -m benchmarks.hinted"
    if options.one_turn:
        path, arms, control, train = PATH_ONE_TURN, ONE_TURN, ONE_TURN[0], run_one_turn
        command += " --one-turn"
    saved = read_result(path, runs=[])
    if not options.table:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
        for seed, arm in (
            (seed, arm) for seed in options.seeds for arm in options.arms or arms
        ):
            if any((r["arm"], r["seed"]) == (arm, seed) for r in saved["runs"]):
                continue
            made = train(arm, seed, next((r["before"] for r in saved["runs"]), None))
            facts = origin(command, "torch", "transformers")
            made["date"] = facts["date"]
            saved = facts | {"weights": WEIGHTS[MODEL], "runs": [*saved["runs"], made]}
            write_result(path, saved)
            print(arm, seed, fmean(share(made["after"]["without"])), flush=True)
    print(table(saved, arms, control))


if __name__ == "__main__":
    main()
