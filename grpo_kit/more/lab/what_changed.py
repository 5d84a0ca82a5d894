"""What did training change? The tokens that the tuned model chooses otherwise than its base, by forward passes only.

Longer than 300 lines because the measurement and its page read the same tokens.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from grpo_kit._support.argument_checks import (
    check_task,
    check_tokenizer,
    check_whole,
    template_tokens,
)
from grpo_kit._support.display import COLOURS, colours_of, escape, progress_line
from grpo_kit.engine.complete import Completion, complete
from grpo_kit.evaluation._shown import ShownTable, estimates_table, percent, shown, with_page
from grpo_kit.evaluation.generate_and_score import (
    Answers,
    Decoding,
    Request,
    answer,
    check_rows,
)
from grpo_kit.evaluation.intervals import Estimate, bootstrap_mean, mean_reward, share
from grpo_kit.models._model_facts import (
    base_model,
    close_rows,
    end_ids,
    evaluating,
    has_adapters,
)
from grpo_kit.models.token_lists import logits_of
from grpo_kit.tasks._measure import Measure
from grpo_kit.watch._completions import card_html, folded, groups_html

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_kit.tasks import Task

_TILE = 128  # positions whose logits are in memory at once
_FIRST = 5  # of the base's own list
# a third opaque: any ground
_MARK = f"background:{COLOURS[1]}59;border-bottom:2px solid {COLOURS[1]};color:inherit"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;max-height:24em;overflow:auto"


@dataclass(frozen=True, repr=False)
class Changes:
    """Where a tuned model's greedy answers leave its base's, and what a few of those tokens are worth.

    Made by what_changed().
    answers: one row a question: question, answer, base and tuned (the greedy completions), tokens (of the tuned one,
    its end included) and changed (how many of them the base would have chosen otherwise).
    tokens: one row a token of the tuned answers: row, token, base_token (the base's first choice behind the same
    prefix) and rank, the token's place in the base's list. Rank 0 is its first choice: no change.
    scores: one row a question, right (0 or 1) or the reward, of the answers "base", "tuned" and, for each k of `most`,
    the base's answer in which the first k changed tokens are put right.
    """

    task: str
    measure: Measure
    answers: pd.DataFrame
    tokens: pd.DataFrame
    scores: pd.DataFrame
    tokenizer: Any

    @property
    def share(self) -> Estimate:
        """The share of an answer's tokens that the base would have chosen otherwise: mean over answers."""
        return bootstrap_mean((self.answers["changed"] / self.answers["tokens"]).tolist())

    @property
    def among_first(self) -> Estimate | None:
        """The share of an answer's changed tokens that are among the base's first five: mean over changed answers."""
        changed = self.tokens[self.tokens["rank"] > 0]
        shares = (changed["rank"] < _FIRST).groupby(changed["row"]).mean()
        return bootstrap_mean(shares.tolist()) if len(shares) else None

    @property
    def ranks(self) -> pd.Series:
        """rank in the base's list, from 1 -> number of changed tokens."""
        ranks = self.tokens["rank"]
        return ranks[ranks > 0].value_counts().sort_index().rename("changed tokens")

    @cached_property
    def results(self) -> dict[Any, Estimate]:
        """Accuracy, or the mean reward, with its 95 % interval, of each column of scores."""
        columns = {name: self.scores[name].dropna() for name in self.scores}
        if self.measure == "reward":
            return {name: mean_reward(rewards.tolist()) for name, rewards in columns.items()}
        return {name: share(int(right.sum()), len(right)) for name, right in columns.items()}

    @cached_property
    def gain_back(self) -> dict[int, float]:
        """k -> the share of the gain that the first k changed tokens bring back; {} for a gain that may be chance."""
        gain = (self.scores["tuned"] - self.scores["base"]).dropna()
        most = max(1.0, gain.abs().max())
        if bootstrap_mean(gain.tolist(), lowest=-most, highest=most).low <= 0:
            return {}
        values = {name: estimate.value for name, estimate in self.results.items()}
        base, tuned = values.pop("base"), values.pop("tuned")
        return {k: (value - base) / (tuned - base) for k, value in values.items()}

    def __str__(self) -> str:
        changed, first = self.ranks.sum(), self.ranks[self.ranks.index < _FIRST].sum()
        text = f"Training changed {changed:,} of {len(self.tokens):,} tokens of {len(self.answers)} greedy answers"
        if not changed:
            return f"{text}."
        base, *_, tuned = (
            estimate.words(self.measure == "accuracy") for estimate in self.results.values()
        )
        text += f"; {first:,} of these are among the base's first {_FIRST}; {self.measure} {base} -> {tuned}."
        back = [
            f"{k} token{'s' * (k > 1)} put right {percent(part)}"
            for k, part in self.gain_back.items()
        ]
        return f"{text} Share of the gain that comes back: {', '.join(back)}." if back else text

    def table(self) -> ShownTable:
        """One row a measure: value, low, high (95 %), n answers; gain_back: which share of the gain comes back."""
        estimates = {"tokens changed": self.share}
        if self.among_first is not None:
            estimates[f"of these, among the base's first {_FIRST}"] = self.among_first
        cells = {
            name: {"value, 95 % interval": e.words(), "n": str(e.n)}
            for name, e in estimates.items()
        }
        back = {}
        for column, estimate in self.results.items():
            name = (
                column
                if isinstance(column, str)
                else f"{column} token{'s' * (column > 1)} put right"
            )
            estimates[name], back[name] = estimate, self.gain_back.get(column)
            words = estimate.words(self.measure == "accuracy")
            cells[name] = {"value, 95 % interval": words, "n": str(estimate.n)}
            if back[name] is not None:
                cells[name]["of the gain"] = percent(back[name])
        table = estimates_table(self.task, estimates, [], 0).assign(
            gain_back=pd.Series(back, dtype=float)
        )
        return shown(table, str(self), cells)

    def pages(self, n: int = 3) -> ShownTable:
        """The first n answers with a changed token, the base's beside the tuned model's; changed tokens are marked.

        A notebook shows the rank in the base's list, and what the base would have written, under the mouse pointer;
        print() has changed tokens in [[ ]]. Columns as in answers.
        """
        check_whole("n", n)
        table = self.answers[self.answers["changed"] > 0]
        text = f"The first {min(n, len(table))} of {len(table)} answers with a changed token."
        table, page = table.head(n), f'<p style="margin:0 0 6px">{text}</p>'
        parts = {place: list(self._parts(place)) for place in table.index}
        colours = colours_of(["base", "tuned"])

        def cards(rows: Sequence[dict]) -> Iterator[str]:
            for row in rows:
                yield card_html("<b>base</b>", folded(row["base"]), colour=colours["base"])
                body = "".join(_marked(*part) for part in parts[row["place"]])
                yield card_html(
                    "<b>tuned</b>",
                    f'<div style="{_TEXT}">{body}</div>',
                    colour=colours["tuned"],
                )

        page += groups_html(table.assign(prompt=table["question"], place=table.index), cards)
        for place, row in table.iterrows():
            tuned = "".join(f"[[{part}]]" if note else part for part, note in parts[place])
            text += f"\n\nrow {place}: {row['question']}\nbase: {row['base']}\ntuned: {tuned}"
        return with_page(table, page, text)

    def _parts(self, row: int) -> Iterator[tuple[str, str]]:
        """(text, note) of each token of a tuned answer, with a note if it was changed; a letter's tokens are one."""
        decode = partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
        tokens = self.tokens[self.tokens["row"] == row]
        ids, done, note = tokens["token"].tolist(), "", ""
        for end, token in enumerate(tokens.itertuples(), 1):
            if token.rank:
                note = f"rank {token.rank} in the base's list; its first choice: {decode([token.base_token])!r}"
            text = decode(ids[:end])
            if end == len(ids) or not text.endswith("\ufffd"):
                yield text[len(done) :], note
                done, note = text, ""

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_() + self.pages()._repr_html_()


