"""Products of few rows with the model's own weights, at up to four times the speed of torch's linear layer on a CPU.

A linear layer multiplies the rows by the transposed weights, for which libraries rearrange all the weights for a
handful of rows. _decode_step.c reads them as they lie in memory: no copy, nothing to keep in sync. It is compiled at
first use, in about two seconds. Where there is no C compiler, the weights are the left factor of torch's own product,
and only the rows are rearranged. The two matrices as large as the vocabulary, head and embedding, get fewer passes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from grpo_kit.engine._supported_models import is_plain, is_plain_weight
from grpo_kit.engine.memory._free import free_bytes

_MANY = 256  # from this number of rows on the usual product is as fast
# Has this build of torch oneDNN's product?
HAS_PRODUCT = torch.backends.mkldnn.is_available() and hasattr(
    torch.ops.mkldnn, "_linear_pointwise"
)


_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_long
_COMPILE = "-O3 -march=native -fopenmp -fPIC -c -o step.o"
_LINK = "-shared step.o -o step.so"  # without -fopenmp: the threads are torch's own


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """_decode_step.c for this processor; None without a C compiler (CC, else cc) that has OpenMP, as gcc has."""
    source = str(Path(__file__).with_name("_decode_step.c"))
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for options in ([source, *_COMPILE.split()], _LINK.split()):
                # in a session of its own: Ctrl-C in a terminal is for the run, not for the compiler
                subprocess.run(
                    [*compiler, *options],
                    check=True,
                    cwd=folder,
                    capture_output=True,
                    start_new_session=True,
                )
            library = ctypes.CDLL(f"{folder}/step.so")
    # ValueError: an open quote in CC
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
    library.product.argtypes = [*[_ADDRESS] * 3, *[_NUMBER] * 4]
    library.step.argtypes = [_ADDRESS] * 7
    for name in ("lanes", "has_bfloat16"):
        setattr(library, name, ctypes.c_int.in_dll(library, name).value)
    return library


def product(weight: Tensor, x: Tensor) -> Tensor:
    """float32 x @ weight.T for weight (N, K) and x (R, K), as (R, N) in whatever layout was fastest; no gradients."""
    rows, width = x.shape
    if rows >= _MANY:
        return linear(x, weight)
    library = compiled() if x.is_cpu and weight.is_cpu else None
    if library is not None and width % library.lanes == 0 and weight.is_contiguous():
        x, y = x.contiguous(), x.new_empty(rows, len(weight))
        addresses = y.data_ptr(), x.data_ptr(), weight.data_ptr()
        library.product(*addresses, rows, len(weight), width, torch.get_num_threads())
        return y
    # (N, K) as the rows, x as the weights
    return torch.ops.mkldnn._linear_pointwise(weight, x, None, "none", [], "").t()


@dataclass(frozen=True)
class Projection:
    """A linear layer as its tensors: x (R, K) -> x W^T + b + the sum of scaling * B A x over its active adapters."""

    weight: Tensor
    bias: Tensor | None
    adapters: tuple[tuple[Tensor, Tensor, float], ...]
    rounded: Tensor | None = (
        None  # the weight in bfloat16, as it is or laid out for oneDNN; multiplied instead of it
    )

    def __call__(self, x: Tensor) -> Tensor:
        """(R, N), a new tensor in whatever layout was fastest."""
        y = self.product(x)
        if self.bias is not None:
            y = y.add_(self.bias)
        for a, b, scaling in self.adapters:
            y = y.add_(product(b, product(a, x)), alpha=scaling)
        return y

    def product(self, x: Tensor) -> Tensor:
        """x (R, K) @ weight.T, a new tensor (R, N) in whatever layout was fastest; summed in float32."""
        if self.rounded is None:
            return product(self.weight, x)
        x = x.bfloat16()
        return torch.ops.mkldnn._linear_pointwise(x, self.rounded, None, "none", [], "").float()


def projection(module: nn.Module, dtype: torch.dtype = torch.float32) -> Projection | None:
    """A plain linear layer, or one under plain LoRA adapters that are not merged; None for any other.

    dtype: of the layer; adapters are of it, or float32.
    """
    if not is_plain(module):
        return None
    if type(module) is nn.Linear:
        tensors = [module.weight] if module.bias is None else [module.weight, module.bias]
        if not all(is_plain_weight(tensor, dtype) for tensor in tensors):
            return None
        return Projection(module.weight, module.bias, ())
    # where nobody has imported it, no layer is of it
    lora = sys.modules.get("peft.tuners.lora")
    if (
        lora is None
        or type(module) is not lora.Linear
        or module.merged
        or module.fan_in_fan_out
    ):
        return None
    base = projection(module.base_layer, dtype)
    if base is None or module.disable_adapters:
        return base
    adapters = []
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        down, up = module.lora_A[name], module.lora_B[name]
        a = projection(down, dtype) or projection(down)
        b = projection(up, dtype) or projection(up)
        if (
            a is None
            or b is None
            or a.bias is not None
            or b.bias is not None
            or name in module.lora_variant
        ):
            return None
        adapters.append((a.weight, b.weight, float(module.scaling[name])))
    return replace(base, adapters=tuple(adapters))


# ---- the two matrices as large as the vocabulary, embedding and head: fewer passes over them -------------------------
# trl's chunked head computes the logits a second time in the backward pass; here softmax's result stays until then, as
# far as memory allows. The gradients of head and embedding are added where they belong, into `.grad`, where torch would
# make a matrix of them first. The numbers are trl's up to rounding. Float32 only; what anybody hooked stays as it was.

_TILE = 256  # tokens whose logits are there at once
_KEPT_OF_FREE = 0.25  # of free memory, what kept probabilities may take


class _Head(torch.autograd.Function):
    """hidden (S, hidden), weight (V, hidden), labels (S,) -> their log-probabilities and the entropies, (S,) each.

    Of the first `vocabulary` rows of weight; the others have no probability.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, scale: float, vocabulary: int):
        count, matrix = len(hidden), weight[:vocabulary]
        logprobs, entropies = hidden.new_empty(count), hidden.new_empty(count)
        room = (
            int(_KEPT_OF_FREE * free_bytes(hidden.device)) // (4 * vocabulary) // _TILE * _TILE
        )
        kept = hidden.new_empty(
            min(count, room) if any(ctx.needs_input_grad) else 0, vocabulary
        )
        tile = hidden.new_empty(min(_TILE, count), vocabulary)
        scratch = tile.new_empty(tile.shape if len(kept) < count else (0, vocabulary))
        for start in range(0, count, _TILE):
            rows = slice(start, start + _TILE)
            logits = _logits(hidden[rows], matrix, scale, tile)
            out = kept[rows] if rows.start < len(kept) else scratch[: len(logits)]
            probs = torch.softmax(logits, dim=-1, out=out)
            largest_logprob = probs.amax(dim=-1).log()  # the largest's probability is 1 / sum
            normaliser = logits.amax(dim=-1) - largest_logprob
            entropies[rows] = normaliser - torch.linalg.vecdot(probs, logits)
            logprobs[rows] = logits.gather(1, labels[rows, None])[:, 0] - normaliser
        ctx.save_for_backward(hidden, labels, entropies)
        ctx.weight, ctx.matrix, ctx.kept, ctx.scale = weight, matrix, kept, scale
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, by_logprob, by_entropy):
        hidden, labels, entropies = ctx.saved_tensors
        matrix, kept, scale = ctx.matrix, ctx.kept, ctx.scale
        # Written over below, and not held any longer than that; a second time it is computed again.
        ctx.kept = kept.new_empty(0, len(matrix))
        if by_logprob is None:
            by_logprob = torch.zeros_like(entropies)
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_weight = _GradientSum(ctx.weight) if ctx.needs_input_grad[1] else None
        # What was kept goes in one piece, the rest is computed again, tile by tile.
        pieces = [slice(start, start + _TILE) for start in range(len(kept), len(hidden), _TILE)]
        if len(kept) or not pieces:  # without a row: a gradient of zeros, not a missing one
            pieces = [slice(0, len(kept)), *pieces]
        for rows in pieces:
            if rows.stop <= len(kept):
                probs = kept
            else:
                tile = hidden.new_empty(len(hidden[rows]), len(matrix))
                probs = torch.softmax(_logits(hidden[rows], matrix, scale, tile), dim=-1)
            factor = by_logprob[rows, None]
            if by_entropy is not None:
                # The entropy falls by p (log p + entropy) as a logit grows; log p of 0 never counts.
                surprise = (
                    probs.clamp_min(torch.finfo(probs.dtype).tiny)
                    .log_()
                    .add_(entropies[rows, None])
                )
                factor = surprise.mul_(by_entropy[rows, None]).add_(factor)
            by_logits = probs.mul_(factor.neg())
            by_logits.scatter_add_(1, labels[rows, None], by_logprob[rows, None])
            if scale != 1:
                by_logits.mul_(scale)
            if by_hidden is not None:
                torch.mm(by_logits, matrix, out=by_hidden[rows])
            if by_weight is not None:
                by_weight.add_product(by_logits, hidden[rows])
        return by_hidden, by_weight and by_weight.result(), None, None, None


