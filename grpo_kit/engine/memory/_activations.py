"""The memory of an update: bytes of llama, qwen2 and qwen3 decoders' activations, in closed form.

Counted from the tensors that autograd saves in transformers' own layers (tests/engine/test_memory.py measures them),
and from the order in which the backward pass allocates and frees. A chunk is a number of packed tokens that go forward
and backward at once. Its layers keep their activations, or are checkpointed: they keep their input and are recomputed.

Simplifications: dense text-only decoders; no dropout; bytes that do not grow with tokens, parameters or vocabulary
are left out. CUDA kernels' own workspaces are not modelled.
Longer than 300 lines because a layer's kept and passing tensors, and the peak made of them, are one computation.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from transformers import PretrainedConfig

from grpo_kit._support.argument_checks import check_choice, check_whole
from grpo_kit.models._model_facts import MODEL_TYPES

Trainable = Literal["full", "lora"]

PREFERRED_TOKENS = 4096  # of a chunk: large enough for matrix products to keep a card busy
USED_OF_FREE = 0.9  # the rest: the allocator's fragmentation and kernels' workspaces
HEAD_TILE = 1024  # scored tokens whose logits, over the whole vocabulary, are there at once
# Of them in float32: log-probabilities, probabilities, their product; with a gradient of entropies those of all three.
_TILE_COPIES, _ENTROPY_COPIES = 3, 6
_FLOAT = 4  # bytes of a float32
_NEEDED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads"
)  # fmt: skip


class _ChunkBytes(NamedTuple):
    """The peak of one chunk, without weights, gradients and optimizer.

    kept: activations waiting for the backward pass. working: needed at that moment only. gradients: whether the
    gradients of all weights exist at that moment. moment: forward, head, layer, recomputed layer or embedding.
    """

    kept: float
    working: float
    gradients: bool
    moment: str


def has_sizes(config: PretrainedConfig) -> bool:
    """Does a config name the sizes that the estimates are made of? Of types that are not tested they are rougher."""
    return all(isinstance(getattr(config.get_text_config(), name, None), int) for name in _NEEDED)


class _Sizes:
    """The numbers of an architecture that determine its bytes."""

    def __init__(self, config: PretrainedConfig) -> None:
        config = config.get_text_config()
        if not has_sizes(config):
            check_choice("config.model_type", config.model_type, MODEL_TYPES)
        self.hidden, self.mlp = config.hidden_size, config.intermediate_size
        if experts := getattr(config, "num_experts_per_tok", None):
            self.mlp = experts * (getattr(config, "moe_intermediate_size", None) or self.mlp)
        self.layers, self.vocabulary = config.num_hidden_layers, config.vocab_size
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or self.hidden // self.heads
        self.query, self.key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.tied, self.query_key_norm = (
            bool(config.tie_word_embeddings),
            config.model_type not in ("llama", "qwen2"),
        )

    @property
    def layer_weights(self) -> int:
        """Weights of the linear layers of one decoder layer, without biases."""
        return 2 * self.hidden * (self.query + self.key) + 3 * self.hidden * self.mlp


def layer_bytes(
    config: PretrainedConfig,
    itemsize: int,
    *,
    trainable: Trainable = "full",
    compute_itemsize: int | None = None,
    mask_keys: int = 0,
    rank: int = 16,
    fused_norms: bool = False,
) -> float:
    """Bytes a token that one decoder layer keeps for the backward pass when it is not checkpointed.

    itemsize: bytes of a (frozen or trained) weight, hence of the residual stream.
    compute_itemsize: bytes of autocast's dtype; None means no autocast. With float32 weights autocast keeps a cast
    copy of the input for every linear layer. Cast weights are not counted here.
    mask_keys: keys of a dense mask (columns); PyTorch's SDPA keeps a converted copy of it in every layer.
    0 means no dense mask (FlexAttention).
    trainable "lora": adapters of `rank` in float32 on every linear layer; weights are frozen.
    fused_norms: norms are one kernel, as in the packed update on a card (engine/_update_memory.py).
    Raises ValueError for an unknown architecture or size.

    >>> from transformers import Qwen2Config
    >>> qwen = Qwen2Config(hidden_size=1536, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2)
    >>> layer_bytes(qwen, 2) / 1024  # KiB a token: 0.43 GiB for 4,096 tokens
    106.0546875
    """
    sizes = _Sizes(config)
    w, c = _itemsizes(itemsize, compute_itemsize)
    h, full = sizes.hidden, _is_full(trainable)
    adapters_cast = not full and (compute_itemsize or itemsize) != _FLOAT  # each adapter casts its own input
    copy = compute_itemsize or _FLOAT  # the dtype an adapter computes in

    # Input, 1/rms; normalised, for the norm's weight.
    norms = 2 * (w * h + _FLOAT if fused_norms else _FLOAT * h + _FLOAT + (w * h if full else 0))
    if full:
        linear_inputs = 2 * w * h if w == c else 5 * c * h  # q, k, v share one; gate, up share one
    else:
        linear_inputs = 5 * copy * h if adapters_cast or w != c else 2 * w * h
    repeated = mask_keys or sizes.heads & (sizes.heads - 1)  # transformers repeats keys for all query heads
    key = sizes.query if repeated else sizes.key
    attention = c * (2 * sizes.query + 2 * key) + _FLOAT * sizes.heads + c * mask_keys
    mlp = 4 * c * sizes.mlp
    if adapters_cast:
        attention += copy * sizes.query
        mlp += (copy - c) * sizes.mlp
    if sizes.query_key_norm:
        both = sizes.query + sizes.key
        attention += _FLOAT * (sizes.heads + sizes.kv_heads)
        attention += c * both if fused_norms and w == c else _FLOAT * both + (c * both if full else 0)
    adapters = 0 if full else 7 * rank * (copy if adapters_cast else _FLOAT)
    return float(norms + linear_inputs + attention + mlp + adapters)


def checkpoint_bytes(config: PretrainedConfig, itemsize: int) -> float:
    """Bytes a token that a checkpointed decoder layer keeps: its input.

    >>> from transformers import Qwen2Config
    >>> checkpoint_bytes(Qwen2Config(hidden_size=1536), 2)
    3072.0
    """
    return float(itemsize * _Sizes(config).hidden)


def head_bytes(
    config: PretrainedConfig,
    itemsize: int,
    *,
    scored_tokens: int,
    trainable: Trainable = "full",
    compute_itemsize: int | None = None,
    entropy_bonus: bool = False,
) -> float:
    """Bytes of the packed update's LM head at the peak of its backward pass, in total.

    scored_tokens: positions with a label. Bytes: the scored hidden states and their gradients; either one tile of
    HEAD_TILE tokens over the whole vocabulary, or, training the head, what a tile adds to the head's gradient; and what
    earlier tiles left of it. A CPU's own head (cpu/_matmul.py) needs less, or what is free.
    entropy_bonus: entropies have a gradient, too.
    """
    sizes = _Sizes(config)
    w, c = _itemsizes(itemsize, compute_itemsize)
    tile = min(scored_tokens, HEAD_TILE)
    matrix = sizes.vocabulary * sizes.hidden
    cast = matrix * c if w != c else 0
    of_tile = tile * sizes.vocabulary * (_ENTROPY_COPIES if entropy_bonus else _TILE_COPIES) * _FLOAT
    left = 0
    if _is_full(trainable):
        left = matrix * w if scored_tokens > HEAD_TILE else 0
        of_tile = max(of_tile, tile * sizes.vocabulary * c + matrix * (w if w == c else w + c))
    return float(2 * scored_tokens * sizes.hidden * w + cast + left + of_tile)


def chunk_bytes(
    config: PretrainedConfig,
    itemsize: int,
    *,
    tokens: int,
    checkpointed_layers: int,
    scored_tokens: int | None = None,
    gradients: bool = True,
    trainable: Trainable = "full",
    compute_itemsize: int | None = None,
    mask_keys: int = 0,
    rank: int = 16,
    gradient_bytes: float = 0.0,
    four_bit: bool = False,
    fused_norms: bool = False,
    entropy_bonus: bool = False,
) -> _ChunkBytes:
    """The peak of a chunk's forward and backward pass: the largest of the moments named in _ChunkBytes.

    tokens: packed positions; scored_tokens of them have a label (None: all).
    checkpointed_layers: so many of the first layers are recomputed in the backward pass.
    gradients: whether an earlier chunk of the step has left gradients; otherwise they (gradient_bytes) exist only
    where the backward pass ends, which decides the peak.
    four_bit: frozen weights in 4 bits, each widened for its product and dropped; autocast's casts are kept instead.
    fused_norms: as in layer_bytes. entropy_bonus: as in head_bytes.
    """
    sizes, k = _Sizes(config), checkpointed_layers
    if not 0 <= k <= sizes.layers:
        raise ValueError(f"checkpointed_layers={k} must lie in 0..{sizes.layers}, the model's layers")
    scored = tokens if scored_tokens is None else scored_tokens
    full = _is_full(trainable)
    w, c = _itemsizes(itemsize, compute_itemsize)
    layer = tokens * layer_bytes(
        config,
        itemsize,
        trainable=trainable,
        compute_itemsize=compute_itemsize,
        mask_keys=mask_keys,
        rank=rank,
        fused_norms=fused_norms,
    )
    inputs = tokens * checkpoint_bytes(config, itemsize)
    stem = tokens * (2 * sizes.head_dim * w + mask_keys)  # rotary cosines and sines, the mask
    last = (
        tokens * sizes.hidden * (2 * w if fused_norms else _FLOAT + (2 * w if full else w))
    )  # the final norm
    layers = (sizes.layers - k) * layer + k * inputs
    weights = (
        sizes.layer_weights * c if w != c and not four_bit else 0
    )  # one layer's, cast; kept with its graph
    matrix = sizes.mlp * sizes.hidden * c if four_bit else 0
    cast = {"forward": sizes.layers * weights, "head": (sizes.layers - k) * weights}

    tile = min(scored, HEAD_TILE) * sizes.vocabulary * _TILE_COPIES * _FLOAT
    tile += sizes.vocabulary * sizes.hidden * c if w != c else 0
    head = head_bytes(
        config, itemsize, scored_tokens=scored, trainable=trainable, compute_itemsize=compute_itemsize,
        entropy_bonus=entropy_bonus,
    )  # fmt: skip
    embedding = sizes.vocabulary * sizes.hidden * w if full else 0
    held = embedding if sizes.tied else 0  # the head's gradient waits for the embedding's
    adapters_cast = not full and c != _FLOAT
    weight_gradient = sizes.mlp * sizes.hidden * (w if w == c else w + c) if full else 0
    mlp = tokens * sizes.mlp * (6 if adapters_cast else 2 * c)
    mlp = max(mlp, weight_gradient + tokens * sizes.mlp * c)
    thick = tokens * sizes.hidden * c
    moments = [
        (stem + last + layers, scored * sizes.hidden * w + tile + cast["forward"], False, "forward"),
        (stem + last + layers, head + cast["head"], False, "head"),
    ]
    if k < sizes.layers:
        working = held + matrix + mlp + (5 if adapters_cast else 3) * thick + cast["head"]
        moments.append((stem + layers, working, False, "layer"))
    if k:
        again = layer - inputs * fused_norms  # the first norm's input is the checkpoint's
        working = held + matrix + again + mlp + (4 if adapters_cast else 2) * thick + weights
        moments.append((stem + k * inputs, working, False, "recomputed layer"))
        moments.append((stem + inputs, working, True, "recomputed layer"))
    embedding *= gradients  # the first gradient of a step is stored, later ones are added to it
    moments.append((stem, 2 * held + embedding + thick, True, "embedding"))  # if tied: two and their sum
    if gradients:
        moments = [(kept, working, True, name) for kept, working, _, name in moments]
    return max(
        (_ChunkBytes(*moment) for moment in moments),
        key=lambda m: m.kept + m.working + m.gradients * gradient_bytes,
    )


def update_budget(
    free_bytes: float,
    config: PretrainedConfig,
    itemsize: int,
    *,
    longest: int = 1,
    total: int | None = None,
    preferred: int = PREFERRED_TOKENS,
    **chunk: Any,
) -> tuple[int, int]:
    """(tokens of a chunk, checkpointed layers) for the memory that is free once gradients are counted.

    free_bytes: memory for chunks besides weights, gradients and optimizer; nine tenths of it are used.
    longest: packed tokens of the longest completion with its prompt, the smallest possible chunk.
    total: packed tokens of the step, the largest possible chunk. preferred: tokens that suffice for good matrix sizes.
    chunk: trainable, compute_itemsize, mask_keys, rank, four_bit, fused_norms, entropy_bonus, as in chunk_bytes.
    Rule: the fewest checkpointed layers with which `preferred` tokens (fewer, if `total` is less; more, if `longest`
    is more) fit, then as many tokens as fit with these; if they do not even fit with every layer checkpointed, as
    many as do. Never less than `longest`, whether it fits or not. Every position counts as scored.
    Raises ValueError for sizes below 1.

    >>> from transformers import Qwen2Config
    >>> qwen = Qwen2Config(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
    ...                    num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True)
    >>> update_budget(8 * 2**30, qwen, 2, total=40_000)
    (4263, 17)
    """
    for name, value in (
        ("longest", longest),
        ("preferred", preferred),
        ("total", 1 if total is None else total),
    ):
        check_whole(name, value)
    layers = _Sizes(config).layers
    most = max(longest, total if total is not None else 2**20)

    def fits(tokens: int, checkpointed: int) -> bool:
        need = chunk_bytes(config, itemsize, tokens=tokens, checkpointed_layers=checkpointed, **chunk)
        return need.kept + need.working <= USED_OF_FREE * free_bytes

    wanted = max(longest, min(preferred, most))
    checkpointed = next((k for k in range(layers + 1) if fits(wanted, k)), layers)
    low, high = longest, most  # low fits, or must do
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle, checkpointed) else (low, middle - 1)
    return low, checkpointed


def _itemsizes(itemsize: int, compute_itemsize: int | None) -> tuple[int, int]:
    for name, value in (("itemsize", itemsize), ("compute_itemsize", compute_itemsize)):
        if value not in (2, 4) and not (name == "compute_itemsize" and value is None):
            raise ValueError(f"{name}={value!r} must be 2 (bfloat16, float16) or 4 (float32) bytes")
    return itemsize, compute_itemsize or itemsize


def _is_full(trainable: str) -> bool:
    check_choice("trainable", trainable, ("full", "lora"))
    return trainable == "full"