def what_changed(
    base: PreTrainedModel | None,
    tuned: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    rows: Sequence[dict] | None = None,
    most: Sequence[int] = (1, 2, 4),
    max_completion_tokens: int | None = None,
    batch_size: int | None = None,
) -> Changes:
    """Which tokens of the tuned model's greedy answers the base would not have chosen, and what the first few bring.

    base: the model before training; None: tuned without its peft adapters. rows: default the task's held-out rows.
    most: for each k the base answers greedily, but takes the tuned model's token at the first k positions where their
    first choices differ. With all of them that is the tuned model's answer.
    max_completion_tokens: None means the task's. batch_size: sequences decoded at once; None: as many as free memory
    holds. Both models keep their modes and settings.
    A token is changed if the models' first choices differ in a forward pass over the same tokens. So equal models
    differ nowhere, even if decoding rounds otherwise.
    Raises ValueError for empty rows, a task that is played in turns, a k below 1, vocabularies that differ, a base that
    is the tuned model, base=None without adapters, and prompts that leave no room for twice the completion's tokens.
    Source of the question: arXiv:2605.06241. It finds 1 to 3 % of positions changed, the new token always among the
    base's first five; put right, they bring back a large part of the gain.

    >>> print(kit.lab.what_changed(None, model, tokenizer, task, rows=task.held_out[:64]))  # doctest: +SKIP
    """
    rows = _checked(tokenizer, task, rows, most)
    prompts = tokenizer(task.render(tokenizer, rows))["input_ids"]
    _check_models(base, tuned, tokenizer, max(map(max, prompts)))
    follower = tuned if base is None else base

    def as_base() -> AbstractContextManager:
        return tuned.disable_adapter() if base is None else nullcontext()

    decoding = Decoding(max_completion_tokens=max_completion_tokens, batch_size=batch_size)
    tuned_answers = answer(tuned, tokenizer, task, rows, decoding)
    completions, measure = tuned_answers.completions, tuned_answers.measure
    with as_base():
        base_answers = answer(follower, tokenizer, task, rows, decoding)
    answers: dict[Any, Answers] = {"base": base_answers}
    tokens, changed = [], []  # changed: the positions in each row
    with progress_line(f"{task.name}, first choices") as progress:
        for place, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            progress(place, len(rows))
            firsts, _ = _first_choices(tuned, prompt, completion.ids)
            with as_base():
                base_firsts, ranks = _first_choices(follower, prompt, completion.ids)
            differs = [a != b for a, b in zip(firsts, base_firsts, strict=True)]
            columns = zip(completion.ids, base_firsts, ranks, differs, strict=True)
            for token, base_token, rank, is_changed in columns:
                tokens.append((place, token, base_token, rank * is_changed))
            changed.append([i for i, is_changed in enumerate(differs) if is_changed])
    request = Request(tuned_answers.settings, batch_size, 0, None, 16, progress)
    for k in sorted(set(most)):
        begun = {}
        for row, at in enumerate(changed):
            if len(at) > k:  # else it is the tuned model's answer
                begun[row] = completions[row].ids[: at[k - 1] + 1]
        with as_base():
            ended = _go_on(follower, tokenizer, prompts, begun, request)
        mixed = [ended.get(row, completion) for row, completion in enumerate(completions)]
        answers[k] = replace(tuned_answers, completions=mixed)
    answers["tuned"] = tuned_answers
    table = tuned_answers.table()[["question", "answer", "tokens"]].assign(
        base=answers["base"].texts,
        tuned=tuned_answers.texts,
        changed=[len(at) for at in changed],
    )
    scores = {
        name: a.right if measure == "accuracy" else a.rewards for name, a in answers.items()
    }
    scores = pd.DataFrame(scores, dtype=float)
    tokens = pd.DataFrame(tokens, columns=["row", "token", "base_token", "rank"])
    return Changes(task.name, measure, table, tokens, scores, tokenizer)


