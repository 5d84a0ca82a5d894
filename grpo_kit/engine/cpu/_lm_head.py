"""The two matrices as large as the vocabulary, embedding and head, on a CPU: fewer passes over them.

trl's chunked head computes the logits a second time in the backward pass; here softmax's result stays until then, as
far as memory allows. The gradients of head and embedding are added where they belong, into `.grad`, where torch would
make a matrix of them first. The numbers are trl's up to rounding. Float32 only; what anybody hooked stays as it was.
"""

from __future__ import annotations

import torch

from grpo_kit.engine.cpu._matmul import is_plain
from grpo_kit.engine.memory._free import free_bytes

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
        room = int(_KEPT_OF_FREE * free_bytes(hidden.device)) // (4 * vocabulary) // _TILE * _TILE
        kept = hidden.new_empty(min(count, room) if any(ctx.needs_input_grad) else 0, vocabulary)
        tile = hidden.new_empty(min(_TILE, count), vocabulary)
        scratch = tile.new_empty(tile.shape if len(kept) < count else (0, vocabulary))
        for begin in range(0, count, _TILE):
            rows = slice(begin, min(begin + _TILE, count))
            logits = _logits(hidden[rows], matrix, scale, tile)
            probs = torch.softmax(
                logits, dim=-1, out=kept[rows] if begin < len(kept) else scratch[: len(logits)]
            )
            normaliser = (
                logits.amax(dim=-1) - probs.amax(dim=-1).log()
            )  # the largest's probability is 1 / sum
            entropies[rows] = normaliser - torch.linalg.vecdot(probs, logits)
            logprobs[rows] = logits.gather(1, labels[rows, None])[:, 0] - normaliser
        ctx.save_for_backward(hidden, labels, entropies)
        ctx.weight, ctx.matrix, ctx.kept, ctx.scale = weight, matrix, kept, scale
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, by_logprob, by_entropy):
        hidden, labels, entropies = ctx.saved_tensors
        weight, matrix, kept, scale = ctx.weight, ctx.matrix, ctx.kept, ctx.scale
        # Written over below, and not held any longer than that; a second time it is computed again.
        ctx.kept = kept.new_empty(0, len(matrix))
        if by_logprob is None:
            by_logprob = torch.zeros_like(entropies)
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_weight = _GradientSum(weight) if ctx.needs_input_grad[1] else None
        if by_weight is not None and not len(hidden):
            by_weight.add_product(kept, hidden)  # a gradient of zeros, not a missing one
        begin = 0
        while begin < len(hidden):
            # What was kept goes in one piece, the rest is computed again, tile by tile.
            rows = slice(begin, len(kept) if begin < len(kept) else min(begin + _TILE, len(hidden)))
            if begin < len(kept):
                probs = kept
            else:
                logits = _logits(
                    hidden[rows], matrix, scale, hidden.new_empty(rows.stop - begin, len(matrix))
                )
                probs = torch.softmax(logits, dim=-1)
            factor = by_logprob[rows, None]
            if by_entropy is not None:
                # The entropy falls by p (log p + entropy) as a logit grows; log p of 0 never counts.
                surprise = probs.clamp_min(torch.finfo(probs.dtype).tiny).log_().add_(entropies[rows, None])
                factor = surprise.mul_(by_entropy[rows, None]).add_(factor)
            by_logits = probs.mul_(factor.neg())
            by_logits.scatter_add_(1, labels[rows, None], by_logprob[rows, None])
            if scale != 1:
                by_logits.mul_(scale)
            if by_hidden is not None:
                torch.mm(by_logits, matrix, out=by_hidden[rows])
            if by_weight is not None:
                by_weight.add_product(by_logits, hidden[rows])
            begin = rows.stop
        return by_hidden, by_weight and by_weight.result(), None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, scale: float, tile: torch.Tensor) -> torch.Tensor:
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
            used = ids != ctx.padding
            ids, gradient = ids[used], gradient[used]
        by_weight = _GradientSum(ctx.weight)
        by_weight.add_rows(ids, gradient)
        return by_weight.result(), None, None


class _GradientSum:
    """A parameter's gradient, added up in its `.grad` where nothing watches it, else apart."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.direct = parameter.is_leaf and not (
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        )
        self._apart: torch.Tensor | None = None

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds left^T @ right to the first rows; left (S, rows), right (S, columns)."""
        rows, held = left.size(1), self._held()
        if held is None and rows == len(self.parameter):
            self._hold(left.t() @ right)
        elif held is None:
            self._hold(torch.zeros_like(self.parameter))
            self.add_product(left, right)
        else:
            held[:rows].addmm_(left.t(), right)

    def add_rows(self, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds rows (S, columns) at these places (S,)."""
        if self._held() is None:
            self._hold(torch.zeros_like(self.parameter))
        self._held().index_add_(0, places, rows)

    def result(self) -> torch.Tensor | None:
        """What autograd is to add: nothing, where it has been done."""
        return None if self.direct else self._apart

    def _held(self) -> torch.Tensor | None:
        return self.parameter.grad if self.direct else self._apart

    def _hold(self, gradient: torch.Tensor) -> None:
        if self.direct:
            self.parameter.grad = gradient
        else:
            self._apart = gradient


def usable_head(head: torch.nn.Module, hidden: torch.Tensor) -> bool:
    """Can `head_logprobs` stand in for this output layer: a plain float32 Linear without bias, on a CPU?"""
    return (
        type(head) is torch.nn.Linear and head.bias is None and is_plain(head) and usable(hidden, head.weight)
    )


def head_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, scale: float, rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of labels (S,) and entropies (S,) of softmax(scale * hidden @ weight^T).

    rows: of weight, that have a probability; None: all.
    """
    return _Head.apply(hidden, weight, labels, float(scale), len(weight) if rows is None else rows)


def usable(*tensors: torch.Tensor) -> bool:
    """Are they float32 on a CPU, with nothing cast?"""
    plain = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
    return plain and not torch.is_autocast_enabled("cpu")


def embed(embedding: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor | None:
    """What the model's embedding gives for these ids, or None where it must be asked itself."""
    if type(embedding) is not torch.nn.Embedding or not is_plain(embedding):
        return None
    if embedding.max_norm or embedding.sparse or embedding.scale_grad_by_freq:
        return None
    if embedding._backward_hooks or embedding._backward_pre_hooks:
        return None
    if not embedding.weight.requires_grad or not torch.is_grad_enabled():
        return None
    return (
        _Embedding.apply(embedding.weight, ids, embedding.padding_idx) if usable(embedding.weight) else None
    )
