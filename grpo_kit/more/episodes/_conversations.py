"""Episodes as conversations to read: observations and the model's texts; a card an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from grpo_kit._support.display import BADGE, COLOURS
from grpo_kit._support.kernel import visible
from grpo_kit.watch._completions import (
    PALE,
    Pages,
    card_html,
    folded,
    groups_html,
    is_known,
    pick_three,
    question_of,
    response_html,
    score_html,
    score_text,
    text_of,
)

_EPISODE = ["step", "group", "episode"]  # one rollout counts its episodes from 0, and a step may have several
_OF_TURNS = {*_EPISODE, "turn", "observation", "result", "turn_reward", "invalid", "done"}
_WROTE = f"border-left:3px solid {COLOURS[0]};margin:2px 0 0 4px;padding-left:18px"
_NOTE = "font-size:11px;white-space:nowrap;margin-left:4px;"  # behind a completion, and distinct from it
_MARKS = {"invalid": _NOTE + BADGE, "cut off": _NOTE + "border:1px solid;padding:0 5px;border-radius:3px"}


class Conversations(Pages):
    """Pages of episodes, whole: turn under turn."""

    row_name = "episode"

    def numbered(self, table: pd.DataFrame) -> pd.DataFrame:
        """With `number`, the episode's place in its group from 0, and `turns`, its number of turns."""
        places = table.groupby(_EPISODE[:-1])["episode"].transform(lambda episodes: pd.factorize(episodes)[0])
        return table.assign(number=places, turns=table.groupby(_EPISODE)["turn"].transform("size"))

    def scores(self, table: pd.DataFrame) -> list[str]:
        return ["reward", "turns"]

    def texts(self, table: pd.DataFrame) -> pd.Series:
        """Each turn's shown text: the message, the completion, the result. Each episode's prompts begin alike."""
        shown = ("observation", "completion", "result")
        rows = table.to_dict("records")
        texts = ["\n".join([question_of(row), *(text_of(row, name) for name in shown)]) for row in rows]
        return pd.Series(texts, index=table.index, dtype=object)

    def whole(self, table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
        """All turns in the table of these rows' episodes: episodes in the rows' order, turns in theirs.

        A column `pick` of the rows is kept.
        """
        order = rows.drop_duplicates(_EPISODE)[[*_EPISODE, *["pick"] * ("pick" in rows)]]
        found = table.merge(order.assign(_place=range(len(order))), on=_EPISODE)
        return found.sort_values(["_place", "turn"], ignore_index=True).drop(columns="_place")

    def first(self, table: pd.DataFrame, most: int) -> tuple[pd.DataFrame, int]:
        """The turns of the first `most` episodes, and how many episodes there are."""
        place = table.groupby(_EPISODE, sort=False).ngroup()
        return table[place < most], int(place.max() + 1) if len(table) else 0

    def html(self, table: pd.DataFrame) -> str:
        """The episodes of a table, whole and in its order, groups together; everything escaped.

        Each group is headed by its first turn's message, the whole prompt a click away. A card has an episode's scores
        and length, then its turns: the observation, and behind a line the completion.
        """
        return groups_html(table, lambda rows: map(_card, _episodes(rows)))

    def picks(self, table: pd.DataFrame) -> tuple[str, str]:
        """The turns of the best, the median and the worst of the last step."""
        three = self.whole(table, pick_three(table.drop_duplicates(_EPISODE)))
        texts = [conversation(turns) for turns in _episodes(three.to_dict("records"))]
        return "\n\n".join(texts), self.html(three)

    def readable(self, table: pd.DataFrame) -> pd.DataFrame:
        """With a column `conversation`: in each row its whole episode as text.

        >>> print(browse("runs/agents").query("step == 12 and episode == 3").conversation.iloc[0])  # doctest: +SKIP
        """
        texts = pd.Series("", index=table.index, dtype=object)  # the rows of an episode share one text
        for _, rows in table.groupby(_EPISODE):
            texts[rows.index] = conversation(rows.sort_values("turn").to_dict("records"))
        return table.assign(conversation=texts)


def pages_of(table: pd.DataFrame) -> Conversations | None:
    """None unless the rows are turns of episodes, as a run of episodes records them."""
    return Conversations() if set(table) >= _OF_TURNS and table["episode"].notna().any() else None


def conversation(turns: Sequence[Mapping[str, Any]]) -> str:
    """The turns of one episode as plain text."""
    scores = ", ".join(f"{name} {value}" for name, value in _scores(turns))
    lines = [f"group {int(turns[0]['group'])}, {_name(turns)}, {scores}, {_length(turns)}"]
    for row in turns:
        noted = ", ".join([*_marks(row), *(f"{name} {value}" for name, value in _turn_scores(row, turns))])
        wrote = text_of(row, "prefill") + text_of(row, "completion")
        read = question_of(row) if row is turns[0] else text_of(row, "observation")  # with the goal
        lines.append(f"{int(row['turn'])}. {read}")
        lines.append(f">>> {wrote}{f'  ({noted})' * bool(noted)}")
    return visible("\n".join([*lines, text_of(turns[-1], "result")]))


def _episodes(rows: Sequence[dict]) -> list[list[dict]]:
    found: dict[Any, list[dict]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in _EPISODE), []).append(row)
    return list(found.values())


