"""The models' layers as plain functions of their tensors, for a CPU: transformers' computation without its modules.

Read again from the model for every batch, so that weights may change, and adapters be switched, between rollouts. If
any module is not plain (quantised, DoRA, merged, hooked, not float32), all modules are called instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from grpo_kit.engine._supported_models import is_tested
from grpo_kit.engine.cpu._matmul import Projection, available, is_plain, is_plain_weight, projection

# ---- products in bfloat16, over float32 weights that are trained --------------------------------------------------
# The weights are rounded again before each rollout, into a copy half their size that goes when it ends. Embeddings,
# norms, attention, adapters, biases and the sampler stay float32. What samples is then another policy by that rounding,
# with log-probabilities of its own; the loss weighs each token by them (Config.importance_sampling_cap).

_ROWS = 16  # of the products for which oneDNN lays out the weights; others are as right


@dataclass(frozen=True)
class RoundedProjection(Projection):
    """A linear layer whose weight is there in bfloat16 besides, laid out for oneDNN; called as Projection is."""

    packed: Any = None

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x (R, K) @ weight.T, a new float32 tensor (R, N); summed in float32, rounded once."""
        return torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.packed, None, "none", [], "").float()


def _rounded(one: Projection) -> RoundedProjection:
    packed = torch.ops.mkldnn._reorder_linear_weight(one.weight.detach().bfloat16(), _ROWS)
    return RoundedProjection(one.weight, one.bias, one.adapters, packed)


def rounded(part: Any, projection: Callable[[Projection], Projection] = _rounded) -> Any:
    """A layer or a whole model's Parts with each Projection in them made another, from its weight as it is now."""
    if isinstance(part, Projection):
        return projection(part)
    if isinstance(part, list):
        return [rounded(each, projection) for each in part]
    found = {f.name: getattr(part, f.name) for f in fields(part)}
    others = {name: each for name, each in found.items() if isinstance(each, Projection | list)}
    return replace(part, **{name: rounded(each, projection) for name, each in others.items()})


def why_not_here() -> str | None:
    """None if this processor multiplies bfloat16 faster than float32, else why not."""
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() and (has.get("avx512_bf16") or has.get("amx_bf16")):
        return None
    return "this processor has no products of bfloat16 (AVX512-BF16 or AMX), which would be slower here"


# ---- the layers ---------------------------------------------------------------------------------------------------

_LAYERS = (llama.LlamaDecoderLayer, qwen2.Qwen2DecoderLayer, qwen3.Qwen3DecoderLayer)
_ATTENTION = (llama.LlamaAttention, qwen2.Qwen2Attention, qwen3.Qwen3Attention)
_MLPS = (llama.LlamaMLP, qwen2.Qwen2MLP, qwen3.Qwen3MLP)
_NORMS = (llama.LlamaRMSNorm, qwen2.Qwen2RMSNorm, qwen3.Qwen3RMSNorm)
_DECODERS = (llama.LlamaModel, qwen2.Qwen2Model, qwen3.Qwen3Model)
_ROTARY = (llama.LlamaRotaryEmbedding, qwen2.Qwen2RotaryEmbedding, qwen3.Qwen3RotaryEmbedding)
# As shipped: a class with a replaced forward is not used.
_FORWARDS = {
    kind: kind.forward for kinds in (_LAYERS, _ATTENTION, _MLPS, _NORMS, _DECODERS, _ROTARY) for kind in kinds
}
_MLP_TOKENS = 4096  # at once: the MLP's inside is the widest tensor
# Query (R, H, G, D), key and value (R, H, D) of R tokens, G query heads to a key head; the layer; its scale
# -> attention's output, (R, H * G * D).
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor]


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the last dimension."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        spread = torch.mul(x, x).mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return torch.mul(x, spread).mul_(self.weight)


@dataclass(frozen=True)
class Layer:
    """Everything of one decoder layer; the norms of queries and keys where the model has them."""

    before_attention: Norm
    query: Projection
    key: Projection
    value: Projection
    output: Projection
    query_norm: Norm | None
    key_norm: Norm | None
    scale: float
    before_mlp: Norm
    gate: Projection
    up: Projection
    down: Projection

    def settings(self) -> tuple[float, ...]:
        """Settings that its numbers depend on, besides tensors."""
        norms = (self.before_attention, self.query_norm, self.key_norm, self.before_mlp)
        return self.scale, *(norm.eps for norm in norms if norm is not None)


@dataclass(frozen=True)
class Parts:
    """A decoder and its head as tensors, all of one dtype but the adapters; dim: of a head of attention."""

    embeddings: torch.Tensor
    layers: list[Layer]
    last: Norm
    head: Projection
    dim: int


