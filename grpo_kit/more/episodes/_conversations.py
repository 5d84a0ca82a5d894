"""Episodes as conversations to read: observations and the model's texts; a card an episode."""

from __future__ import annotations

from collections import defaultdict
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

_Row = Mapping[str, Any]
_Turns = Sequence[_Row]  # of one episode, in order

# one rollout counts its episodes from 0, and a step may have several
_EPISODE = ["step", "group", "episode"]
_OF_TURNS = {*_EPISODE, "turn", "observation", "result", "turn_reward", "invalid", "done"}
_WROTE = f"border-left:3px solid {COLOURS[0]};margin:2px 0 0 4px;padding-left:18px"
# behind a completion, and distinct from it
_NOTE = "font-size:11px;white-space:nowrap;margin-left:4px;"
_MARKS = {
    "invalid": _NOTE + BADGE,
    "cut off": _NOTE + "border:1px solid;padding:0 5px;border-radius:3px",
}


class Conversations(Pages):
    """Pages of episodes, whole: turn under turn."""

    row_name = "episode"

    def numbered(self, table: pd.DataFrame) -> pd.DataFrame:
        """With `number`, the episode's place in its group from 0, and `turns`, its number of turns."""
        group_episodes = table.groupby(["step", "group"])["episode"]
        numbers = group_episodes.transform(lambda episodes: pd.factorize(episodes)[0])
        return table.assign(
            number=numbers, turns=table.groupby(_EPISODE)["turn"].transform("size")
        )

    def scores(self, table: pd.DataFrame) -> list[str]:
        return ["reward", "turns"]

    def texts(self, table: pd.DataFrame) -> pd.Series:
        """Each turn's shown text: the message, the completion, the result. Each episode's prompts begin alike."""
        texts = []
        for row in table.to_dict("records"):
            columns = [text_of(row, name) for name in ("observation", "completion", "result")]
            texts.append("\n".join([question_of(row), *columns]))
        return pd.Series(texts, index=table.index, dtype=object)

    def whole(self, table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
        """All turns in the table of these rows' episodes: episodes in the rows' order, turns in theirs.

        A column `pick` of the rows is kept.
        """
        columns = [name for name in (*_EPISODE, "pick") if name in rows]
        episodes = rows.drop_duplicates(_EPISODE)[columns]
        turns = table.merge(episodes.assign(_place=range(len(episodes))), on=_EPISODE)
        return turns.sort_values(["_place", "turn"], ignore_index=True).drop(columns="_place")

    def first(self, table: pd.DataFrame, most: int) -> tuple[pd.DataFrame, int]:
        """The turns of the first `most` episodes, and how many episodes there are."""
        episodes = table.groupby(_EPISODE, sort=False)
        return table[episodes.ngroup() < most], episodes.ngroups

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
        # the rows of an episode share one text
        texts = pd.Series("", index=table.index, dtype=object)
        for _, rows in table.groupby(_EPISODE):
            texts[rows.index] = conversation(rows.sort_values("turn").to_dict("records"))
        return table.assign(conversation=texts)


def pages_of(table: pd.DataFrame) -> Conversations | None:
    """None unless the rows are turns of episodes, as a run of episodes records them."""
    if set(table) >= _OF_TURNS and table["episode"].notna().any():
        return Conversations()
    return None


def conversation(turns: _Turns) -> str:
    """The turns of one episode as plain text."""
    scores = [f"{name} {value}" for name, value in _scores(turns)]
    head = [f"group {int(turns[0]['group'])}", _name(turns), *scores, _length(turns)]
    lines = [", ".join(head)]
    # The first message holds the goal too.
    messages = [question_of(turns[0]), *(text_of(row, "observation") for row in turns[1:])]
    for row, message in zip(turns, messages, strict=True):
        response = text_of(row, "prefill") + text_of(row, "completion")
        notes = _marks(row) + [f"{name} {value}" for name, value in _turn_scores(row, turns)]
        lines.append(f"{int(row['turn'])}. {message}")
        lines.append(f">>> {response}")
        if notes:
            lines[-1] += f"  ({', '.join(notes)})"
    return visible("\n".join([*lines, text_of(turns[-1], "result")]))


def _episodes(rows: Sequence[dict]) -> list[_Turns]:
    episodes = defaultdict(list)
    for row in rows:
        episodes[tuple(row[name] for name in _EPISODE)].append(row)
    return list(episodes.values())


def _card(turns: _Turns) -> str:
    scores = [score_html(name, value) for name, value in _scores(turns)]
    length = f'<span style="{PALE}white-space:nowrap">{_length(turns)}</span>'
    head = " ".join([f'<span style="{PALE}">{_name(turns)}</span>', *scores, length])
    body = []
    for row in turns:
        notes = [f'<span style="{_MARKS[mark]}">{mark}</span>' for mark in _marks(row)]
        notes += [score_html(name, value, _NOTE) for name, value in _turn_scores(row, turns)]
        body.append(_observation_html(text_of(row, "observation"), f"{int(row['turn'])} "))
        body.append(f'<div style="{_WROTE}">{" ".join([response_html(row), *notes])}</div>')
    result = text_of(turns[-1], "result")
    if result:
        body.append(_observation_html(result))
    return card_html(head, "".join(body))


def _observation_html(text: str, number: str = "") -> str:
    """The observation, paler than the model's text."""
    return f'<div style="margin-top:6px">{folded(text or "(nothing)", before=number, look=PALE)}</div>'


def _name(turns: _Turns) -> str:
    name = f"episode {int(turns[0]['episode'])}"
    if turns[0].get("pick"):
        name = f"{turns[0]['pick']}, {name}"
    return name


def _length(turns: _Turns) -> str:
    """The number of turns, and whether the environment ended the episode."""
    count = "1 turn" if len(turns) == 1 else f"{len(turns)} turns"
    end = "ended" if turns[-1]["done"] == 1 else "not ended"
    return f"{count}, {end}"


def _scores(turns: _Turns) -> list[tuple[str, str]]:
    """The episode's scores; the advantage only if all turns share it."""
    scores = [("reward", score_text(turns[0].get("reward")))]
    if _share_advantage(turns):
        scores.append(_advantage(turns[0]))
    return scores


def _turn_scores(row: _Row, turns: _Turns) -> list[tuple[str, str]]:
    """A turn's own scores: a reward other than 0, and the advantage if the episode's turns have several."""
    scores = []
    if row["turn_reward"]:
        scores.append(("reward", score_text(row["turn_reward"])))
    if not _share_advantage(turns):
        scores.append(_advantage(row))
    return scores


def _advantage(row: _Row) -> tuple[str, str]:
    return "advantage", score_text(row.get("advantage"), "advantage")


def _share_advantage(turns: _Turns) -> bool:
    return len({row.get("advantage") for row in turns}) == 1


def _marks(row: _Row) -> list[str]:
    marks = {"invalid": row["invalid"] == 1, "cut off": _is_cut_off(row)}
    return [mark for mark, applies in marks.items() if applies]


def _is_cut_off(row: _Row) -> bool:
    """Whether the last token is part of the text; an end token is not."""
    tokens = row.get("tokens")
    if not is_known(tokens) or not len(tokens):
        return False
    last_token = tokens[-1].strip()
    completion = text_of(row, "completion").rstrip()
    # the former: a part of a letter, never an end
    return "\ufffd" in last_token or completion.endswith(last_token)
