"""Top-p without sorting the vocabulary, keeping exactly the tokens of transformers' warper."""

from __future__ import annotations

import torch
from transformers.generation.logits_process import TopPLogitsWarper

_CANDIDATES = (512, 8192)  # number of tokens to search for the cut, first and then
_MARGIN = 2e-6  # a float32 cumulative sum over a vocabulary is right to a few 1e-7


class TopP:
    """f(input_ids, scores (R, V)) -> scores, -inf but for the likeliest tokens that hold `top_p` of the mass.

    The cut is searched among each row's best tokens, in float64. Rows whose cut lies outside of them, between equal
    scores, or so close to a token's edge that rounding decides are left to transformers, which sorts everything.
    """

    def __init__(self, top_p: float) -> None:
        self.top_p = top_p
        self.sort = TopPLogitsWarper(top_p)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.is_cuda:  # sorting is fast there, and counting the remaining rows would stall
            return self.sort(input_ids, scores)
        out = scores.contiguous()
        waiting = torch.arange(len(out))
        for candidates in _CANDIDATES:
            if len(waiting) and 2 * candidates < out.size(1):
                least, sure = self._cut(out[waiting], candidates)
                rows = waiting[sure]
                out = out.index_copy(0, rows, out[rows].masked_fill_(out[rows] < least[sure], -torch.inf))
                waiting = waiting[~sure]
        if len(waiting):
            out = out.index_copy(0, waiting, self.sort(input_ids[waiting], out[waiting]))
        return out

    def _cut(self, scores: torch.Tensor, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest kept score, (R, 1), and for which rows it is certain, bool (R,)."""
        best = scores.topk(candidates + 1, dim=-1).values  # the best first
        first = best[:, :1]  # subtracted, since large scores have few digits left for their differences
        mass = (best - first).double().exp() / (scores - first).exp_().sum(-1, keepdim=True).double()
        above = mass.cumsum(-1) - mass  # mass above each candidate
        kept = (above < self.top_p).sum(-1, keepdim=True)  # (R, 1)
        last = kept.clamp(1, candidates) - 1
        least, next_ = best.gather(1, last), best.gather(1, last + 1)
        clear = ((above[:, 1:] - self.top_p).abs() > _MARGIN).all(dim=-1, keepdim=True)
        return least, (clear & (kept <= candidates) & (least > next_))[:, 0]
