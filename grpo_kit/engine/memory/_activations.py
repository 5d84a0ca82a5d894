"""The memory of an update: bytes of llama, qwen2 and qwen3 decoders' activations, in closed form.

Counted from the tensors that autograd saves in transformers' own layers (tests/engine/test_memory.py measures them),
and from the order in which the backward pass allocates and frees. A chunk is a number of packed tokens that go forward
and backward at once. Its layers keep their activations, or are checkpointed: they keep their input and are recomputed.

Simplifications: dense text-only decoders; no dropout; bytes that do not grow with tokens, parameters or vocabulary
are left out. CUDA kernels' own workspaces are not modelled.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
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
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads"
)  # fmt: skip


class ChunkPeak(NamedTuple):
    """The memory of one chunk at one moment, without weights, gradients and optimizer.

    kept: activations waiting for the backward pass. working: needed at that moment only. gradients: whether the
    gradients of all weights exist at that moment. moment: forward, head, layer, recomputed layer or embedding.
    """

    kept: float
    working: float
    gradients: bool
    moment: str

    def total(self, gradient_bytes: float) -> float:
        """All bytes, those of the gradients where they exist."""
        total = self.kept + self.working
        return total + gradient_bytes if self.gradients else total


def has_sizes(config: PretrainedConfig) -> bool:
    """Does a config name the sizes that the estimates are made of? Of types that are not tested they are rougher."""
    return all(
        isinstance(getattr(config.get_text_config(), name, None), int) for name in _SIZES
    )


@dataclass
class ChunkMemory:
    """The activations of a model's update, in bytes.

    itemsize: bytes of a (frozen or trained) weight, hence of the residual stream.
    trainable "lora": adapters of `rank` in float32 on every linear layer; weights are frozen.
    compute_itemsize: bytes of autocast's dtype; None means no autocast. With float32 weights autocast keeps a cast
    copy of the input for every linear layer.
    mask_keys: keys of a dense mask (columns); PyTorch's SDPA keeps a converted copy of it in every layer.
    0 means no dense mask (FlexAttention).
    four_bit: frozen weights in 4 bits, each widened for its product and dropped; autocast's casts are kept instead.
    fused_norms: norms are one kernel, as in the packed update on a card (engine/_update_memory.py).
    entropy_bonus: entropies have a gradient, too.
    Raises ValueError for an unknown architecture or size.
    """

    config: PretrainedConfig
    itemsize: int
    trainable: Trainable = "full"
    compute_itemsize: int | None = None
    mask_keys: int = 0
    rank: int = 16
    four_bit: bool = False
    fused_norms: bool = False
    entropy_bonus: bool = False

    def __post_init__(self) -> None:
        check_choice("trainable", self.trainable, ("full", "lora"))
        for name in ("itemsize", "compute_itemsize"):
            value = getattr(self, name)
            if value not in (2, 4, None):
                raise ValueError(
                    f"{name}={value!r} must be 2 (bfloat16, float16) or 4 (float32) bytes"
                )
        config = self.config.get_text_config()
        if not has_sizes(config):
            check_choice("config.model_type", config.model_type, MODEL_TYPES)
        self.hidden, self.mlp = config.hidden_size, config.intermediate_size
        if experts := getattr(config, "num_experts_per_tok", None):
            self.mlp = experts * (getattr(config, "moe_intermediate_size", None) or self.mlp)
        self.layers, self.vocabulary = config.num_hidden_layers, config.vocab_size
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or self.hidden // self.heads
        self.query, self.key = self.heads * self.head_dim, self.key_heads * self.head_dim
        # numbers of the embedding, or of the head
        self.embedding = self.vocabulary * self.hidden
        self.tied = bool(config.tie_word_embeddings)
        self.query_key_norm = config.model_type not in ("llama", "qwen2")
        self.full = self.trainable == "full"
        self.compute = self.compute_itemsize or self.itemsize
        self.casts = self.compute != self.itemsize
        self.cast_itemsize = self.compute if self.casts else 0
        self.adapters_cast = not self.full and self.compute != _FLOAT  # each its own input

    def layer_bytes(self) -> float:
        """Bytes a token that one decoder layer keeps for the backward pass when it is not checkpointed.

        Cast weights are not counted here.

        >>> from transformers import Qwen2Config
        >>> qwen = Qwen2Config(hidden_size=1536, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2)
        >>> ChunkMemory(qwen, 2).layer_bytes() / 1024  # KiB a token: 0.43 GiB for 4,096 tokens
        106.0546875
        """
        hidden, compute = self.hidden, self.compute
        # of the numbers that an adapter computes in
        adapter_itemsize = self.compute_itemsize or _FLOAT
        norms = 2 * (self._norm_bytes() + _FLOAT)  # with 1/rms
        linear_inputs = 2 * self.itemsize * hidden  # q, k, v share one; gate, up share one
        if self.casts or self.adapters_cast:
            linear_inputs = 5 * adapter_itemsize * hidden
        key = self.key
        if self.mask_keys or self.heads & (self.heads - 1):
            key = self.query  # transformers repeats keys for all query heads
        attention = compute * (2 * self.query + 2 * key + self.mask_keys) + _FLOAT * self.heads
        mlp = 4 * compute * self.mlp
        if self.adapters_cast:
            attention += adapter_itemsize * self.query
            mlp += (adapter_itemsize - compute) * self.mlp
        if self.query_key_norm:
            normalised = self.query + self.key
            attention += _FLOAT * (self.heads + self.key_heads)
            if self.fused_norms and not self.casts:
                attention += compute * normalised
            elif self.full:
                attention += (_FLOAT + compute) * normalised
            else:
                attention += _FLOAT * normalised
        adapters = 0 if self.full else 7 * self.rank * adapter_itemsize
        return float(norms + linear_inputs + attention + mlp + adapters)

    def checkpoint_bytes(self) -> float:
        """Bytes a token that a checkpointed decoder layer keeps: its input.

        >>> from transformers import Qwen2Config
        >>> ChunkMemory(Qwen2Config(hidden_size=1536), 2).checkpoint_bytes()
        3072.0
        """
        return float(self.itemsize * self.hidden)

    def head_bytes(self, scored_tokens: int) -> float:
        """Bytes of the packed update's LM head at the peak of its backward pass, in total.

        scored_tokens: positions with a label. Bytes: the scored hidden states and their gradients; either one tile of
        HEAD_TILE tokens over the whole vocabulary, or, training the head, what a tile adds to the head's gradient; and
        what earlier tiles left of it. A CPU's own head (cpu/_matmul.py) needs less, or what is free.
        """
        states = (
            2 * scored_tokens * self.hidden * self.itemsize
            + self.embedding * self.cast_itemsize
        )
        logits = min(scored_tokens, HEAD_TILE) * self.vocabulary
        tile = logits * _FLOAT * (_ENTROPY_COPIES if self.entropy_bonus else _TILE_COPIES)
        if self.full:
            tile = max(tile, logits * self.compute + self._gradient_bytes(self.embedding))
            if scored_tokens > HEAD_TILE:
                tile += self.embedding * self.itemsize
        return float(states + tile)

    def peak(
        self,
        *,
        tokens: int,
        checkpointed_layers: int,
        scored_tokens: int | None = None,
        gradients: bool = True,
        gradient_bytes: float = 0.0,
    ) -> ChunkPeak:
        """The peak of a chunk's forward and backward pass: the largest of the moments named in ChunkPeak.

        tokens: packed positions; scored_tokens of them have a label (None: all).
        checkpointed_layers: so many of the first layers are recomputed in the backward pass.
        gradients: whether an earlier chunk of the step has left gradients; otherwise they (gradient_bytes) exist only
        where the backward pass ends, which decides the peak.
        """
        if not 0 <= checkpointed_layers <= self.layers:
            raise ValueError(
                f"checkpointed_layers={checkpointed_layers} must lie in 0..{self.layers}, the model's layers"
            )
        scored = tokens if scored_tokens is None else scored_tokens
        whole_layers = self.layers - checkpointed_layers
        layer = tokens * self.layer_bytes()
        layer_input = tokens * self.checkpoint_bytes()
        # rotary cosines and sines, the mask
        stem = tokens * (2 * self.head_dim * self.itemsize + self.mask_keys)
        layers = stem + whole_layers * layer + checkpointed_layers * layer_input
        cast = 0
        if not self.four_bit:  # copies of a layer's linear weights are kept with its graph
            linear = 2 * self.hidden * (self.query + self.key) + 3 * self.hidden * self.mlp
            cast = linear * self.cast_itemsize
        embedding = self.embedding * self.itemsize if self.full else 0
        head_gradient = embedding if self.tied else 0  # waits for the embedding's
        state = tokens * self.hidden * self.compute
        backward = head_gradient + self._mlp_backward(tokens) + 2 * state
        if self.adapters_cast:
            backward += 2 * state
        until_head = layers + tokens * (self._norm_bytes() + self.itemsize * self.hidden)
        forward = scored * self.hidden * self.itemsize + self.embedding * self.cast_itemsize
        forward += (
            min(scored, HEAD_TILE) * self.vocabulary * _TILE_COPIES * _FLOAT
            + self.layers * cast
        )
        head = self.head_bytes(scored) + whole_layers * cast
        moments = [
            ChunkPeak(until_head, forward, gradients, "forward"),
            ChunkPeak(until_head, head, gradients, "head"),
        ]
        if whole_layers:
            moments.append(
                ChunkPeak(layers, backward + state + whole_layers * cast, gradients, "layer")
            )
        if checkpointed_layers:
            working = backward + layer + cast
            if self.fused_norms:
                working -= layer_input  # the first norm's input is the checkpoint's
            inputs = checkpointed_layers * layer_input
            moments.append(ChunkPeak(stem + inputs, working, gradients, "recomputed layer"))
            moments.append(ChunkPeak(stem + layer_input, working, True, "recomputed layer"))
        ends = 2 * head_gradient  # if tied: two and their sum
        if gradients:  # the first gradient of a step is stored, later ones are added to it
            ends += embedding
        moments.append(ChunkPeak(stem, ends + state, True, "embedding"))
        return max(moments, key=lambda moment: moment.total(gradient_bytes))

    def _gradient_bytes(self, weights: int) -> int:
        """Bytes of the gradient of so many weights, with its cast copy's."""
        return weights * (self.itemsize + self.cast_itemsize)

    def _norm_bytes(self) -> int:
        """Bytes a token that a norm keeps: its input, and for its weight what it is multiplied with."""
        residual = self.itemsize * self.hidden
        if self.fused_norms:
            return residual
        return _FLOAT * self.hidden + (residual if self.full else 0)

    def _mlp_backward(self, tokens: int) -> int:
        """Bytes that the backward pass of an MLP needs, by its gradients or by a weight's; a 4-bit weight's copy."""
        matrix, inner = self.mlp * self.hidden, tokens * self.mlp
        mlp_bytes = 2 * inner * self.compute
        if self.adapters_cast:
            mlp_bytes += 2 * inner
        if self.full:
            mlp_bytes = max(mlp_bytes, self._gradient_bytes(matrix) + inner * self.compute)
        return mlp_bytes + matrix * self.compute if self.four_bit else mlp_bytes