class PlainLayers:
    """One model's decoder and head as functions of its tensors, which are the model's own."""

    def __init__(self, base: PreTrainedModel, parts: Parts) -> None:
        self._embeddings, self._rotary = parts.embeddings, base.get_decoder().rotary_emb
        self.layers, self._last, self.head, self.dim = parts.layers, parts.last, parts.head, parts.dim
        layers, dim = parts.layers, parts.dim
        self.key_heads = layers[0].key.weight.size(0) // dim
        self.groups = layers[0].query.weight.size(0) // (dim * self.key_heads)
        self.settings = (self._rotary.attention_scaling, *(x for layer in layers for x in layer.settings()))

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Last hidden states (R, E) of R tokens; ids and positions long (R,)."""
        state = self._embeddings.index_select(0, ids)
        cos, sin = (x[0][:, None, None] for x in self._rotary(state, positions[None]))  # (R, 1, 1, D)
        half = self.dim // 2
        turn = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        for number, layer in enumerate(self.layers):
            x = layer.before_attention(state)
            query, key = self._queries_and_keys(layer, x, cos, turn)
            value = layer.value(x).view(len(x), self.key_heads, self.dim)
            found = attend(query, key, value, number, layer.scale)
            state.add_(layer.output(found))
            for part in state.split(_MLP_TOKENS):
                x = layer.before_mlp(part)
                inside = torch.nn.functional.silu(layer.gate(x), inplace=True).mul_(layer.up(x))
                part.add_(layer.down(inside))
        return self._last(state)

    def _queries_and_keys(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, turn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(R, H, G, D) and (R, H, D), rotated by their positions."""
        heads, groups, dim = self.key_heads, self.groups, self.dim
        both = x.new_empty(len(x), heads, groups + 1, dim)  # a key behind the queries that attend to it
        both[:, :, :groups] = layer.query(x).view(len(x), heads, groups, dim)
        both[:, :, groups] = layer.key(x).view(len(x), heads, dim)
        if layer.query_norm is not None:
            both[:, :, :groups] = layer.query_norm(both[:, :, :groups])
            both[:, :, groups] = layer.key_norm(both[:, :, groups])
        turned = torch.empty_like(both)
        half = dim // 2
        torch.mul(both[..., half:], turn[..., :half], out=turned[..., :half])
        torch.mul(both[..., :half], turn[..., half:], out=turned[..., half:])
        both.mul_(cos).add_(turned)
        return both[:, :, :groups], both[:, :, groups]


def plain_layers(base: PreTrainedModel, bits: int = 32) -> PlainLayers | None:
    """The model as plain functions, or None if its modules must be called. bits: 16 rounds weights for its products."""
    if not available() or torch.is_autocast_enabled("cpu"):
        return None
    parts = read_parts(base, torch.float32)
    if parts is None or parts.embeddings.device.type != "cpu":
        return None
    return PlainLayers(base, rounded(parts) if bits == 16 else parts)


def read_parts(base: PreTrainedModel, dtype: torch.dtype) -> Parts | None:
    """The model's tensors, or None if a module is not plain or a weight, adapters aside, of another dtype."""
    decoder = base.get_decoder()
    if not is_tested(base) or not _is(decoder, _DECODERS) or not _is(decoder.rotary_emb, _ROTARY):
        return None
    embeddings = decoder.embed_tokens
    known = type(embeddings) is torch.nn.Embedding and embeddings.max_norm is None and is_plain(embeddings)
    if not known or not is_plain_weight(embeddings.weight, dtype):
        return None
    modules = decoder.layers[: decoder.config.num_hidden_layers]  # as many as its own forward runs
    layers = [_layer(module, dtype) for module in modules]
    last, head = _norm(decoder.norm, dtype), projection(base.get_output_embeddings(), dtype)
    if last is None or head is None or not layers or any(layer is None for layer in layers):
        return None
    dim = modules[0].self_attn.head_dim
    if decoder.rotary_emb.inv_freq.numel() * 2 != dim:
        return None
    return Parts(embeddings.weight, layers, last, head, dim)


def _layer(module: torch.nn.Module, dtype: torch.dtype) -> Layer | None:
    """The parts of one decoder layer, or None if one of them is not plain."""
    if not _is(module, _LAYERS):
        return None
    attention, mlp = module.self_attn, module.mlp
    if not _is(attention, _ATTENTION) or not _is(mlp, _MLPS):
        return None
    if type(mlp.act_fn) not in (SiLUActivation, torch.nn.SiLU) or not is_plain(mlp.act_fn):
        return None
    normed = isinstance(attention, qwen3.Qwen3Attention)
    parts = [
        _norm(module.input_layernorm, dtype),
        *(projection(getattr(attention, f"{name}_proj"), dtype) for name in "qkvo"),
        *((_norm(attention.q_norm, dtype), _norm(attention.k_norm, dtype)) if normed else (None, None)),
        attention.scaling,
        _norm(module.post_attention_layernorm, dtype),
        *(projection(getattr(mlp, f"{name}_proj"), dtype) for name in ("gate", "up", "down")),
    ]
    missing = [part is None for place, part in enumerate(parts) if normed or place not in (5, 6)]
    return None if any(missing) else Layer(*parts)


def shipped_norms(model: torch.nn.Module) -> set[type[torch.nn.Module]]:
    """The classes of its norms that transformers has, as shipped."""
    return {type(module) for module in model.modules() if _is(module, _NORMS)}


def _norm(module: torch.nn.Module, dtype: torch.dtype) -> Norm | None:
    plain = _is(module, _NORMS) and is_plain_weight(module.weight, dtype)
    return Norm(module.weight, module.variance_epsilon) if plain else None


def _is(module: torch.nn.Module, kinds: tuple[type, ...]) -> bool:
    """Exactly one of these, as shipped and not hooked."""
    kind = type(module)
    return kind in kinds and kind.forward is _FORWARDS[kind] and is_plain(module)


# ---- the head as the model's own forward pass has it ---------------------------------------------------------------
# Some models scale logits behind their head, or cap them (Granite, Gemma 2). No name in transformers stands for that
# part of a forward pass alone, so the whole is called with a decoder that returns the hidden states at once.


class _Known:
    """A decoder's output of which only the hidden states are there."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int | slice) -> Any:
        return (self.last_hidden_state,)[place]


def head_of(base: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """f(hidden (S, H)) -> logits (S, V). Where the model adds nothing behind its head, that is the head."""
    if is_tested(base):
        return base.get_output_embeddings()
    decoder = base.get_decoder()

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        before = vars(decoder).get("forward")
        decoder.forward = lambda *args, **kwargs: _Known(hidden[None])
        try:
            return base(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            del decoder.forward
            if before is not None:
                decoder.forward = before

    return logits
