"""SmolLM2's tokenizer and tiny-random up to a token: all texts can be written, and a step costs a tenth.

Nearly all of a tiny model's work is its vocabulary: drawing from it, its log-probabilities, its rows in a checkpoint.
"""

import contextlib
import copy
import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from grpo_kit.models import load_policy
from grpo_kit.models._adapters import add_adapters

FIRST = 2048  # bytes and chat markers are among them
ALSO = ("answer", "</")  # else an answer's tags take more tokens than completions have


@functools.cache
def tokenizer(first=FIRST):
    """The first tokens, ALSO and what those are merged from."""
    whole = load_policy("tiny-random", quiet=True)[1]
    made = json.loads(whole.backend_tokenizer.to_str())
    model = made["model"]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    also = {*ALSO}
    for pair in reversed(pairs):  # the last merges first: their parts come from earlier ones
        if "".join(pair) in also:
            also.update(pair)
    kept = sorted(
        (number, text)
        for text, number in model["vocab"].items()
        if number < first or text in also
    )
    model["vocab"] = {text: place for place, (_, text) in enumerate(kept)}
    model["merges"] = [
        pair for pair in pairs if {*pair, "".join(pair)} <= model["vocab"].keys()
    ]
    special = {
        name: getattr(whole, name)
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)),
        chat_template=whole.chat_template,
        **special,
    )


@functools.cache
def _model():
    model = load_policy("tiny-random", quiet=True)[0].cpu()
    model.resize_token_embeddings(len(tokenizer()))
    return model


def policy(tuning="full", **lora):
    """(model, tokenizer) of its own, as load_policy("tiny-random", tuning=tuning, lora=lora) gives them."""
    model = copy.deepcopy(_model()).to("cuda" if torch.cuda.is_available() else "cpu")
    return (model if tuning == "full" else add_adapters(model, tuning, lora, 0)), copy.deepcopy(
        tokenizer()
    )


@functools.cache
def folder():
    """The path of both as load_policy reads them; the same one in every process of these sources."""
    made_of = hashlib.sha256(
        Path(__file__).read_bytes() + transformers.__version__.encode()
    ).hexdigest()[:12]
    path = Path(tempfile.gettempdir()) / f"few-words-{os.getuid()}-{made_of}"
    if not path.exists():
        with tempfile.TemporaryDirectory() as made:
            for part in policy():
                part.save_pretrained(Path(made) / "model")
            with contextlib.suppress(OSError):  # another process was there first
                os.rename(Path(made) / "model", path)
    return path
