"""What is kept of each rollout: texts, tokens, rewards, advantage; one row of completions.parquet a completion."""

from __future__ import annotations

from typing import Any

from accelerate.utils import gather_object

from grpo_kit.record.files import TEXT_COLUMNS
from grpo_kit.training.batch import Batch
from grpo_kit.training.messages import prompt_texts

_TEXTS = (*TEXT_COLUMNS, "answer", "tokens", "logprobs", "advantage")


class Rollouts:
    """Makes the tables of one run's rollouts. tokenizer: as for text, without an image processor."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._groups = 0, 0  # step, and its groups so far
        self._token_texts: dict[int, str] = {}

    def table(self, batch: Batch) -> dict[str, list]:
        """One value a completion of all processes, by column; those that only fill up a micro-batch are left out."""
        settings = batch.settings
        prefills = [row.get("prefill") or "" for row in batch.rows]
        prompts = prompt_texts(self._tokenizer, batch.rows, batch.prompt_ids, batch.prompt_mask)
        answers = [None if row.get("answer") is None else str(row["answer"]) for row in batch.rows]
        tokens, logprobs = self._tokens(batch)
        advantages = batch.advantages.tolist()
        mine = zip(prompts, prefills, batch.completions, answers, tokens, logprobs, advantages, strict=True)
        texts = gather_object(list(mine))
        n = len(texts)
        step = settings.step + 1
        first = self._groups[1] if self._groups[0] == step else 0  # a step may fill several buffers
        groups = [first + group for group in batch.groups_of(n)]
        columns = dict(zip(_TEXTS, zip(*texts, strict=True), strict=True))
        advantage = columns.pop("advantage")
        table = {
            "step": [step] * n,
            "group": groups,
            **columns,
            **{
                f"reward/{name}": part
                for name, part in zip(settings.reward_names, batch.parts.T.tolist(), strict=True)
            },
            "reward": batch.rewards,
            "advantage": advantage,
            "temperature": [settings.temperature] * n,
            **{name: values[-n:] for name, values in batch.extra.items() if len(values) >= n},
        }
        self._groups = step, groups[-1] + 1
        kept = n - batch.fillers
        return {name: list(values[:kept]) for name, values in table.items()}

    def _tokens(self, batch: Batch) -> tuple[list[list[str]], list[list[float] | None]]:
        """Of each completion its tokens as text, and their log-probabilities when they were sampled, if known."""
        lengths = batch.completion_mask.sum(1).tolist()
        rows = [ids[:n].tolist() for ids, n in zip(batch.completion_ids, lengths, strict=True)]
        for token in {token for row in rows for token in row} - self._token_texts.keys():
            self._token_texts[token] = self._tokenizer.decode([token])
        tokens = [[self._token_texts[token] for token in row] for row in rows]
        if batch.sampler_logprobs is None:
            return tokens, [None] * len(rows)
        kept = [values[:n] for values, n in zip(batch.sampler_logprobs.float().cpu(), lengths, strict=True)]
        return tokens, [[round(value, 4) for value in values.tolist()] for values in kept]
