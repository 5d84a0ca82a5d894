"""Hinted: completions are sampled with a hint in the prompt, and trained on the prompt without it.

    from examples.hinted import Hinted
    config = kit.Config(importance_sampling_cap=2.0)
    trainer = kit.GRPOTrainer(model, task, config, tokenizer=tokenizer, sample=Hinted("Think of the last digit."))

The task, its evaluation and its readiness are those of the prompt without the hint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from grpo_kit.loop.batch import Batch, generate, prompts_of_groups
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.protocols import Sampler, optional
from grpo_kit.prompts import build_prompt
from grpo_kit.tasks import Task


@dataclass
class Hinted:
    """The loop's `sample`, whose completions another `sample` makes behind prompts that hold a hint.

    hint: a text, or a function of the row that gives one, "" or None for no hint. It stands at the end of the system
    message, on a line of its own. Where the task has no system text it is the whole system message, in place of the
    template's own.
    inner: the sampler that makes the completions. None: the one that the trainer would take by itself.

    The loss reads each completion behind the prompt without the hint. A token weighs
    min(p(token | prompt) / p(token | prompt with the hint), config.importance_sampling_cap).
    Metrics: hint/tokens, by which a hint makes its prompt longer; rollout/logprob_gap, nats a token between the two
    prompts; rollout/capped, the share of tokens whose weight the cap cut; entropy, of the prompt without the hint.
    The completions have a column `hint`. A run goes on with the same hint only.
    Raises ValueError without a cap, and for a task that writes its prompts itself (of several turns, of TRL).
    Sources: context distillation (arXiv:2112.00861); truncated importance sampling (IMPALA, arXiv:1802.01561).

    >>> Hinted("Answer with one number.")
    Hinted('Answer with one number.')
    """

    hint: str | Callable[[Mapping[str, Any]], str | None]
    inner: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.hint) and not (isinstance(self.hint, str) and self.hint.strip()):
            raise ValueError(f"hint={self.hint!r} must be a text, or a function of a row")
        self.bits = getattr(self.inner, "bits", Sampler.bits)
        self.phases = getattr(self.inner, "phases", Sampler.phases)
        self._tokens = 0.0  # that the hint takes, in the last call

    def __repr__(self) -> str:
        """The run's settings hold this: of a function its name, and a digest of its code."""
        words = repr(self.hint)
        if callable(self.hint):
            code = getattr(self.hint, "__code__", None)
            words = f"{getattr(self.hint, '__name__', 'a function')}, code {_digest_of(code)}"
        return f"Hinted({words})"

    def around(self, fast: Sampler) -> Hinted:
        """The same by the sampler that the trainer would take by itself, where none was given."""
        return replace(self, inner=self.inner or fast)

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        task: Any,
        rows: Sequence[dict[str, Any]],
        config: Config,
        numbers: StepNumbers,
    ) -> Batch:
        """group_size completions of each row's prompt with the hint, to be trained behind the prompt without it."""
        if config.importance_sampling_cap is None:
            raise ValueError(
                "importance_sampling_cap=None: a hint samples another policy than the one that is trained; give a cap "
                "of the weights, such as Config(importance_sampling_cap=2.0)"
            )
        if getattr(type(task), "render", None) is not Task.render:
            raise ValueError(
                f"task={task!r:.100} writes its prompts itself; Hinted takes a tasks.Task, as kit.tasks.from_rows "
                "makes one"
            )
        sample = self.inner or generate
        batch = sample(model, tokenizer, _HintedTask(task, self._of), rows, config, numbers)
        if batch.sampler_logprobs is None:
            table = PaddedUpdate(config).logprobs(model, batch, numbers.temperature).tolist()
            batch.sampler_logprobs = [
                line[: len(ids)] for line, ids in zip(table, batch.completion_ids, strict=True)
            ]
        hinted_tokens = fmean(map(len, batch.prompt_ids))
        rows = batch.rows[:: config.group_size]
        batch.prompt_ids = prompts_of_groups(model, tokenizer, task, rows, config)
        self._tokens = hinted_tokens - fmean(map(len, batch.prompt_ids))
        batch.extra["hint"] = [self._of(row) for row in batch.rows]
        # both are of the prompt with the hint; the update has its own
        batch.old_logprobs = batch.entropies = None
        return batch

    def _of(self, row: Mapping[str, Any]) -> str:
        """The row's hint; "" for none. Raises ValueError for what is no text."""
        hint = self.hint(row) if callable(self.hint) else self.hint
        if not isinstance(hint or "", str):
            raise ValueError(f"hint(row)={hint!r:.200} must be a text")
        return hint or ""

    def measures(self, batch: Batch, task: Any) -> dict[str, float]:
        """hint/tokens of the last step, and the inner sampler's numbers."""
        return optional(self.inner, "measures", {}, batch, task) | {"hint/tokens": self._tokens}

    def state(self) -> dict[str, Any]:
        """The inner sampler's. Never None: a run is then compared by its hint, before it goes on."""
        return {"inner": optional(self.inner, "state", None)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from the inner sampler's state."""
        optional(self.inner, "load_state", None, state["inner"])


def _digest_of(code: Any) -> str:
    """Of a function's own code, so that a run goes on with the same one only."""
    parts = code and (code.co_code, code.co_consts, code.co_names)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


class _HintedTask:
    """The task, whose prompts hold the row's hint."""

    def __init__(self, task: Task, hint_of: Callable[[Mapping[str, Any]], str]) -> None:
        self._task, self._hint_of = task, hint_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def render(self, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[str]:
        """The rows' prompts, as Task.render makes them."""
        prompts = []
        for row in rows:
            system = "\n".join(filter(None, (self._task.system, self._hint_of(row))))
            prompts.append(
                build_prompt(
                    tokenizer,
                    row["question"],
                    system=system or None,
                    prefill=self._task.prefill,
                    examples=self._task.examples,
                )
            )
        return prompts