def _checked(tokenizer: Any, task: Any, rows: Any, most: Sequence[int]) -> list[dict]:
    """The rows. Raises ValueError, with what would do, for arguments that what_changed cannot take."""
    check_task(task)
    check_tokenizer(tokenizer)
    if hasattr(task, "play"):
        raise ValueError(
            f"task {task.name!r} is played in turns; give one whose rows are answered once"
        )
    for k in most:
        check_whole("most", k)
    return check_rows(task.held_out if rows is None else rows)


def _check_models(
    base: Any, tuned: Any, tokenizer: PreTrainedTokenizerBase, largest_id: int
) -> None:
    for name, model in (("base", base), ("tuned", tuned)):
        if not hasattr(model, "parameters") and (name, model) != ("base", None):
            raise ValueError(
                f"{name}={model!r:.100} is no loaded model; kit.load_policy gives one"
            )
    rows = close_rows(tuned, tokenizer)
    if largest_id >= rows:
        raise ValueError(
            f"tokenizer writes token {largest_id}, tuned has {rows} tokens; give the model's own"
        )
    if base is None and not has_adapters(tuned):
        raise ValueError(
            "base=None, and tuned has no peft adapters; give the model before training"
        )
    if base is not None and base_model(base) is base_model(tuned):
        raise ValueError(
            "base is tuned itself; load the untrained model, or give base=None for adapters"
        )
    if base is not None and (base_rows := close_rows(base, tokenizer)) != rows:
        raise ValueError(
            f"base has {base_rows} tokens, tuned {rows}; give the model that was trained"
        )


