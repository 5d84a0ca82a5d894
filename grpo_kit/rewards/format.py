"""Soft format reward: credit for each piece of the format, full credit only for all of it."""

from __future__ import annotations

from grpo_kit.rewards.response import ResponseReward, check_tag, is_blank, own_answer


class SoftFormat(ResponseReward):
    """How much of <think>...</think><answer>...</answer> the response (prefill + completion) has, in [0, 1].

    | piece                                                        | with think | think=None |
    |---|---|---|
    | each tag, if it appears exactly once                         | 1/8 (x 4)  | 1/4 (x 2)  |
    | order: all tags once, in order, an answer and a thought      | 1/4        | 1/4        |
    | nothing visible after the closing answer tag                 | 1/4        | 1/4        |

    A repeated tag earns nothing, so spam does not pay. Blank text (white space, zero-width characters, &nbsp;: see
    response.is_blank) is no answer and no thought, nor is the prefill's text alone. Punctuation is an answer but
    no thought. A thought that the prefill closes, such as Qwen3's empty one, is
    not asked for. All steps are exact in binary. Never None. Needs no column but the optional `prefill`.

    >>> SoftFormat()(["<think>a</think><answer>1</answer>", "<answer>1</answer>", ""])
    [1.0, 0.5, 0.0]
    >>> SoftFormat(think=None)(["82</answer>", "82"], prefill=["<answer>", "<answer>"])
    [1.0, 0.25]
    """

    def __init__(self, *, think: str | None = "think", answer: str = "answer") -> None:
        check_tag("answer", answer)
        if think is not None:
            check_tag("think", think)
        if think == answer:
            raise ValueError(f"think={think!r}, answer={answer!r}: use two different names, or think=None")
        self.think, self.answer = think, answer
        self.__name__ = "soft_format"
        names = [answer] if think is None else [think, answer]
        self._tags = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]

    def _score(self, completion: str, prefill: str) -> float:
        response = prefill + completion
        once = [response.count(tag) == 1 for tag in self._tags]
        score = sum(once) / (2 * len(self._tags))
        places = [response.find(tag) for tag in self._tags]
        in_order = all(once) and places == sorted(places)
        given = self.think is None or f"</{self.think}>" in prefill
        thought = None if given else own_answer(completion, prefill, self.think) or ""
        answered = own_answer(completion, prefill, self.answer) is not None
        if in_order and answered and not (thought is not None and is_blank(thought, words=True)):
            score += 0.25
        if once[-1] and is_blank(response.rpartition(self._tags[-1])[2]):
            score += 0.25
        return score
