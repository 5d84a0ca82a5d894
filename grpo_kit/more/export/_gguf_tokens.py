"""A tokenizer in a GGUF file: its tokens and merges, and llama.cpp's name for how it splits text before merges."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_kit.more.export._template import ExportError

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
_CASES = (  # capital letters and then others, each with its ending
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASES.replace("END", "")
_GPT4O = _CASES.replace("END", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace(
    r"\p{N}|", r"\p{N}{1,3}|", 1
)
# llama.cpp's names
_BY_REGEX = {_QWEN2: "qwen2", _LLAMA3: "dbrx", _TEKKEN: "tekken", _GPT4O: "gpt-4o"}
_ENDS = ("eos", "eot", "eom")  # a file's names for tokens at which generation stops
# spaces in Gemma's sentencepiece
_PIECES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def splitting_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """llama.cpp's name for how the tokenizer splits text before merges, or "pieces" for sentencepiece's."""
    if not tokenizer.is_fast:
        raise ExportError("the tokenizer is a slow one; format='gguf' writes BPE only")
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    model, pre = backend["model"], backend["pre_tokenizer"] or {}
    if model["type"] != "BPE":
        raise ExportError(
            f"the tokenizer is a {model['type']} one; format='gguf' writes BPE only"
        )
    parts = pre.get("pretokenizers", [pre])
    kinds = [part.get("type") for part in parts]
    if model.get("byte_fallback"):
        if backend["normalizer"] != _PIECES or kinds not in ([None], ["Split"]):
            raise ExportError(
                f"the tokenizer treats spaces by {backend['normalizer'] or pre!r:.200}, which llama.cpp does otherwise "
                "behind a special token; use format='merged' and llama.cpp's own converter"
            )
        return "pieces"
    splitting = None
    if kinds == ["Split", "ByteLevel"]:
        splitting = _BY_REGEX.get(parts[0]["pattern"].get("Regex"))
        if splitting == "dbrx" and model.get("ignore_merges"):
            splitting = "llama-bpe"
    elif kinds == ["ByteLevel"] and parts[0]["use_regex"]:
        splitting = "gpt-2"
    elif (
        kinds == ["Digits", "ByteLevel"]
        and parts[0]["individual_digits"]
        and parts[1]["use_regex"]
    ):
        splitting = "smollm"
    if splitting is None:
        raise ExportError(
            f"the tokenizer splits text by {pre!r:.200}, for which llama.cpp's name is not known here; use "
            "format='merged' and llama.cpp's own converter"
        )
    return splitting


def write_tokens(
    writer: Any, tokenizer: Any, splitting: str, size: int, ends: Sequence[int]
) -> None:
    """Write size tokens, their kinds, how they are merged, and the chat template. splitting: of splitting_of.

    ends: tokens that end a completion. Raises ExportError for more than a file has names for.
    """
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(size)]
    pieces = splitting == "pieces"
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre("default" if pieces else splitting)
    writer.add_token_list(tokens)
    writer.add_token_types(_token_types(tokenizer, tokens, pieces))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    if pieces:  # the piece with the highest score is merged first
        scores = {
            merge.replace(" ", ""): float(-rank)
            for rank, merge in reversed([*enumerate(merges)])
        }
        writer.add_token_scores([scores.get(text, -1e6) for text in tokens])
    else:
        writer.add_token_merges(merges)
    if len(ends) > len(_ENDS):
        texts_of_ends = ", ".join(map(tokenizer.convert_ids_to_tokens, ends))
        raise ExportError(
            f"completions end at {len(ends)} tokens ({texts_of_ends}) and a GGUF file names {len(_ENDS)} at most; drop "
            "some of model.generation_config.eos_token_id, or use format='merged'"
        )
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "pad", "unk")}
    special |= dict(zip(_ENDS, ends, strict=False))
    for name, number in special.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(tokenizer.get_chat_template())


def _token_types(tokenizer: Any, tokens: Sequence[str], pieces: bool) -> list[Any]:
    """gguf's TokenType of each token."""
    from gguf import TokenType

    vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    types = []
    for number, token in enumerate(tokens):
        if number in added:
            types.append(TokenType.CONTROL if added[number].special else TokenType.USER_DEFINED)
        elif pieces and re.fullmatch("<0x..>", token):
            types.append(TokenType.BYTE)
        else:
            types.append(TokenType.NORMAL if token in vocabulary else TokenType.UNUSED)
    return types