@torch.no_grad()
def _first_choices(
    model: Any, prompt: Sequence[int], ids: Sequence[int]
) -> tuple[list[int], list[int]]:
    """At each position of ids behind the prompt: the model's first choice, and the place of the token in its list."""
    row = torch.tensor([[*prompt, *ids]], device=next(model.parameters()).device)  # (1, T)
    firsts, ranks = [], []
    with evaluating(model):
        for begin in range(len(prompt), row.size(1), _TILE):
            token = row[0, begin : begin + _TILE, None]  # (n, 1)
            read = row[:, : begin + len(token) - 1]
            logits = logits_of(model, read, torch.ones_like(read), len(token))[0]  # (n, V)
            own, lower = (
                logits.gather(1, token),
                torch.arange(logits.size(1), device=row.device) < token,
            )
            firsts += logits.argmax(1).tolist()  # of equals the first
            ranks += ((logits > own) | (logits == own) & lower).sum(1).tolist()
    return firsts, ranks


def _go_on(
    model: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    begun: dict[int, tuple[int, ...]],
    request: Request,
) -> dict[int, Completion]:
    """row -> the completion that begins like this, and that the model goes on with, greedily, to the usual limit."""
    if not begun:
        return {}
    limit, stops = request.settings["max_completion_tokens"], end_ids(model, tokenizer)
    read = [[*prompts[row], *ids] for row, ids in begun.items()]
    room = limit - min(map(len, begun.values()))
    ends = complete(
        model,
        tokenizer,
        read,
        max_completion_tokens=room,
        batch_size=request.at_once(model, read),
    )
    hidden, completions = template_tokens(tokenizer, stops), {}
    for (row, beginning), end in zip(begun.items(), ends, strict=True):
        ids = (*beginning, *end.ids)[:limit]
        text = tokenizer.decode(
            [token for token in ids if token not in hidden], skip_special_tokens=False
        )
        completions[row] = Completion(text, len(ids), ids[-1] not in stops, ids)
    return completions


def _marked(text: str, note: str) -> str:
    """HTML of a part of an answer, marked if it has a note; a line end in it is shown as a sign, too."""
    safe = escape(text, len(text))
    if not note:
        return safe
    line_ends = safe.replace("\n", "\u23ce\n")
    return f'<mark style="{_MARK}" title="{html.escape(note)}">{line_ends}</mark>'
