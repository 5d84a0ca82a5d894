"""A tokenizer in a GGUF file: its tokens and merges, and llama.cpp's name for how it splits text before merges."""

from __future__ import annotations

import json
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
_GPT4O = _CASES.replace("END", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
_BY_REGEX = {_QWEN2: "qwen2", _LLAMA3: "dbrx", _TEKKEN: "tekken", _GPT4O: "gpt-4o"}  # llama.cpp's names
_ENDS = ("eos", "eot", "eom")  # a file's names for tokens at which generation stops
_PIECES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}  # spaces in Gemma's sentencepiece


def splitting_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """llama.cpp's name for how the tokenizer splits text before merges, or "pieces" for sentencepiece's."""
    made = (
        json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {"type": "slow"}}
    )
    if made["model"]["type"] != "BPE":
        raise ExportError(f"the tokenizer is a {made['model']['type']} one; format='gguf' writes BPE only")
    pre, found = made["pre_tokenizer"] or {}, None
    parts = pre.get("pretokenizers", [pre])
    kinds = [part.get("type") for part in parts]
    if made["model"].get("byte_fallback"):
        if made["normalizer"] != _PIECES or kinds not in ([None], ["Split"]):
            raise ExportError(
                f"the tokenizer treats spaces by {made['normalizer'] or pre!r:.200}, which llama.cpp does otherwise "
                "behind a special token; use format='merged' and llama.cpp's own converter"
            )
        found = "pieces"
    elif kinds == ["Split", "ByteLevel"]:
        found = _BY_REGEX.get(parts[0]["pattern"].get("Regex"))
        if found == "dbrx" and made["model"].get("ignore_merges"):
            found = "llama-bpe"
    elif kinds == ["ByteLevel"] and parts[0]["use_regex"]:
        found = "gpt-2"
    elif kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1]["use_regex"]:
        found = "smollm"
    if found:
        return found
    raise ExportError(
        f"the tokenizer splits text by {pre!r:.200}, for which llama.cpp's name is not known here; use format='merged' "
        "and llama.cpp's own converter"
    )


def write_tokens(writer: Any, tokenizer: Any, splitting: str, size: int, ends: Sequence[int]) -> None:
    """Write size tokens, their kinds, how they are merged, and the chat template. splitting: of splitting_of.

    ends: tokens that end a completion. Raises ExportError for more than a file has names for.
    """
    import gguf

    made = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    added, pieces = tokenizer.added_tokens_decoder, splitting == "pieces"
    merges = [one if isinstance(one, str) else " ".join(one) for one in made["merges"]]
    kind, tokens, kinds = gguf.TokenType, [], []
    for number in range(size):
        tokens.append(text := texts.get(number, f"[PAD{number}]"))
        special = kind.CONTROL if number in added and added[number].special else kind.USER_DEFINED
        byte = pieces and len(text) == 6 and text.startswith("<0x")
        plain = kind.BYTE if byte else kind.NORMAL if number in texts else kind.UNUSED
        kinds.append(special if number in added else plain)
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre("default" if pieces else splitting)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if pieces:  # the piece with the highest score is merged first
        scores = {one.replace(" ", ""): float(-rank) for rank, one in reversed([*enumerate(merges)])}
        writer.add_token_scores([scores.get(text, -1e6) for text in tokens])
    else:
        writer.add_token_merges(merges)
    if len(ends) > len(_ENDS):
        texts_of_ends = ", ".join(map(tokenizer.convert_ids_to_tokens, ends))
        raise ExportError(
            f"completions end at {len(ends)} tokens ({texts_of_ends}) and a GGUF file names {len(_ENDS)} at most; drop "
            "some of model.generation_config.eos_token_id, or use format='merged'"
        )
    named = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "pad", "unk")}
    named |= dict(zip(_ENDS, ends, strict=False))
    for name, number in named.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(tokenizer.get_chat_template())
