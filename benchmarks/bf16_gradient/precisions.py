"""The precisions in which one gradient is computed, float64 among them, and one part at a time put back to float32.

Under autocast (Config(autocast="bfloat16")) weights and the residual stream are float32 already and RMSNorm computes in
float32; matrix products and attention are bfloat16. In a model of bfloat16 weights the residual stream is bfloat16 too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional

Arm = Callable[[Any], AbstractContextManager]


@contextmanager
def exact(model: Any) -> Iterator[None]:
    """Everything in float64, RMSNorm and rotary angles too, which transformers computes in float32 at best."""
    model.double()
    rotary, base = model.model.rotary_emb, model.config.rope_parameters["rope_theta"]
    size = 2 * rotary.inv_freq.numel()

    def angles(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
        half = position_ids[..., None].double() * base**-exponents
        both = torch.cat((half, half), -1)
        return both.cos(), both.sin()

    def norm_of(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        eps = module.variance_epsilon
        return lambda x: module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    norms = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    for module in norms:
        module.forward = norm_of(module)
    rotary.forward = angles
    try:
        yield
    finally:
        for module in (rotary, *norms):
            del module.forward
        model.float()


@contextmanager
def autocast(model: Any) -> Iterator[None]:
    """What Config(autocast="bfloat16") does: float32 weights, matrix products and attention in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextmanager
def _rounded(model: Any) -> Iterator[None]:
    """Parameters in bfloat16 and back; buffers (rotary frequencies) stay float32, as transformers loads them."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    try:
        yield
    finally:
        for name, weight in model.named_parameters():
            weight.grad = None
            weight.data = before[name]


@contextmanager
def bf16_weights(model: Any) -> Iterator[None]:
    """Weights and residual stream in bfloat16."""
    with _rounded(model):
        yield


@contextmanager
def rounded_weights(model: Any) -> Iterator[None]:
    """float64 computing on weights that were rounded to bfloat16: how sensitive the gradient itself is."""
    with _rounded(model), exact(model):
        yield


def keeping(parts: Callable[[Any], list[Any]]) -> Arm:
    """Autocast, but these modules in float32."""

    @contextmanager
    def arm(model: Any) -> Iterator[None]:
        with autocast(model), ExitStack() as stack:
            for module in parts(model):
                stack.enter_context(_in_float32(module))
            yield

    return arm


@contextmanager
def _in_float32(module: Any) -> Iterator[None]:
    forward = module.forward

    def up(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(up, value))
        return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value

    def in_float32(*given: Any, **named: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return forward(*map(up, given), **{name: up(value) for name, value in named.items()})

    module.forward = in_float32
    try:
        yield
    finally:
        del module.forward


@contextmanager
def attention_in_float32(model: Any) -> Iterator[None]:
    """Autocast, but scores, softmax and the sum over values in float32."""
    attend = functional.scaled_dot_product_attention

    def in_float32(query: Any, key: Any, value: Any, **named: Any) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return attend(query.float(), key.float(), value.float(), **named)

    functional.scaled_dot_product_attention = in_float32
    try:
        with autocast(model):
            yield
    finally:
        functional.scaled_dot_product_attention = attend


class _Linear(torch.autograd.Function):
    """x W' with operands rounded to bfloat16 in the forward pass only, or in the backward pass only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, rounds_forward: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounds = not rounds_forward
        dtype = torch.bfloat16 if rounds_forward else x.dtype
        return (x.to(dtype) @ weight.T.to(dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        dtype = torch.bfloat16 if ctx.rounds else x.dtype
        gradient = gradient.to(dtype)
        rows = gradient.flatten(0, -2)  # (T, out)
        by_weight = rows.T @ x.flatten(0, -2).to(dtype)
        return (gradient @ weight.to(dtype)).to(x.dtype), by_weight.to(weight.dtype), None


def linears(*, rounds_forward: bool) -> Arm:
    """float32, but the linear layers' products in bfloat16, in one of the two passes."""

    @contextmanager
    def arm(model: Any) -> Iterator[None]:
        plain = functional.linear

        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            made = _Linear.apply(x, weight, rounds_forward)
            return made if bias is None else made + bias

        functional.linear = linear
        try:
            yield
        finally:
            functional.linear = plain

    return arm


def _first_layers(share: float) -> Callable[[Any], list[Any]]:
    return lambda model: list(model.model.layers[: max(1, round(share * len(model.model.layers)))])


# name -> how; the first three are what a user can have, the others look for the reason.
MAIN: dict[str, Arm] = {
    "float32": lambda model: nullcontext(),
    "bf16 autocast": autocast,
    "bf16 weights": bf16_weights,
}
PARTS: dict[str, Arm] = {
    "autocast, head float32": keeping(lambda model: [model.lm_head]),
    "autocast, layer 0 float32": keeping(_first_layers(0)),
    "autocast, first half of the layers float32": keeping(_first_layers(0.5)),
    "autocast, attention float32": attention_in_float32,
    "autocast, every mlp float32": keeping(lambda model: [layer.mlp for layer in model.model.layers]),
    "autocast, every self_attn float32": keeping(
        lambda model: [layer.self_attn for layer in model.model.layers]
    ),
    "linear layers bf16 in forward only": linears(rounds_forward=True),
    "linear layers bf16 in backward only": linears(rounds_forward=False),
    "float64 on weights rounded to bf16": rounded_weights,
}
