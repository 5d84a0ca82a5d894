"""Texts for TRL's trainers: do they train on the tokens that a model wrote?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedTokenizerBase


def trained_as_sampled(tokenizer: PreTrainedTokenizerBase, table: pd.DataFrame) -> list[bool]:
    """For each row (prompt, completion, ids, cut_off): does TRL's tokenization of the texts give these ids?

    TRL 1.16's DPO, KTO and SFT trainers tokenize prompt + completion as one text, the tokenizer's end token written
    behind it unless it is there; ORPO and CPO append the end's id, and put a BOS in front if the tokenizer knows one
    and the prompt does not begin with it. False for a text that the tokenizer would cut into other tokens, special
    tokens inside, another end than the tokenizer's, bytes that are no text, and a completion that merges with its
    prompt. A completion that was cut off is compared without the end that TRL adds.

    >>> ids = [[36, 2]] * 2  # "4" and SmolLM2's end; the second one was cut off, but holds an end
    >>> table = pd.DataFrame({"prompt": "2 + 2 =", "completion": "4", "ids": ids, "cut_off": [False, True]})
    >>> trained_as_sampled(tokenizer, table)  # doctest: +SKIP
    [True, False]
    """
    end, prompts, completions = tokenizer.eos_token, table["prompt"], table["completion"]
    texts = [p + c if c.endswith(end) else p + c + end for p, c in zip(prompts, completions, strict=True)]
    trained = tokenizer(texts)["input_ids"]
    before = tokenizer(list(prompts))["input_ids"]
    stop = [[tokenizer.eos_token_id] if cut_off else [] for cut_off in table["cut_off"]]
    return [t == [*b, *ids, *s] for t, b, ids, s in zip(trained, before, table["ids"], stop, strict=True)]