def _logits(hidden: Tensor, weight: Tensor, scale: float, tile: Tensor) -> Tensor:
    out = tile[: len(hidden)]
    return torch.addmm(out, hidden, weight.t(), beta=0, alpha=scale, out=out)


class _Embedding(torch.autograd.Function):
    """weight (V, hidden), ids (...) -> (..., hidden); the padding's row gets no gradient."""

    @staticmethod
    def forward(ctx, weight, ids, padding: int | None):
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return weight[ids]

    @staticmethod
    def backward(ctx, gradient):
        ids = ctx.saved_tensors[0].flatten()
        gradient = gradient.flatten(0, -2)
        if ctx.padding is not None:
            is_token = ids != ctx.padding
            ids, gradient = ids[is_token], gradient[is_token]
        by_weight = _GradientSum(ctx.weight)
        by_weight.add_rows(ids, gradient)
        return by_weight.result(), None, None


class _GradientSum:
    """A parameter's gradient, added up in its `.grad` where nothing watches it, else apart."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        watched = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        self._in_place = parameter.is_leaf and not watched
        self._sum = parameter.grad if self._in_place else None

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Adds left^T @ right to the first rows; left (S, rows), right (S, columns)."""
        rows = left.size(1)
        if self._sum is None and rows == len(self._parameter):
            self._sum = left.t() @ right
            return
        if self._sum is None:
            self._sum = torch.zeros_like(self._parameter)
        self._sum[:rows].addmm_(left.t(), right)

    def add_rows(self, places: Tensor, rows: Tensor) -> None:
        """Adds rows (S, columns) at these places (S,)."""
        if self._sum is None:
            self._sum = torch.zeros_like(self._parameter)
        self._sum.index_add_(0, places, rows)

    def result(self) -> Tensor | None:
        """The gradient that autograd is to add; None where `.grad` has it."""
        if not self._in_place:
            return self._sum
        self._parameter.grad = self._sum
        return None


