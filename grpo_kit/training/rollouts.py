"""What is kept of each rollout: texts, tokens, rewards, advantage; one row of completions.parquet a completion."""

from __future__ import annotations

from typing import Any

from accelerate.utils import gather_object

from grpo_kit.record.files import TEXT_COLUMNS
from grpo_kit.rewards.scoring import totals
from grpo_kit.training.messages import prompt_texts
from grpo_kit.training.turn_rows import FILLS


class Rollouts:
    """Makes the tables of one run's rollouts."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._groups = 0, 0  # step, and its groups so far
        self._token_texts: dict[int, str] = {}

    def table(self, inputs: list[dict[str, Any]], batch: dict[str, Any]) -> dict[str, list]:
        """One value a completion of all processes, by column; those that only fill up a micro-batch are left out.

        inputs: their rows of the data set. batch: what trl made of them (prompt_ids, prompt_mask, completion_ids,
        completion_mask, sampling_per_token_logps where the sampler gave any).
        """
        trainer, logs = self.trainer, self.trainer._logs
        prefills = [row.get("prefill") or "" for row in inputs]
        prompts = prompt_texts(trainer.text_tokenizer, inputs, batch)
        answers = [None if row.get("answer") is None else str(row["answer"]) for row in inputs]
        tokens, logprobs = self._tokens(batch)
        mine = zip(prompts, prefills, trainer.completion_texts, answers, tokens, logprobs, strict=True)
        texts = gather_object(list(mine))
        n = len(texts)
        last = lambda values: list(values)[-n:]  # noqa: E731
        step = trainer.state.global_step + 1
        first = self._groups[1] if self._groups[0] == step else 0  # a step may fill several buffers
        groups = [first + group for group in trainer._groups_of(inputs, n)]
        scores = trainer.parts[-n:].T.tolist()  # of all processes, as the logs are
        parts = {f"reward/{name}": part for name, part in zip(trainer.reward_func_names, scores, strict=True)}
        table = {
            "step": [step] * n,
            "group": groups,
            **dict(
                zip((*TEXT_COLUMNS, "answer", "tokens", "logprobs"), zip(*texts, strict=True), strict=True)
            ),
            **parts,
            "reward": totals(scores, trainer.reward_weights.tolist(), groups),
            "advantage": last(logs["advantages"]),
            "temperature": [trainer.temperature] * n,
            **{name: last(values) for name, values in logs["extra"].items() if len(values) >= n},
        }
        self._groups = step, groups[-1] + 1
        kept = n - sum(FILLS in row for row in inputs)
        return {name: values[:kept] for name, values in table.items()}

    def _tokens(self, batch: dict[str, Any]) -> tuple[list[list[str]], list[list[float] | None]]:
        """Of each completion its tokens as text, and their log-probabilities when they were sampled, if known."""
        lengths = batch["completion_mask"].sum(1).tolist()
        rows = [ids[:n].tolist() for ids, n in zip(batch["completion_ids"], lengths, strict=True)]
        for token in {token for row in rows for token in row} - self._token_texts.keys():
            self._token_texts[token] = self.trainer.text_tokenizer.decode([token])
        tokens = [[self._token_texts[token] for token in row] for row in rows]
        sampled = batch.get("sampling_per_token_logps")
        if sampled is None:
            return tokens, [None] * len(rows)
        kept = [values[:n] for values, n in zip(sampled.float().cpu(), lengths, strict=True)]
        return tokens, [[round(value, 4) for value in values.tolist()] for values in kept]
