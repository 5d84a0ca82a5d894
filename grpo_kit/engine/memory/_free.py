"""Memory that is free, on a card and on a CPU, and how many sequences to decode at once with it."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PretrainedConfig

from grpo_kit.engine.memory._activations import USED_OF_FREE, has_sizes
from grpo_kit.models._model_facts import base_model

_CGROUPS, _MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Files of a control group: its limit, its use, and the page cache in it that can be reclaimed.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def free_bytes(device: torch.device) -> int:
    """Bytes that torch can still allocate. On CUDA: under its memory fraction, with releasable cache. Else: the memory
    that system and container have left."""
    if device.type != "cuda":
        return int(min(psutil.virtual_memory().available, container_bytes()))
    card = _index(device)
    free, total = torch.cuda.mem_get_info(card)
    capped = int(
        total * torch.cuda.get_per_process_memory_fraction(card)
    ) - torch.cuda.memory_reserved(card)
    return max(0, min(free, capped)) + releasable_bytes(device)


def _index(device: torch.device) -> int:
    """ "cuda" is the current card: not all of torch's functions take it without a number."""
    return torch.cuda.current_device() if device.index is None else device.index


def releasable_bytes(device: torch.device) -> int:
    """Bytes of a card that torch caches and could release: not in use, no hole, and not held by a CUDA graph.

    A hole is free memory beside a tensor in one segment. A larger tensor cannot use it, and it returns to the card
    only with expandable segments (PYTORCH_CUDA_ALLOC_CONF). Memory of CUDA graphs is not available to others.
    """
    if torch.cuda.get_allocator_backend() != "native":  # its segments cannot be read
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    index, releasable = _index(device), 0
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != index or tuple(segment["segment_pool_id"]) != (0, 0):
            continue
        unused = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        if segment["is_expandable"] or len(unused) == len(segment["blocks"]):
            releasable += sum(unused)
    return releasable


def container_bytes() -> float:
    """Memory left by the control groups of this process (Docker, Kubernetes, Slurm); infinite without a limit.

    The system's own figure ignores them, and a process over such a limit is killed.
    """
    free = math.inf
    memberships = _MINE.read_text().splitlines() if _MINE.exists() else []
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers == "memory":
            root, (limit, usage, cache) = _CGROUPS / "memory", _V1
        elif controllers == "":
            root, (limit, usage, cache) = _CGROUPS, _V2
        else:
            continue
        group = root / path.strip("/")
        while group.is_relative_to(root):
            # In a container the path may be the host's: missing files are skipped, and so is a limit of "max".
            with suppress(OSError, ValueError):
                stat = dict(
                    line.split() for line in (group / "memory.stat").read_text().splitlines()
                )
                used = int((group / usage).read_text()) - int(stat.get(cache, 0))
                free = min(free, max(0, int((group / limit).read_text()) - used))
            group = group.parent
    return free


# ---- what a CPU's process holds besides what is in use ---------------------------------------------------------------
# glibc keeps freed blocks of up to 32 MB on its heap, and the holes between those in use add up: an update in bfloat16
# that had planned 4.9 GB held 6.6, and was killed in a container of 9. Where memory is short, blocks of 1 MB come from
# the system and go back to it, page by page, which takes a third longer. Cards, other C libraries, and a glibc that
# somebody has set up, are left alone.

_MMAP_THRESHOLD = -3  # mallopt's parameter (malloc.h)
_LARGE, _USUAL = 2**20, 32 * 2**20  # bytes; the second is where glibc's own adjusting ends


def _glibc() -> ctypes.CDLL | None:
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return None
    try:
        return ctypes.CDLL("libc.so.6")
    except OSError:  # another system, another C library
        return None


@contextmanager
def without_holes(device: torch.device) -> Iterator[None]:
    """Inside, the process holds no more than what is in use."""
    if device.type != "cpu" or (libc := _glibc()) is None:
        yield
        return
    libc.malloc_trim(0)
    libc.mallopt(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _USUAL)


# ---- when to try a larger size again -------------------------------------------------------------------------------

_FIRST_WAIT = 8


class Backoff:
    """Counts successes with a smaller size, and decides when to try a larger one: after 8 times, then 16 more, 32, ...

    One bad moment does not slow a whole run down, and a size that never fits is tried ever more rarely.

    >>> backoff = Backoff()
    >>> [n for n in range(1, 60) if backoff.again()]
    [8, 24, 56]
    """

    def __init__(self) -> None:
        self._wait, self._successes = _FIRST_WAIT, 0

    def failed(self) -> None:
        """Memory ran out: restart the count."""
        self._successes = 0

    def again(self) -> bool:
        """Count one more success; is it time for a larger size?"""
        self._successes += 1
        if self._successes < self._wait:
            return False
        self._wait, self._successes = 2 * self._wait, 0
        return True


