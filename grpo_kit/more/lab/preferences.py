"""Training sets made by rewards: preference pairs (DPO, IPO, ORPO, SimPO), labelled (KTO) and accepted (SFT) samples.

The model's own samples, judged by the task's rewards, become data sets of texts for TRL's trainers. Those tokenize the
texts anew and write an end behind every completion, so a sample goes into a set only if what they train on is token by
token what was sampled (`exact`), and only if it ended by itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from grpo_kit._support.argument_checks import check_job, check_number, check_temperature
from grpo_kit.evaluation._sample_cache import trained_as_sampled
from grpo_kit.evaluation._shown import ShownTable
from grpo_kit.evaluation.generate_and_score import Decoding, answer, check_rows
from grpo_kit.record._run_folder import run_path

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_kit.tasks import Task

_SCORE = itemgetter("score")
CHUNK = 16  # prompts whose samples are drawn and written together; the draws depend on it


@dataclass(frozen=True, repr=False)
class Samples:
    """Scored completions of a task's prompts, and the training sets made of them. Made by scored_samples().

    table: one row a completion, a prompt's adjacent, in the order they were sampled: prompt, completion, ids (tokens
    as sampled, the end included), cut_off (at the length limit), prompt_tokens, exact (would TRL train on these
    tokens?), score (weighted sum of the rewards; NaN where one cannot judge), right (as evaluate's strict reading),
    and reward/<name> of each reward.
    repeated: rows whose prompt had come before; a prompt is sampled once. settings: what the samples depend on.

    Of a prompt's equal completions the first counts. All sets hold exact and judged completions only, which have ended
    by themselves: TRL would write an end behind the others. Ties go to the first sampled. All sets raise ValueError
    where they would be empty. Give trainers a max_length of at least summary()'s longest sequence (TRL's default is
    1024): they cut off what is longer.
    """

    task: str
    table: pd.DataFrame
    repeated: int
    settings: dict[str, Any]

    def pairs(self, *, margin: float = 0.1) -> Dataset:
        """Best against worst of each prompt, where their scores differ by more than the margin.

        For DPOTrainer, ORPOTrainer and CPOTrainer: prompt, chosen, rejected, score_chosen, score_rejected.
        margin: at least 0, in the unit of the scores (0.1 is for scores in [0, 1]); 0 takes any difference.
        Raises ValueError for a margin below 0 and fewer than 2 samples a prompt.

        >>> table = pd.DataFrame({"prompt": "2 + 2 =", "completion": [" 5", " 4"], "score": [0.25, 1.0]})
        >>> samples = Samples("sum", table.assign(exact=True, cut_off=False), 0, {"samples": 2})
        >>> samples.pairs()[0]["chosen"]
        ' 4'
        """
        check_number("margin", margin, 0)
        if self.settings["samples"] < 2:
            raise ValueError(
                "samples=1 a prompt leaves nothing to compare; sample at least 2, such as 4"
            )
        reason = f"margin={margin!r}: no prompt has two usable completions so far apart"
        return self._data_set(self._pairs(margin), reason)

    def unpaired(self, *, threshold: float = 0.5) -> Dataset:
        """Every distinct completion with its label: is its score at least the threshold?

        For KTOTrainer: prompt, completion, label, score. Source: KTO, arXiv:2402.01306.
        threshold: in the unit of the scores; 0.5 is for scores in [0, 1], here and in accepted().
        A prompt's completions are spread over the set, whose order TRL keeps: for KTO's KL term it gives each prompt
        the completion of its neighbour in the batch, which has to be another prompt's.
        """
        check_number("threshold", threshold)
        rows = []
        for candidate in _spread(self._candidates()):
            prompt, completion, score = candidate.values()
            label = score >= threshold
            rows.append(
                {"prompt": prompt, "completion": completion, "label": label, "score": score}
            )
        return self._data_set(rows, _none_left(threshold))

    def best_of_n(self, *, threshold: float | None = None) -> Dataset:
        """The best completion of each prompt; with a threshold, only where its score is at least that.

        For SFTTrainer: prompt, completion, score. Source: RAFT, arXiv:2304.06767.
        """
        best = [max(group, key=_SCORE) for group in self._candidates()]
        if threshold is not None:
            check_number("threshold", threshold)
            best = [candidate for candidate in best if candidate["score"] >= threshold]
        return self._data_set(best, _none_left(threshold))

    def accepted(self, *, threshold: float = 0.5) -> Dataset:
        """Every distinct completion with a score of at least the threshold: rejection sampling.

        For SFTTrainer: prompt, completion, score. Source: RFT, arXiv:2308.01825.
        """
        check_number("threshold", threshold)
        candidates = chain.from_iterable(self._candidates())
        rows = [candidate for candidate in candidates if candidate["score"] >= threshold]
        return self._data_set(rows, _none_left(threshold))

    def summary(self, *, margin: float = 0.1) -> pd.DataFrame:
        """What was sampled and what became of it: value; and where it is a part, `of` how many and the share."""
        table = self.table
        prompts, completions = table["prompt"].nunique(), len(table)
        right_prompts = table.loc[table["right"], "prompt"].nunique()
        pairs = self._pairs(margin)
        gaps = [pair["score_chosen"] - pair["score_rejected"] for pair in pairs]
        counts = {
            "prompts": (prompts, None),
            "rows left out, their prompt came before": (self.repeated, prompts + self.repeated),
            "prompts never right": (prompts - right_prompts, prompts),
            "prompts that give a pair": (len(pairs), prompts),
            "completions": (completions, None),
            "equal to an earlier one of its prompt": (
                table.duplicated(["prompt", "completion"]).sum(),
                completions,
            ),
            **{reason: (count, completions) for reason, count in self._left_out().items()},
            "mean gap of the pairs": (np.mean(gaps) if gaps else math.nan, None),
            "longest prompt + completion, tokens": (
                (table["prompt_tokens"] + table["ids"].map(len)).max(),
                None,
            ),
        }
        summary = pd.DataFrame.from_dict(counts, orient="index", columns=["value", "of"])
        summary = summary.astype({"value": float, "of": "Int64"}).rename_axis(self.task)
        return summary.assign(share=(summary["value"] / summary["of"].astype(float)))

    def _left_out(self) -> dict[str, int]:
        """What no set takes, by reason; a completion may have several."""
        cut_off, exact = self.table["cut_off"].astype(bool), self.table["exact"].astype(bool)
        return {
            "cut off at the length limit": int(cut_off.sum()),
            "ended, but trained as other tokens": int((~cut_off & ~exact).sum()),
            "without a score": int(self.table["score"].isna().sum()),
        }

    def _data_set(self, rows: list[dict[str, Any]], why_empty: str) -> Dataset:
        if not rows:
            left_out = "; ".join(f"{name}: {count}" for name, count in self._left_out().items())
            raise ValueError(
                f"{why_empty} (of {len(self.table)} completions, {left_out}); sample more a prompt, hotter or longer, "
                "or take easier rows or a softer reward"
            )
        from datasets import Dataset  # takes a second, and sampling needs none

        return Dataset.from_list(rows)

    def _pairs(self, margin: float) -> list[dict[str, Any]]:
        rows = []
        for group in self._candidates():
            best, worst = max(group, key=_SCORE), min(group, key=_SCORE)  # the first of equals
            # 0.8 - 0.7 is above 0.1 by rounding alone
            if round(best["score"] - worst["score"], 6) > margin:
                rows.append(
                    {
                        "prompt": best["prompt"],
                        "chosen": best["completion"],
                        "rejected": worst["completion"],
                        "score_chosen": best["score"],
                        "score_rejected": worst["score"],
                    }
                )
        return rows

    def _candidates(self) -> list[list[dict[str, Any]]]:
        """By prompt, its distinct completions that a set may hold, as {prompt, completion, score}.

        Prompts without any are left out.
        """
        table = self.table
        usable = (
            table["exact"].astype(bool)
            & ~table["cut_off"].astype(bool)
            & table["score"].notna()
        )
        distinct = table.loc[usable, ["prompt", "completion", "score"]].drop_duplicates(
            ["prompt", "completion"]
        )
        return [group.to_dict("records") for _, group in distinct.groupby("prompt", sort=False)]

    def __repr__(self) -> str:
        prompts = self.table["prompt"].nunique()
        return f"Samples({self.task!r}, {prompts} prompts x {self.settings['samples']} samples)"

    def _repr_html_(self) -> str:
        return self.summary().to_html(float_format="{:.4g}".format, na_rep="")


def scored_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    rows: Sequence[dict] | None = None,
    samples: int = 4,
    temperature: float = 0.9,
    max_completion_tokens: int | None = None,
    seed: int = 0,
    folder: str | os.PathLike,
) -> Samples:
    """Sample completions of the rows (default: the task's train rows) and score them with the task's rewards.

    samples: completions a prompt. max_completion_tokens: None means the task's. As many are drawn at once as free
    memory holds, which the draws do not depend on. The model is left as it was.
    folder: keeps the samples. Killed and called again, it goes on with the chunks that are missing, and the result is
    the same: 16 prompts' samples are written at once. Called with other settings, other prompts or changed weights it
    refuses.
    Scores are not kept, but computed by every call: rewards are cheap beside sampling, and a reward that was changed
    can then never be confused with the old one. Change a reward, call again: nothing is sampled anew.
    A completion without a total (rewards.scoring.totals) has no score.
    Raises ValueError for empty rows, a temperature that is not above 0, and what complete() refuses; RewardError for a
    reward that fails; RunFolderError (a ValueError) for a folder with samples of other settings.

    >>> samples = scored_samples(model, tokenizer, largest(), folder="runs/samples")  # doctest: +SKIP
    >>> samples.pairs(margin=0.1).column_names  # doctest: +SKIP
    ['prompt', 'chosen', 'rejected', 'score_chosen', 'score_rejected']
    """
    check_job(model, tokenizer, task)
    rows = check_rows(task.train if rows is None else rows)
    folder = run_path(folder)
    check_temperature(temperature)
    by_prompt: dict[str, dict] = {}
    for prompt, row in zip(task.render(tokenizer, rows), rows, strict=True):
        by_prompt.setdefault(prompt, row)
    decoding = Decoding(samples, temperature, max_completion_tokens, seed=seed)
    asked = list(by_prompt.values())
    answers = answer(model, tokenizer, task, asked, decoding, folder=folder, chunk=CHUNK)
    lengths = [len(ids) for ids in tokenizer(answers.prompts)["input_ids"]]
    table = pd.DataFrame(
        {
            "prompt": pd.Series(answers.prompts).repeat(samples).tolist(),
            "completion": answers.texts,
            "ids": [list(completion.ids) for completion in answers.completions],
            "cut_off": [completion.cut_off for completion in answers.completions],
            "prompt_tokens": np.repeat(lengths, samples),
        }
    )
    table["exact"] = trained_as_sampled(tokenizer, table)
    table["right"] = answers.right
    columns = answers.reward_columns()
    table = table.assign(score=columns.pop("reward"), **columns)
    return Samples(task.name, ShownTable(table), len(rows) - len(asked), answers.settings)


def _spread(groups: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All of them, those of one group as far from each other as they can be.

    >>> _spread([[1, 2, 3], [4], [5, 6]])
    [1, 5, 2, 4, 6, 3]
    """
    spread = []
    for group in groups:
        spread += [((i + 0.5) / len(group), candidate) for i, candidate in enumerate(group)]
    # Of equal scores the earlier group comes first.
    return [candidate for _, candidate in sorted(spread, key=itemgetter(0))]


def _none_left(threshold: float | None) -> str:
    return f"threshold={threshold!r}: no usable completion is left"