def usable_head(head: nn.Module, hidden: Tensor) -> bool:
    """Can `head_logprobs` stand in for this output layer: a plain float32 Linear without bias, on a CPU?"""
    if type(head) is not nn.Linear or head.bias is not None:
        return False
    return is_plain(head) and usable(hidden, head.weight)


def head_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: float, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels (S,) and entropies (S,) of softmax(scale * hidden @ weight^T).

    rows: of weight, that have a probability; None: all.
    """
    return _Head.apply(
        hidden, weight, labels, float(scale), len(weight) if rows is None else rows
    )


def usable(*tensors: Tensor) -> bool:
    """Are they float32 on a CPU, with nothing cast?"""
    plain = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
    return plain and not torch.is_autocast_enabled("cpu")


def embed(embedding: nn.Module, ids: Tensor) -> Tensor | None:
    """The model's embedding of these ids, or None where the module must be called."""
    if type(embedding) is not nn.Embedding or not is_plain(embedding):
        return None
    if embedding.max_norm or embedding.sparse or embedding.scale_grad_by_freq:
        return None
    if (
        embedding._backward_hooks
        or embedding._backward_pre_hooks
        or not usable(embedding.weight)
    ):
        return None
    if not embedding.weight.requires_grad or not torch.is_grad_enabled():
        return None
    return _Embedding.apply(embedding.weight, ids, embedding.padding_idx)
