"""From logits to tokens: transformers' order of warpers, seeds by row, log-probabilities as a by-product.

A row's draw is a function of (seed, row, step) and of its own distribution, so that it does not depend on which
other rows share the batch: a counter-based hash gives a uniform number, the inverse of the row's cumulative
distribution the token. It also costs a fraction of torch.multinomial (2 ms against 37 for 32 x 49,152 on 2 cores).
Longer than 300 lines because top-p needs no sorted vocabulary here, and keeps exactly what transformers keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo_kit._support.argument_checks import check_above_zero, check_temperature

# f(input_ids, scores, rows) -> scores; see RolloutEngine.generate.
Processor = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_BLOCK = 256
# SplitMix64's constants, as signed numbers: torch has no unsigned arithmetic.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR = 0x94D049BB133111EB - 2**64


class Sampled(NamedTuple):
    """One step: token long (R,); float32 (R,): log-probabilities under sampler and policy, the policy's entropy.

    If the numbers are not needed they are 0, or NaN where the logits are not finite.
    """

    token: torch.Tensor
    logprob: torch.Tensor
    policy_logprob: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True)
class Sampler:
    """How a token is chosen; a field at its default does nothing. numbers: are logprobs and entropies needed?"""

    seed: int
    greedy: bool = False
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    warpers: Sequence[Callable] = field(default=())
    processors: Sequence[Processor] = field(default=())
    numbers: bool = True
    _held: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_config(
        cls,
        config: GenerationConfig,
        seed: int,
        processors: Sequence[Processor] = (),
        *,
        numbers: bool = True,
        sort: bool = False,
    ) -> Sampler:
        """None in the config means off, whatever the checkpoint's own generation_config sets. sort: as in _TopP.

        Raises ValueError for a temperature or a penalty that is not above 0.
        """
        if config.temperature is not None:
            check_temperature(config.temperature)
        if config.repetition_penalty is not None:
            check_above_zero("repetition_penalty", config.repetition_penalty, hint="; 1.0 is no penalty")
        warpers = []
        if config.do_sample:
            if config.top_k:
                warpers.append(TopKLogitsWarper(config.top_k))
            if config.top_p is not None and config.top_p < 1:
                warpers.append(_TopP(config.top_p, sort=sort))
            if config.min_p:
                warpers.append(MinPLogitsWarper(config.min_p))
        return cls(
            seed=seed,
            greedy=not config.do_sample,
            temperature=float(config.temperature or 1.0),
            repetition_penalty=float(config.repetition_penalty or 1.0),
            warpers=tuple(warpers),
            processors=tuple(processors),
            numbers=numbers,
        )

    @property
    def changes_scores(self) -> bool:
        """Does the sampling distribution differ from softmax(logits / temperature)?"""
        changed = self.warpers or self.processors or self.repetition_penalty != 1
        return bool(changed or (self.greedy and self.temperature != 1))

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        step: int,
        input_ids: torch.Tensor,
        padding: torch.Tensor,
        chance: torch.Tensor | None = None,
    ) -> Sampled:
        """logits (R, V), in any layout; rows long (R,), their ids; input_ids long (R, T), left-padded by `padding`
        long (R,); read where changes_scores. chance: float64 (R,), `uniform` of these rows and step, if it is there."""
        if chance is None:
            chance = uniform(self.seed, rows, step)
        if logits.is_cuda:
            return self.in_few_passes(logits, rows, input_ids, padding, chance)
        logits = logits.float()
        changed = self.changes_scores
        # Before the scores, which a processor may write over the logits.
        needed = self.numbers or not (changed or self.greedy)
        policy = self._spread("policy", logits, self.temperature) if needed else None
        scores = self._scores(logits, rows, input_ids, padding) if changed else None
        if self.greedy and not self.numbers:
            token = (logits if scores is None else scores).argmax(dim=-1)
            nothing = logits.gather(1, token[:, None])[:, 0] * 0
            return Sampled(token, nothing, nothing, nothing)
        drawn_from = policy if scores is None else self._spread("sampler", scores, 1.0)
        below, weights, log_sum = drawn_from
        token = below.argmax(dim=-1) if self.greedy else draw(weights, chance)
        chosen = token[:, None]
        if not self.numbers:
            nothing = log_sum[:, 0] * 0
            return Sampled(token, nothing, nothing, nothing)
        logprob = (below.gather(1, chosen) - log_sum)[:, 0]
        below, weights, log_sum = policy
        policy_logprob = (below.gather(1, chosen) - log_sum)[:, 0]
        # H = log(sum of w) - sum of w log(w) / sum of w; `below` is not needed any more.
        entropy = log_sum[:, 0] - below.mul_(weights).sum(-1) / log_sum[:, 0].exp()
        return Sampled(token, logprob, policy_logprob, entropy)

    def in_few_passes(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        input_ids: torch.Tensor,
        padding: torch.Tensor,
        chance: torch.Tensor,
    ) -> Sampled:
        """The same for a card, where a pass over (R, V) costs what it reads and writes, and a softmax is one kernel."""
        changed, greedy = self.changes_scores, self.greedy
        needed = self.numbers or not (changed or greedy)
        policy, probs = (
            self._softmax(logits) if needed else (None, None)
        )  # before a processor writes over the logits
        if policy is not None and changed and not (greedy or self.processors or self.repetition_penalty != 1):
            scores = self._warped(policy, input_ids)
        else:
            scores = self._scores(logits.float(), rows, input_ids, padding) if changed else logits
        if greedy:
            token = scores.argmax(dim=-1)
            drawn_from = torch.softmax(scores, dim=-1) if changed and self.numbers else probs
        else:
            drawn_from = torch.softmax(scores, dim=-1) if changed else probs
            token = draw(drawn_from, chance)
        if not self.numbers:
            nothing = (logits if drawn_from is None else drawn_from).gather(1, token[:, None])[
                :, 0
            ].float() * 0
            return Sampled(token, nothing, nothing, nothing)
        # A token that was drawn, or is the likeliest, has a probability above 0. Under the policy it may round to 0.
        logprob = drawn_from.gather(1, token[:, None])[:, 0].log()
        policy_logprob = logprob
        if changed:
            best = policy.argmax(dim=-1, keepdim=True)
            above = policy.gather(1, token[:, None]) - policy.gather(1, best)
            policy_logprob = (above + probs.gather(1, best).log())[:, 0]
        return Sampled(token, logprob, policy_logprob, torch.special.entr(probs, out=probs).sum(-1))

    def _softmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 (R, V): logits / temperature, and its softmax."""
        if self.temperature == 1:
            cooled = logits.to(torch.float32, copy=bool(self.processors))
        else:  # a tensor of one number makes 16 bits float32 in the division itself, without rounding before it
            if "divisor" not in self._held:
                self._held["divisor"] = logits.new_full((1,), self.temperature, dtype=torch.float32)
            cooled = logits / self._held["divisor"]
        return cooled, torch.softmax(cooled, dim=-1)

    def chances(self, rows: torch.Tensor, steps: int) -> torch.Tensor:
        """float64 (R, steps): `uniform` of each row and step, which would be 40 kernels a token one by one."""
        return uniform(self.seed, rows[:, None], torch.arange(steps, device=rows.device))

    def too_few(self) -> bool:
        """Did top-p look at too few tokens since it was last asked? It then sorts from now on. Waits for the device."""
        return any([warp.too_few() for warp in self.warpers if isinstance(warp, _TopP)])

    def _spread(
        self, name: str, scores: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(scores - maximum) / temperature and its exponential, (R, V) in kept buffers; log of its sum, (R, 1)."""
        below, weights = (self._like(scores, f"{name} {what}") for what in ("below", "weights"))
        torch.sub(scores, scores.amax(-1, keepdim=True), out=below)
        if temperature != 1:
            below.div_(temperature)
        torch.exp(below, out=weights)
        return below, weights, weights.sum(-1, keepdim=True).log()

    def release(self) -> None:
        """Release the kept buffers."""
        self._held.clear()

    def _like(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """A kept buffer of x's shape and layout: a fresh one costs as much in page faults as what is computed in it."""
        size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        if name not in self._held or self._held[name].numel() < size:
            self._held[name] = x.new_empty(size)
        return self._held[name].as_strided(x.shape, x.stride())

    def _cooled(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.temperature == 1 else scores / self.temperature

    def _penalised(
        self, scores: torch.Tensor, input_ids: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        """transformers' penalty on earlier tokens; its own counts padding as tokens in versions before 5.23."""
        rows, tokens = scores.shape
        beside = torch.arange(input_ids.shape[1], device=input_ids.device) < padding[:, None]
        seen = torch.zeros(rows, tokens + 1, dtype=torch.bool, device=scores.device)
        seen = seen.scatter_(1, input_ids.masked_fill(beside, tokens), True)[:, :tokens]
        penalty = self.repetition_penalty
        return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)

    def _scores(
        self, scores: torch.Tensor, rows: torch.Tensor, input_ids: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        if self.repetition_penalty != 1:
            scores = self._penalised(scores, input_ids, padding)
        for processor in self.processors:
            scores = processor(input_ids, scores, rows)
            scores = scores.contiguous() if 0 in scores.stride() else scores  # it may be expanded
        return scores if self.greedy else self._warped(self._cooled(scores), input_ids)

    def _warped(self, scores: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        for warp in self.warpers:
            scores = warp(input_ids, scores)
        return scores


def uniform(seed: int, rows: torch.Tensor, step: int | torch.Tensor) -> torch.Tensor:
    """float64 (R,) in [0, 1), a function of (seed, row, step) alone. rows: long (R,), or any shapes that broadcast.

    SplitMix64's finaliser (Steele et al., 2014) over a chain of the three; torch's int64 wraps around as it needs.
    """
    state = _mix(torch.full_like(rows, seed % 2**64 - (seed % 2**64 >> 63 << 64)))  # as a signed number
    state = _mix(state ^ rows)
    state = _mix(state ^ step)
    return ((state >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x + _STEP
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _FIRST_FACTOR
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _SECOND_FACTOR
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def draw(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Inverse CDF: the first token whose cumulative probability exceeds u; never one of probability 0.

    probs: float (R, V), up to a factor a row; u: float64 (R,) in [0, 1). Returns long (R,).
    Sums over blocks first, then looks inside the chosen block only: the cumulative sum in float64 of a whole
    vocabulary would be the most expensive part of sampling.

    >>> draw(torch.tensor([[0.25, 0.0, 0.75]] * 2), torch.tensor([0.2, 0.25], dtype=torch.float64)).tolist()
    [0, 2]
    """
    vocabulary = probs.size(1)
    whole = vocabulary // _BLOCK * _BLOCK
    sums = probs[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)
    if whole < vocabulary:
        sums = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True)], dim=1)
    cumulative = sums.double().cumsum(-1)  # (R, blocks)
    target = (u * cumulative[:, -1])[:, None]
    block = _first_above(cumulative, target)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    tokens = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)  # (R, _BLOCK)
    inside = probs.gather(1, tokens.clamp(max=vocabulary - 1)).double() * (tokens < vocabulary)
    return tokens.gather(1, _first_above(inside.cumsum(-1), target - before))[:, 0]


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index (R, 1) of the first entry above target; past the end (rounding), of the last one that added anything."""
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum((cumulative <= target).sum(-1, keepdim=True), last)


# ---- top-p without sorting the vocabulary, keeping exactly the tokens of transformers' warper ------------------------

_CANDIDATES = (512, 8192)  # number of tokens to search for the cut, first and then
_CARD_CANDIDATES = 8192
_MARGIN = 2e-6  # a float32 cumulative sum over a vocabulary is right to a few 1e-7


class _TopP:
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
