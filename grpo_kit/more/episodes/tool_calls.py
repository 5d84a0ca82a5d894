"""Structure rewards: is the answer a sequence of calls, of known operations, the right ones, and not too many?

A sequence is one call a line, or several with ; between them, `add(2, 3); mul(x, 4)`, or a model's own notation:
a list, JSON, tags (all in tool_call_syntax.parse_calls). The calls are read and never run. Each reward judges one
aspect; `call_reward` combines them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from grpo_kit._support.argument_checks import check_whole
from grpo_kit.more.episodes._tool_call_syntax import (
    Call,
    call_distance,
    call_text,
    gold_calls,
    parse_calls,
)
from grpo_kit.rewards.answers import AnswerReward
from grpo_kit.rewards.cheat_cases import Case, answer_cases
from grpo_kit.rewards.combine import WeightedSum


class _CallReward(AnswerReward):
    """Scores the calls in the answer tags of prefill + completion; 0.0 if they are no sequence of calls."""

    def score(self, answer: str | None, gold: Any = None) -> float | None:
        """A score in [0, 1]; None if there is a gold column and its value is no sequence of calls."""
        expected = gold_calls(gold) if self.columns else []
        if expected is None:
            return None
        calls = None if answer is None else parse_calls(answer)
        if not calls:
            return 0.0
        score = self._rate(calls, expected)
        if _may_be_padded(gold, expected):
            bare_calls = [call.without_none() for call in calls]
            bare_expected = [call.without_none() for call in expected]
            score = max(score, self._rate(bare_calls, bare_expected))
        return score

    def _rate(self, calls: list[Call], expected: list[Call]) -> float:
        raise NotImplementedError


def _may_be_padded(gold: Any, expected: list[Call]) -> bool:
    """Whether a table may have filled keys of the gold with None: all dicts of arguments then have the same keys."""
    keys = {tuple(dict(call.keywords)) for call in expected if call.keywords}
    items = [gold] if isinstance(gold, str | Mapping) else gold
    return len(keys) == 1 and not any(isinstance(item, str) for item in items)


class CallValidity(_CallReward):
    """1.0 if the answer is a sequence of calls of known operations, with as many arguments as they take, else 0.0.

    operations: {name: number of arguments}; None for any number. A name may be dotted. Keyword arguments count. Never
    None.
    Raises ValueError if operations is empty, has a name that no call can have, or a negative number.

    >>> valid = CallValidity({"add": 2, "neg": 1})
    >>> valid(["<answer>add(2, 3); neg(x)</answer>", "<answer>add(2)</answer>", "<answer>rm(2)</answer>"])
    [1.0, 0.0, 0.0]
    """

    def __init__(self, operations: Mapping[str, int | None], *, tag: str = "answer") -> None:
        super().__init__("call_validity", tag=tag)
        if not operations:
            raise ValueError(
                f"operations={operations!r} is empty; give {{name: number of arguments}}"
            )
        for name, count in operations.items():
            fits = count is None or (isinstance(count, int) and count >= 0)
            if parse_calls(f"{name}()") != [Call(name, ())] or not fits:
                raise ValueError(
                    f"operations has {name!r}: {count!r}; use a Python name and a whole number >= 0 or None"
                )
        self.operations = dict(operations)

    def cheats(self, honest: Case) -> list[Case]:
        """Texts that only look like calls, and calls of operations that do not exist."""
        name, count = next(iter(self.operations.items()))
        arguments = ", ".join("1" * (count or 0))
        texts = {
            "unknown operation": "no_such_operation(1)",
            "import": "__import__('os').system('true')",
            "operation's name alone": name,
            "attribute": f"self.{name}({arguments})",
            "assigned": f"x = {name}({arguments})",
            "nested": f"{name}({name}({arguments}))",
            "starred": f"{name}(*[{arguments}])",
            "calls in a comment": f"# {name}({arguments})",
            "call in a text": f"'{name}({arguments})'",
        }
        if count is not None:
            arguments = ", ".join("1" * (count + 1))
            texts["one argument too many"] = f"{name}({arguments})"
        return answer_cases(honest, texts, tag=self.tag)

    def _rate(self, calls: list[Call], expected: list[Call]) -> float:
        return float(all(map(self._is_valid, calls)))

    def _is_valid(self, call: Call) -> bool:
        n_arguments = len(call.arguments) + len(call.keywords)
        return call.name in self.operations and self.operations[call.name] in (
            None,
            n_arguments,
        )


class CallAccuracy(_CallReward):
    """exp(-alpha * distance) to the gold calls, in [exp(-alpha), 1]; 0.0 if the answer is no sequence of calls.

    distance: call_distance, in [0, 1]. At alpha = 2 calls that have nothing in common still earn 0.135.
    column: the gold calls: text, JSON text, a dict {"name": ..., "arguments": {...}}, or a list of these (see
    tool_call_syntax.gold_calls). None if the value is None, empty, or no sequence of calls.
    A table fills the keys that a dict lacks with None. So where all calls of a gold of dicts have the same keys, an
    argument that is None may be given as None or left out. JSON text is taken word by word.
    Raises ValueError if alpha is not positive and finite.

    >>> reward, gold = CallAccuracy(), ["add(2, 3)", "mul(x, 4)"]
    >>> scores = reward(["<answer>add(2, 3); mul(x, 4)</answer>", "<answer>add(2, 3)</answer>"], calls=[gold] * 2)
    >>> [round(score, 3) for score in scores]  # the second has distance 1/2
    [1.0, 0.368]
    """

    def __init__(
        self, *, alpha: float = 2.0, column: str = "calls", tag: str = "answer"
    ) -> None:
        super().__init__("call_accuracy", column, tag=tag)
        if not 0 < alpha < math.inf:
            raise ValueError(f"alpha={alpha!r} must be a positive number, such as 2.0")
        self.alpha = alpha

    def cheats(self, honest: Case) -> list[Case]:
        """Sequences near the gold but wrong; no cases without a gold."""
        column = honest.columns[self.column]
        expected = gold_calls(column)
        if expected is None:
            return []
        calls = list(map(call_text, expected))
        names = [call.name for call in expected]
        sequence = "; ".join(calls)
        doubled = [text for text in calls for _ in range(2)]
        texts = {
            "all calls twice": f"{sequence}; {sequence}",
            "every call twice": "; ".join(doubled),
            "one call, many times": "; ".join(calls[:1] * (len(calls) + 20)),
            "arguments dropped": "; ".join(f"{name}()" for name in names),
            "names alone": "; ".join(names),
            "calls as one text": repr(sequence),
            "calls as a list of texts": f"[{', '.join(map(repr, calls))}]",
            "a call in a call": f"print({calls[0]})",
            "two sequences in tags": "".join(
                f"<tool_call>{text}</tool_call>" for text in calls * 2
            ),
            "calls after words": f"The calls are {sequence}",
            "calls commented out": "\n".join(f"# {text}" for text in calls),
            "two sequences with or": f"{sequence} or {calls[0]}",
        }
        if len(calls) > 1:
            texts["a call dropped"] = "; ".join(calls[1:])
            texts["last call dropped"] = "; ".join(calls[:-1])
            texts["order turned round"] = "; ".join(calls[::-1])
        wrong = {name: text for name, text in texts.items() if self.score(text, column) != 1.0}
        return answer_cases(honest, wrong, tag=self.tag)

    def _rate(self, calls: list[Call], expected: list[Call]) -> float:
        return math.exp(-self.alpha * call_distance(calls, expected))


class CallShape(_CallReward):
    """Are the operations called as often as in the gold? 1 - (sum of differences) / (sum of both), in [0, 1].

    The reward sees neither order nor arguments, so use it as a part, never alone. 0.0 if the answer is no sequence
    of calls. column and None: as in CallAccuracy.

    >>> CallShape()(["<answer>add(1, 1); neg(2)</answer>"], calls=["add(2, 3); mul(x, 4)"])
    [0.5]
    """

    only_a_part = True  # a part of a good answer; see check_rewards

    def __init__(self, *, column: str = "calls", tag: str = "answer") -> None:
        super().__init__("call_shape", column, tag=tag)

    def _rate(self, calls: list[Call], expected: list[Call]) -> float:
        shared = Counter(call.name for call in calls) & Counter(call.name for call in expected)
        return 2 * shared.total() / (len(calls) + len(expected))


class CallEfficiency(_CallReward):
    """max(0, 1 - n / n_max) for a sequence of n calls, in [0, 1): fewer calls earn more.

    No call at all earns 0.0, as does an answer that is no sequence of calls: to do nothing is not efficient. One call
    earns the most, whatever the question, so use it as a small part of a reward, never alone. Never None.
    Raises ValueError if n_max is below 1.

    >>> CallEfficiency(n_max=4)(["<answer>a()</answer>", "<answer>a(); b()</answer>", "<answer># none</answer>"])
    [0.75, 0.5, 0.0]
    """

    only_a_part = True  # a part of a good answer; see check_rewards

    def __init__(self, *, n_max: int = 50, tag: str = "answer") -> None:
        super().__init__("call_efficiency", tag=tag)
        check_whole("n_max", n_max, hint=", the number of calls that earns nothing")
        self.n_max = n_max

    def cheats(self, honest: Case) -> list[Case]:
        """Sequences of useless calls."""
        return answer_cases(
            honest, {"nothing, commented": "# nothing to do", "a semicolon": ";"}, tag=self.tag
        )

    def _rate(self, calls: list[Call], expected: list[Call]) -> float:
        return max(0.0, 1 - len(calls) / self.n_max)


def call_reward(
    operations: Mapping[str, int | None],
    *,
    weights: tuple[float, float, float] = (0.375, 0.5, 0.125),
    column: str = "calls",
    tag: str = "answer",
) -> WeightedSum:
    """A worked example: validity, accuracy (the quality) and efficiency as one reward, in [0, 1).

    weights: of the three. The default is exact in binary; (0.4, 0.5, 0.1) is the common advice. Both are
    generous: one valid call that has nothing in common with the gold earns 0.566 with the advised weights
    (0.4 + 0.5 * 0.135 + 0.1 * 0.98) and 0.565 with the default. If a model settles for that, raise accuracy's weight
    or alpha.

    >>> reward = call_reward({"add": 2}, weights=(0.4, 0.5, 0.1))
    >>> [round(s, 3) for s in reward(["<answer>add(1, 2)</answer>", "<answer>add(</answer>"], calls=["add(1, 2)"] * 2)]
    [0.998, 0.0]
    """
    if len(weights) != 3:
        raise ValueError(
            f"weights={weights!r}: give three, of validity, accuracy and efficiency"
        )
    parts = [
        CallValidity(operations, tag=tag),
        CallAccuracy(column=column, tag=tag),
        CallEfficiency(tag=tag),
    ]
    return WeightedSum(list(zip(parts, weights, strict=True)))