def _card(turns: Sequence[dict]) -> str:
    scores = " ".join(score_html(name, value) for name, value in _scores(turns))
    length = f'<span style="{PALE}white-space:nowrap">{_length(turns)}</span>'
    body = []
    for row in turns:
        number = f"{int(row['turn'])} "
        notes = [f'<span style="{_MARKS[mark]}">{mark}</span>' for mark in _marks(row)]
        notes += [score_html(name, value, _NOTE) for name, value in _turn_scores(row, turns)]
        body.append(_read(text_of(row, "observation"), number))
        body.append(f'<div style="{_WROTE}">{" ".join([response_html(row), *notes])}</div>')
    if result := text_of(turns[-1], "result"):
        body.append(_read(result))
    return card_html(f'<span style="{PALE}">{_name(turns)}</span> {scores} {length}', "".join(body))


def _read(text: str, number: str = "") -> str:
    """The observation, paler than the model's text."""
    return f'<div style="margin-top:6px">{folded(text or "(nothing)", before=number, look=PALE)}</div>'


def _name(turns: Sequence[Mapping[str, Any]]) -> str:
    pick = turns[0].get("pick")
    return f"{pick}, " * bool(pick) + f"episode {int(turns[0]['episode'])}"


def _length(turns: Sequence[Mapping[str, Any]]) -> str:
    """The number of turns, and whether the environment ended the episode."""
    n = len(turns)
    return f"{n} turn{'s' * (n != 1)}, {'ended' if turns[-1]['done'] == 1 else 'not ended'}"


def _scores(turns: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The episode's scores; the advantage only if all turns share it."""
    names = ["reward", *["advantage"] * _one_advantage(turns)]
    return [(name, score_text(turns[0].get(name), name)) for name in names]


def _turn_scores(row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """A turn's own scores: a reward other than 0, and the advantage if the episode's turns have several."""
    shown = {"turn_reward": "reward"} if row["turn_reward"] else {}
    shown |= {} if _one_advantage(turns) else {"advantage": "advantage"}
    return [(name, score_text(row.get(column), name)) for column, name in shown.items()]


def _one_advantage(turns: Sequence[Mapping[str, Any]]) -> bool:
    return len({row.get("advantage") for row in turns}) == 1


def _marks(row: Mapping[str, Any]) -> list[str]:
    return ["invalid"] * (row["invalid"] == 1) + ["cut off"] * _cut_off(row)


def _cut_off(row: Mapping[str, Any]) -> bool:
    """Is the last token part of the text? An end token is not."""
    tokens = row.get("tokens")
    if not is_known(tokens) or not len(tokens):
        return False
    last, written = tokens[-1].strip(), text_of(row, "completion").rstrip()
    return "\ufffd" in last or written.endswith(last)  # the former: a part of a letter, never an end
