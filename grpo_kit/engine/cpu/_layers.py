"""The models' layers as plain functions of their tensors, for a CPU: transformers' computation without its modules.

Read again from the model for every batch, so that weights may change, and adapters be switched, between rollouts. If
any module is not plain (quantised, DoRA, merged, hooked, not float32), all modules are called instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from grpo_kit.engine._supported_models import is_plain, is_plain_weight, is_tested
from grpo_kit.engine.cpu._matmul import HAS_PRODUCT, Projection, compiled, projection
from grpo_kit.models._precision import in_huge_pages

# ---- products in bfloat16, over float32 weights that are trained --------------------------------------------------
# The weights are rounded again before each rollout, into a copy half their size that goes when it ends. Embeddings,
# norms, attention, adapters, biases and the sampler stay float32. What samples is then another policy by that rounding,
# with log-probabilities of its own; the loss weighs each token by them (Config.importance_sampling_cap).

_ROWS = 16  # of the products for which oneDNN lays out the weights; others are as right


def _rounded(**linears: Projection) -> dict[str, Projection]:
    weights = in_huge_pages([linear.weight for linear in linears.values()], torch.bfloat16)
    library = compiled()
    # oneDNN uses AMX, which multiplies many rows in a fraction of the time; C does not
    if _has("amx_bf16") or library is None or not library.has_bfloat16:
        weights = [torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) for weight in weights]
    pairs = zip(linears, weights, strict=True)
    return {name: replace(linears[name], rounded=weight) for name, weight in pairs}


def rounded(parts: Parts) -> Parts:
    """A model's Parts whose products are in bfloat16, of the weights as they are now."""
    layers = []
    for layer in parts.layers:
        linears = {n: part for n, part in vars(layer).items() if isinstance(part, Projection)}
        layers.append(replace(layer, **_rounded(**linears)))
    return replace(parts, layers=layers, **_rounded(head=parts.head))


def _has(feature: str) -> bool:
    """Has this processor these instructions, as far as torch can tell?"""
    return bool(
        hasattr(torch.cpu, "get_capabilities") and torch.cpu.get_capabilities().get(feature)
    )


def why_not_here() -> str | None:
    """None if this processor multiplies bfloat16 faster than float32, else why not."""
    if (
        _has("amx_bf16") or _has("avx512_bf16")
    ) and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return "this processor has no products of bfloat16 (AVX512-BF16 or AMX), which would be slower here"


# ---- the layers ---------------------------------------------------------------------------------------------------

_FAMILIES = {"Llama": llama, "Qwen2": qwen2, "Qwen3": qwen3}
_Classes = dict[type, Callable]


def _classes(name: str) -> _Classes:
    """Each family's class of that name, and its forward as shipped: a class with a replaced forward is not used."""
    classes = [getattr(module, family + name) for family, module in _FAMILIES.items()]
    return {cls: cls.forward for cls in classes}


_LAYERS, _ATTENTION, _MLPS = _classes("DecoderLayer"), _classes("Attention"), _classes("MLP")
_NORMS, _DECODERS, _ROTARY = _classes("RMSNorm"), _classes("Model"), _classes("RotaryEmbedding")
_MLP_TOKENS = 4096  # at once: the MLP's inside is the widest tensor
# Query (R, H, G, D), key and value (R, H, D) of R tokens, G query heads to a key head; the layer; its scale
# -> attention's output, (R, H * G * D).
Attend = Callable[[Tensor, Tensor, Tensor, int, float], Tensor]


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the last dimension."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
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
    before_mlp: Norm
    gate: Projection
    up: Projection
    down: Projection
    scale: float
    query_norm: Norm | None = None
    key_norm: Norm | None = None

    def settings(self) -> tuple[float, ...]:
        """Settings that its numbers depend on, besides tensors."""
        norms = (self.before_attention, self.query_norm, self.key_norm, self.before_mlp)
        return self.scale, *(norm.eps for norm in norms if norm is not None)


@dataclass(frozen=True)
class Parts:
    """A decoder and its head as tensors, all of one dtype but the adapters; dim: of a head of attention."""

    embeddings: Tensor
    layers: list[Layer]
    last: Norm
    head: Projection
    dim: int


class PlainLayers:
    """One model's decoder and head as functions of its tensors, which are the model's own."""

    def __init__(self, base: PreTrainedModel, parts: Parts) -> None:
        self.parts, self.rotary = parts, base.get_decoder().rotary_emb
        self.layers, self.head = parts.layers, parts.head
        first = parts.layers[0]
        self._key_heads = len(first.key.weight) // parts.dim
        # Query heads to a key head.
        self.groups = len(first.query.weight) // len(first.key.weight)
        self.settings = (
            self.rotary.attention_scaling,
            *(layer.settings() for layer in parts.layers),
        )

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states (R, E) of R tokens; ids and positions long (R,)."""
        state = self.parts.embeddings.index_select(0, ids)
        # (R, 1, 1, D)
        cos, sin = (table[0][:, None, None] for table in self.rotary(state, positions[None]))
        half = self.parts.dim // 2
        signed_sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        for number, layer in enumerate(self.layers):
            x = layer.before_attention(state)
            query, key = self._queries_and_keys(layer, x, cos, signed_sin)
            value = layer.value(x).view(key.shape)
            attention = attend(query, key, value, number, layer.scale)
            state.add_(layer.output(attention))
            for part in state.split(_MLP_TOKENS):
                x = layer.before_mlp(part)
                gate = silu(layer.gate(x), inplace=True)
                part.add_(layer.down(gate.mul_(layer.up(x))))
        return self.parts.last(state)

    def _queries_and_keys(
        self, layer: Layer, x: Tensor, cos: Tensor, signed_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(R, H, G, D) and (R, H, D), rotated by their positions."""
        dim = self.parts.dim
        # A key behind the queries that attend to it.
        heads = x.new_empty(len(x), self._key_heads, self.groups + 1, dim)
        query, key = heads[:, :, :-1], heads[:, :, -1]
        query.copy_(layer.query(x).view(query.shape))
        key.copy_(layer.key(x).view(key.shape))
        if layer.query_norm is not None:
            query.copy_(layer.query_norm(query))
            key.copy_(layer.key_norm(key))
        rotated = torch.empty_like(heads)
        half = dim // 2
        torch.mul(heads[..., half:], signed_sin[..., :half], out=rotated[..., :half])
        torch.mul(heads[..., :half], signed_sin[..., half:], out=rotated[..., half:])
        heads.mul_(cos).add_(rotated)
        return query, key


