"""Top-p without sorting the vocabulary, keeping exactly the tokens of transformers' warper."""

from __future__ import annotations

import torch
from transformers.generation.logits_process import TopPLogitsWarper

_CANDIDATES = (512, 8192)  # number of tokens to search for the cut, first and then
_CARD_CANDIDATES = 8192
_MARGIN = 2e-6  # a float32 cumulative sum over a vocabulary is right to a few 1e-7


class TopP:
    """f(input_ids, scores (R, V)) -> scores, -inf but for the likeliest tokens that hold `top_p` of the mass.

    The cut is searched among each row's best tokens, in float64. On a CPU, rows whose cut lies outside of them, between
    equal scores, or so close to a token's edge that rounding decides are left to transformers, which sorts everything.
    On a card nobody waits to count such rows: of equal probabilities at the cut all stay, float64 decides at edges, and
    where a cut lay outside, too_few() says so once the completions are read, and they are made again by sorting.
    sort: on a card, by sorting from the beginning.
    """

    def __init__(self, top_p: float, *, sort: bool = False) -> None:
        self.top_p = top_p
        self.sort = TopPLogitsWarper(top_p)
        self._candidates = None if sort else _CARD_CANDIDATES  # None: all
        self._outside: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.is_cuda:
            return self.without_waiting(scores)
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

    def without_waiting(self, scores: torch.Tensor) -> torch.Tensor:
        """The same, and a note on the device where the candidates hold less than top_p."""
        probs = torch.softmax(scores, dim=-1)
        best = probs.topk(min(self._candidates or scores.size(1), scores.size(1)), dim=-1).values
        mass = best.double().cumsum(-1)
        kept = (mass - best < self.top_p).sum(-1, keepdim=True).clamp_(min=1)
        if best.size(1) < scores.size(1):
            outside = (mass[:, -1] < self.top_p).any()
            self._outside = outside if self._outside is None else self._outside | outside
        return torch.where(probs < best.gather(1, kept - 1), -torch.inf, scores)

    def too_few(self) -> bool:
        """Did a cut lie outside of the candidates? From then on all tokens are candidates. Waits for the device."""
        if self._outside is None or not bool(self._outside):
            return False
        self._candidates = self._outside = None
        return True

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