# Most rows of a batch. CPU: SmolLM2-135M on 2 cores, where 32 took a fifth longer and 128 and 256 were not clearly
# faster. A card is bound by launches, so more rows cost little: an estimate, not measured.
MOST_ROWS = {"cpu": 64, "cuda": 256}
# Rows and prompt tokens for which the engine allocates memory on a card; fewer are padded.
_CARD_ROWS = (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2)
_CARD_TOKENS = 64
UNKNOWN_ROWS = 64  # for models of unknown size
# Bytes of a float32 pass over the logits, of what the sampler keeps of each logit, and of what it takes besides where
# something narrows the distribution. Counted on the pretend card (tests/pretend_card), as is a prompt's token.
_PASS, _SAMPLED = 4, 4
_NARROWED = {"top_k": 8, "min_p": 9, "repetition_penalty": 18, "top_p": 25}
_PREFILL_TOKENS = 16_384  # that the engine computes at once


# Presets whose card has no bfloat16, and its GB: it computes in the weights' own dtype.
WITHOUT_BFLOAT16 = {"t4": 16.0}


def card_itemsize(cfg: Any) -> int:
    """Bytes of a number in a card's computations for this Config: bfloat16's where the card has it."""
    if getattr(cfg, "preset", None) in WITHOUT_BFLOAT16:
        return getattr(torch, cfg.dtype or "float32").itemsize
    return 2


def decode_bytes(
    config: PretrainedConfig,
    itemsize: int,
    *,
    rows: int,
    prompts: int,
    prompt_tokens: int,
    completion_tokens: int,
    narrowed_by: Collection[str] = tuple(_NARROWED),
) -> dict[str, float]:
    """Bytes of `rows` sequences behind `prompts` prompts (each computed once), by kind.

    "keys and values": of all prompt and completion tokens. "logits and sampling": the larger of one decode step's and
    the prompts' forward pass, with its own keys and values. itemsize: bytes of a number in the model's dtype.
    narrowed_by: of _NARROWED, what makes the sampled distribution another than softmax(logits / temperature).

    >>> from transformers import LlamaConfig
    >>> smol = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    ...                    num_attention_heads=9, num_key_value_heads=3)
    >>> found = decode_bytes(smol, 4, rows=64, prompts=64, prompt_tokens=96, completion_tokens=12)
    >>> {name: round(value / 2**20) for name, value in found.items()}  # MiB, whatever narrows
    {'keys and values': 304, 'logits and sampling': 435}
    """
    config = config.get_text_config()
    head_dim = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    key_value = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * itemsize
    tokens = prompts * prompt_tokens
    sampled = _SAMPLED + max((_NARROWED[name] for name in narrowed_by), default=0)
    logits = rows * (2 * itemsize + max(itemsize, _PASS) + sampled) + prompts * itemsize
    prefill = (
        3 * config.intermediate_size + 4 * config.hidden_size + 2 * head_dim
    ) * itemsize + key_value
    at_once = min(tokens, max(_PREFILL_TOKENS, prompt_tokens))
    return {
        "keys and values": float((tokens + rows * completion_tokens) * key_value),
        "logits and sampling": float(max(logits * config.vocab_size, prefill * at_once)),
    }


def rows_at_once(
    model: Any,
    free_bytes: float,
    *,
    prompt_tokens: int,
    completion_tokens: int,
    samples: int = 1,
) -> int:
    """Sequences to decode at once, in 1..MOST_ROWS of the device: as many as fit in nine tenths of the free memory.

    On a card the number is one that the engine need not pad.
    prompt_tokens: of the longest prompt. samples: completions a prompt, which share its keys and values if all of
    them are in one batch. Models whose config does not name their sizes get UNKNOWN_ROWS.
    """
    base = base_model(model)
    if not has_sizes(base.config):
        return UNKNOWN_ROWS

    card = base.device.type == "cuda"
    if card:
        prompt_tokens = math.ceil(prompt_tokens / _CARD_TOKENS) * _CARD_TOKENS

    def fits(rows: int) -> bool:
        sizes = decode_bytes(
            base.config,
            base.dtype.itemsize,
            rows=rows,
            prompts=math.ceil(rows / samples),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        return sum(sizes.values()) <= USED_OF_FREE * free_bytes

    most = MOST_ROWS.get(base.device.type, UNKNOWN_ROWS)
    sizes = _CARD_ROWS if card else range(most, 1, -1)
    return next(filter(fits, sizes), 1)