def update_budget(
    free_bytes: float,
    config: PretrainedConfig,
    itemsize: int,
    *,
    longest: int = 1,
    total: int | None = None,
    preferred: int = PREFERRED_TOKENS,
    **options: Any,
) -> tuple[int, int]:
    """(tokens of a chunk, checkpointed layers) for the memory that is free once gradients are counted.

    free_bytes: memory for chunks besides weights, gradients and optimizer; nine tenths of it are used.
    longest: packed tokens of the longest completion with its prompt, the smallest possible chunk.
    total: packed tokens of the step, the largest possible chunk. preferred: tokens that suffice for good matrix sizes.
    options: of ChunkMemory.
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
    total = 2**20 if total is None else total
    for name, value in (("longest", longest), ("preferred", preferred), ("total", total)):
        check_whole(name, value)
    memory = ChunkMemory(config, itemsize, **options)
    most = max(longest, total)
    preferred = max(longest, min(preferred, most))

    def fits(tokens: int, checkpointed: int) -> bool:
        peak = memory.peak(tokens=tokens, checkpointed_layers=checkpointed)
        return peak.kept + peak.working <= USED_OF_FREE * free_bytes

    layers = range(memory.layers + 1)
    checkpointed = next((count for count in layers if fits(preferred, count)), memory.layers)
    larger = range(longest + 1, most + 1)
    fitting = bisect_left(larger, True, key=lambda tokens: not fits(tokens, checkpointed))
    return longest + fitting, checkpointed