def plain_layers(base: PreTrainedModel, bits: int = 32) -> PlainLayers | None:
    """The model as plain functions, or None if its modules must be called. bits: 16 rounds weights for its products."""
    if not HAS_PRODUCT or torch.is_autocast_enabled("cpu"):
        return None
    parts = read_parts(base, torch.float32)
    if parts is None or parts.embeddings.device.type != "cpu":
        return None
    return PlainLayers(base, rounded(parts) if bits == 16 else parts)


def read_parts(base: PreTrainedModel, dtype: torch.dtype) -> Parts | None:
    """The model's tensors, or None if a module is not plain or a weight, adapters aside, of another dtype."""
    decoder = base.get_decoder()
    if (
        not is_tested(base)
        or not _is(decoder, _DECODERS)
        or not _is(decoder.rotary_emb, _ROTARY)
    ):
        return None
    embeddings = decoder.embed_tokens
    if type(embeddings) is not nn.Embedding or embeddings.max_norm is not None:
        return None
    if not is_plain(embeddings) or not is_plain_weight(embeddings.weight, dtype):
        return None
    # as many as its own forward runs
    modules = decoder.layers[: decoder.config.num_hidden_layers]
    layers = [_layer(module, dtype) for module in modules]
    last = _norm(decoder.norm, dtype)
    head = projection(base.get_output_embeddings(), dtype)
    if not layers or any(part is None for part in (last, head, *layers)):
        return None
    dim = modules[0].self_attn.head_dim
    if decoder.rotary_emb.inv_freq.numel() * 2 != dim:
        return None
    return Parts(embeddings.weight, layers, last, head, dim)


def _layer(module: nn.Module, dtype: torch.dtype) -> Layer | None:
    """The parts of one decoder layer, or None if one of them is not plain."""
    if (
        not _is(module, _LAYERS)
        or not _is(module.self_attn, _ATTENTION)
        or not _is(module.mlp, _MLPS)
    ):
        return None
    attention, mlp = module.self_attn, module.mlp
    if type(mlp.act_fn) not in (SiLUActivation, nn.SiLU) or not is_plain(mlp.act_fn):
        return None
    norms = {
        "before_attention": module.input_layernorm,
        "before_mlp": module.post_attention_layernorm,
    }
    if isinstance(attention, qwen3.Qwen3Attention):
        norms |= {"query_norm": attention.q_norm, "key_norm": attention.k_norm}
    linears = {
        "query": attention.q_proj,
        "key": attention.k_proj,
        "value": attention.v_proj,
        "output": attention.o_proj,
        "gate": mlp.gate_proj,
        "up": mlp.up_proj,
        "down": mlp.down_proj,
    }
    parts: dict[str, Any] = {name: _norm(norm, dtype) for name, norm in norms.items()}
    parts |= {name: projection(linear, dtype) for name, linear in linears.items()}
    if any(part is None for part in parts.values()):
        return None
    return Layer(**parts, scale=attention.scaling)


def shipped_norms(model: nn.Module) -> set[type[nn.Module]]:
    """The classes of its norms that transformers has, as shipped."""
    return {type(module) for module in model.modules() if _is(module, _NORMS)}


def _norm(module: nn.Module, dtype: torch.dtype) -> Norm | None:
    if not _is(module, _NORMS) or not is_plain_weight(module.weight, dtype):
        return None
    return Norm(module.weight, module.variance_epsilon)


def _is(module: nn.Module, classes: _Classes) -> bool:
    """Exactly one of these, as shipped and not hooked."""
    cls = type(module)
    return cls in classes and cls.forward is classes[cls] and is_plain(module)


# ---- the head as the model's own forward pass has it ---------------------------------------------------------------
# Some models scale logits behind their head, or cap them (Granite, Gemma 2). No name in transformers stands for that
# part of a forward pass alone, so the whole is called with a decoder that returns the hidden states at once.


class _HiddenOnly:
    """A decoder's output of which only the hidden states are there."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int | slice) -> Any:
        return (self.last_hidden_state,)[place]


def head_of(base: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """f(hidden (S, H)) -> logits (S, V). Where the model adds nothing behind its head, that is the head."""
    if is_tested(base):
        return base.get_output_embeddings()
    decoder = base.get_decoder()

    def logits(hidden: Tensor) -> Tensor:
        replaced = vars(decoder).get("forward")
        decoder.forward = lambda *args, **kwargs: _HiddenOnly(hidden[None])
        try:
            return base(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            del decoder.forward
            if replaced is not None:
                decoder.forward = replaced

    return logits
