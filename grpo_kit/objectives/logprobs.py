"""Log-probabilities of tokens and of completions, and means over them."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log pi(id) of each token: log softmax(logits / temperature) at the token's place.

    logits: (..., V), those that predicted the token: a causal model's logits[:, t - 1] belong to ids[:, t].
    ids: (...). Returns (...), in nats. temperature: that of the sampling; scoring at another one makes the ratio of
    policies, and so the gradient, wrong.
    Raises ValueError for a temperature that is not above 0, or ids that do not match the logits.

    >>> token_logprobs(torch.tensor([[0.0, 0.0], [0.0, 100.0]]), torch.tensor([0, 1])).exp().tolist()
    [0.5, 1.0]
    """
    # The words of check_temperature (argument_checks.py): the losses are read, and copied, with torch alone.
    if isinstance(temperature, (bool, str)) or not 0 < temperature < float("inf"):
        raise ValueError(
            f"temperature={temperature!r} must be a number above 0, such as 1.0; at 0 (greedy) all samples of a prompt "
            "are alike"
        )
    if logits.shape[:-1] != ids.shape:
        raise ValueError(
            f"ids has shape {tuple(ids.shape)}; logits {tuple(logits.shape)} need one id a position"
        )
    return torch.log_softmax(logits / temperature, dim=-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def sequence_logprobs(logprobs: Tensor, completion_mask: Tensor, *, average: bool = False) -> Tensor:
    """log pi(y) of each completion: the sum over its tokens, or with `average` the mean a token.

    logprobs, completion_mask: (R, T). Returns (R,), in nats (a token). The sum is the log-probability; the mean is
    that of the geometric mean of the tokens' probabilities, which ORPO and SimPO use.

    >>> sequence_logprobs(torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[1, 1, 0]]), average=True).item()
    -1.5
    """
    require_same_shape(logprobs=logprobs, completion_mask=completion_mask)
    mean_or_sum = masked_mean if average else masked_sum
    return mean_or_sum(logprobs, completion_mask, dim=1)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The sum of `values` where `mask` is not 0, over all or over `dim`. Values elsewhere, NaN too, are left out.

    >>> masked_sum(torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([[1, 1], [1, 0]]), dim=1).tolist()
    [4.0, 5.0]
    """
    require_same_shape(values=values, mask=mask)
    return values.masked_fill(mask == 0, 0.0).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean of `values` where `mask` is not 0, over all or over `dim`; 0 where the mask is empty.

    >>> masked_mean(torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([[1, 1], [1, 0]]), dim=1).tolist()
    [2.0, 5.0]
    """
    return masked_sum(values, mask, dim) / (mask != 0).sum(dim).clamp(min=1)


def require_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError unless all have the first one's shape: torch would stretch (R,) over (T,) without an error."""
    (first_name, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must have that of {first_name}, {tuple(first.shape)}"
            )
