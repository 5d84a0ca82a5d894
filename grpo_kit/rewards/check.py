"""Does cheating pay? Scores of honest completions and of cheats, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from grpo_kit._support.argument_checks import check_whole, is_number
from grpo_kit._support.display import cut
from grpo_kit.rewards._parts import Reward, reward_names
from grpo_kit.rewards.cheat_cases import Case, RewardCheckError, TaskWithCases, score_cases
from grpo_kit.rewards.scoring import RewardError, totals, warn_off_scale

_PAYS = 1e-9
# said behind a fault of this case
_CURES = {
    "answer in the prefill": "; read it by kit.rewards.own_answer(completion, prefill), None there"
}


def check_rewards(
    rewards: Reward | Sequence[Reward],
    cases: TaskWithCases | Sequence[Case],
    *,
    weights: Sequence[float] | None = None,
    rows: int = 4,
    found: Sequence[Case] = (),
) -> pd.DataFrame:
    """A table of every reward and their weighted total on crafted completions; raises if cheating pays.

    cases: a task, whose first `rows` held-out rows are turned into cases (Task.cases_for). Or a list of Case with at
    least one honest one.
    weights: of the total; default the task's weights if their number fits, else equal.
    found: completions of a run, each as a Case, tried beside the first row's; each is scored with its own columns.
    A reward with `only_a_part = True` (length, repetition, ...) judges nothing by itself: beside others only the total
    is checked.
    Returns one row for each case of the first task row (or all given cases) and of `found`: case, response,
    <reward name> ..., total. Scores are None where a reward cannot judge. Scores outside [0, 1] give one warning.
    Raises ValueError if no row of the task has an answer that counts as correct, so that nothing can be crafted,
    and for a case in `found` that lacks a column of a reward;
    RewardCheckError, with the table in its `.table`, if a cheat outranks the honest completion, or
    ties with it where it must not, in one reward or in the total; if an honest completion cannot be judged;
    if a reward breaks its contract.

    >>> from grpo_kit.rewards import ExactAnswer
    >>> check_rewards(ExactAnswer(), crafted_cases("82", "47", prefill="<answer>"))["total"].tolist()[:2]
    [1.0, 0.0]
    """
    if not callable(rewards) and not isinstance(rewards, Sequence):
        raise ValueError(f"rewards={rewards!r:.100} must be a reward or a list of them")
    rewards = [rewards] if callable(rewards) else list(rewards)
    if not rewards:
        raise ValueError("rewards is empty; give at least one reward")
    is_task = hasattr(cases, "cases_for")
    is_list = (
        isinstance(cases, Sequence) and cases and all(isinstance(case, Case) for case in cases)
    )
    if not is_task and not is_list:
        raise ValueError(f"cases={cases!r:.100} must be a task or a list of Case, at least one")
    if weights is not None and (
        not isinstance(weights, Sequence) or not all(map(is_number, weights))
    ):
        raise ValueError(f"weights={weights!r} must be a list of numbers, one a reward")
    names = reward_names(rewards)
    check_whole("rows", rows)
    if is_task:
        if weights is None and len(cases.reward_weights) == len(rewards):
            weights = cases.reward_weights
        groups = [cases.cases_for(row, rewards) for row in cases.held_out[:rows]]
    else:
        groups = [list(cases)]
    named = dict(zip(names, rewards, strict=True))
    for case in found:
        for name, reward in named.items():
            for column in getattr(reward, "columns", ()):
                if column not in case.columns:
                    raise ValueError(
                        f"found: {case.name!r} has no column {column!r}, which {name} asks for; give the "
                        "columns of its row: Case(name, completion, columns=row)"
                    )
    groups[0] = [*groups[0], *found]
    if weights is None:
        weights = [1 / len(rewards)] * len(rewards)
    if len(weights) != len(rewards):
        raise ValueError(f"weights={weights!r} for {len(rewards)} rewards; give one per reward")
    tables, faults = [], []
    for group in groups:
        table = _score(named, weights, group)
        tables.append(table)
        faults += _faults(named, group, table)
    every_case = pd.concat(tables, ignore_index=True)
    warn_off_scale(rewards, {name: every_case[name].astype(float).tolist() for name in names})
    if faults:
        error = RewardCheckError("Cheating pays:\n" + "\n".join(dict.fromkeys(faults)))
        error.table = every_case
        raise error
    return tables[0]


def _score(
    rewards: Mapping[str, Reward], weights: Sequence[float], cases: Sequence[Case]
) -> pd.DataFrame:
    table: dict[str, list] = {
        "case": [case.name for case in cases],
        "response": [case.prefill + case.completion for case in cases],
    }
    try:
        parts = score_cases(list(rewards.values()), cases, list(rewards))
    except RewardError as error:
        raise RewardCheckError(f"a reward breaks its contract: {error}") from error
    # All are completions of one prompt.
    weighted = totals(list(parts.values()), weights, [0] * len(cases))
    return pd.DataFrame(table | parts | {"total": weighted})


def _faults(
    rewards: Mapping[str, Reward], cases: Sequence[Case], table: pd.DataFrame
) -> list[str]:
    honest = [place for place, case in enumerate(cases) if case.honest]
    if not honest:
        raise ValueError(
            "cases holds no case with honest=True; the cheats need something to be compared with"
        )
    reads_no_column = {
        name: not getattr(reward, "columns", True) for name, reward in rewards.items()
    }
    reads_no_column["total"] = all(reads_no_column.values())
    names = list(rewards)
    if len(names) > 1:
        names = [
            name
            for name, reward in rewards.items()
            if not getattr(reward, "only_a_part", False)
        ]
        names.append("total")
    faults = []
    for name in names:
        scores = table[name].astype(float)
        honest_scores = scores.iloc[honest]
        if honest_scores.isna().any():
            if name == names[-1]:  # the total, or the only one
                faults.append(
                    f"- {name} cannot judge the honest completion {cases[honest[0]].completion!r}"
                )
            continue
        low = honest_scores.min()
        for case, score in zip(cases, scores, strict=True):
            if case.honest:
                continue
            may_tie = case.tie == "always" or (case.tie == "format" and reads_no_column[name])
            outranks = score > low + _PAYS
            # False where a cheat is not judged (NaN)
            if outranks or (score > low - _PAYS and not may_tie):
                verb = "outranks" if outranks else "ties with"
                faults.append(
                    f"- {name}: {case.name!r} ({score:.3g}) {verb} the honest answer ({low:.3g}); "
                    f"response {cut(repr(case.prefill + case.completion), 90)}{_CURES.get(case.name, '')}"
                )
    return faults
