"""From logits to tokens: transformers' order of warpers, seeds by row, log-probabilities as a by-product.

A row's draw is a function of (seed, row, step) and of its own distribution, so that it does not depend on which
other rows share the batch: a counter-based hash gives a uniform number, the inverse of the row's cumulative
distribution the token. It also costs a fraction of torch.multinomial (2 ms against 37 for 32 x 49,152 on 2 cores).
Longer than 300 lines because top-p needs no sorted vocabulary here, and a draw no generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
)

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
    _buffers: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

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
            check_above_zero(
                "repetition_penalty", config.repetition_penalty, hint="; 1.0 is no penalty"
            )
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
        changes = self.warpers or self.processors or self.repetition_penalty != 1
        return bool(changes or (self.greedy and self.temperature != 1))

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        input_ids: torch.Tensor | None,
        padding: torch.Tensor | None,
        chance: torch.Tensor,
    ) -> Sampled:
        """logits (R, V), in any layout; rows long (R,), their ids; chance float64 (R,), `uniform` of rows and step.

        input_ids long (R, T), left-padded by `padding` long (R,), are read where changes_scores. Written for few passes
        over (R, V): each costs what it reads and writes, and a softmax is one kernel.
        """
        changes_scores, greedy = self.changes_scores, self.greedy
        policy = policy_probs = None
        if self.numbers or not (changes_scores or greedy):
            # before a processor writes over the logits
            policy, policy_probs = self._softmax(logits)
        only_warped = not (greedy or self.processors or self.repetition_penalty != 1)
        if not changes_scores:
            scores = logits
        elif only_warped and policy is not None:
            scores = self._warped(policy, input_ids)
        else:
            scores = self._scores(logits.float(), rows, input_ids, padding)
        probs = policy_probs
        if changes_scores and (self.numbers or not greedy):
            probs = _softmax(scores, out=self._room("sampler", scores))
        token = scores.argmax(dim=-1) if greedy else draw(probs, chance)
        if not self.numbers:
            return _token_alone(token, logits if probs is None else probs)
        # A token that was drawn, or is the likeliest, has a probability above 0. Under the policy it may round to 0.
        chosen = token[:, None]
        logprob = policy_logprob = probs.gather(1, chosen)[:, 0].log()
        if changes_scores:
            best = policy.argmax(dim=-1, keepdim=True)
            difference = policy.gather(1, chosen) - policy.gather(1, best)
            policy_logprob = (difference + policy_probs.gather(1, best).log())[:, 0]
        if logits.is_cuda:
            entropy = torch.special.entr(policy_probs, out=policy_probs).sum(-1)
        else:  # a CPU, whose logarithms are slow
            normaliser = policy.gather(1, chosen)[:, 0] - policy_logprob
            entropy = normaliser - torch.linalg.vecdot(policy_probs, policy)
        return Sampled(token, logprob, policy_logprob, entropy)

    def _softmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 (R, V): logits / temperature, and its softmax."""
        if self.temperature == 1:
            scaled = logits.to(torch.float32, copy=bool(self.processors))
        else:
            # a tensor of one number makes 16 bits float32 in the division itself, without rounding before it
            if "divisor" not in self._buffers:
                self._buffers["divisor"] = logits.new_full(
                    (1,), self.temperature, dtype=torch.float32
                )
            scaled = torch.div(
                logits, self._buffers["divisor"], out=self._room("scaled", logits)
            )
        return scaled, _softmax(scaled, out=self._room("policy", scaled))

    def _room(self, name: str, x: torch.Tensor) -> torch.Tensor | None:
        """On a CPU a kept float32 buffer of x's shape: page faults of a fresh one cost more than what is computed."""
        if x.is_cuda:
            return None
        if name not in self._buffers or self._buffers[name].numel() < x.numel():
            self._buffers[name] = x.new_empty(x.numel(), dtype=torch.float32)
        return self._buffers[name][: x.numel()].view(x.shape)

    def too_few(self) -> bool:
        """Did top-p look at too few tokens since it was last asked? It then sorts from now on. Waits for the device."""
        top_p = [warper for warper in self.warpers if isinstance(warper, _TopP)]
        return any([warper.too_few() for warper in top_p])

    def _penalised(
        self, scores: torch.Tensor, input_ids: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        """transformers' penalty on earlier tokens; its own counts padding as tokens in versions before 5.23."""
        rows, tokens = scores.shape
        is_padding = (
            torch.arange(input_ids.shape[1], device=input_ids.device) < padding[:, None]
        )
        present = torch.zeros(rows, tokens + 1, dtype=torch.bool, device=scores.device)
        present = present.scatter_(1, input_ids.masked_fill(is_padding, tokens), True)[
            :, :tokens
        ]
        penalty = self.repetition_penalty
        penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
        return torch.where(present, penalised, scores)

    def _scores(
        self,
        scores: torch.Tensor,
        rows: torch.Tensor,
        input_ids: torch.Tensor,
        padding: torch.Tensor,
    ) -> torch.Tensor:
        if self.repetition_penalty != 1:
            scores = self._penalised(scores, input_ids, padding)
        for processor in self.processors:
            scores = processor(input_ids, scores, rows)
            scores = scores.float()
            if 0 in scores.stride():  # expanded
                scores = scores.contiguous()
        if self.greedy:
            return scores
        if self.temperature != 1:
            scores = scores / self.temperature
        return self._warped(scores, input_ids)

    def _warped(self, scores: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        return scores


def _softmax(scores: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Over the vocabulary. On a CPU torch's sums to 1 + 1e-5 at 152,000 tokens; here to 1."""
    probs = torch.softmax(scores, dim=-1, out=out)
    return probs if probs.is_cuda else probs.div_(probs.sum(-1, keepdim=True))


def _token_alone(token: torch.Tensor, scores: torch.Tensor) -> Sampled:
    """Without the numbers: 0 for each, or NaN where the scores (R, V) are not finite."""
    zeros = scores.gather(1, token[:, None])[:, 0].float() * 0
    return Sampled(token, zeros, zeros, zeros)


def uniform(seed: int, rows: torch.Tensor, step: int | torch.Tensor) -> torch.Tensor:
    """float64 (R,) in [0, 1), a function of (seed, row, step) alone. rows: long (R,), or any shapes that broadcast.

    SplitMix64's finaliser (Steele et al., 2014) over a chain of the three; torch's int64 wraps around as it needs.
    """
    seed %= 2**64
    if seed >= 2**63:
        seed -= 2**64  # as a signed number
    state = _mix(torch.full_like(rows, seed))
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
    in_blocks = vocabulary // _BLOCK * _BLOCK
    sums = probs[:, :in_blocks].unflatten(1, (-1, _BLOCK)).sum(-1)
    if in_blocks < vocabulary:
        sums = torch.cat([sums, probs[:, in_blocks:].sum(-1, keepdim=True)], dim=1)
    cumulative = sums.double().cumsum(-1)  # (R, blocks)
    target = (u * cumulative[:, -1])[:, None]
    block = _first_above(cumulative, target)
    blocks_before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    tokens = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)  # (R, _BLOCK)
    block_probs = probs.gather(1, tokens.clamp(max=vocabulary - 1)).double() * (
        tokens < vocabulary
    )
    place = _first_above(block_probs.cumsum(-1), target - blocks_before)
    return tokens.gather(1, place)[:, 0]


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index (R, 1) of the first entry above target; past the end (rounding), of the last one that added anything."""
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum((cumulative <= target).sum(-1, keepdim=True), last)


# ---- top-p without sorting the vocabulary ----------------------------------------------------------------------------

_CANDIDATES = (512, 8192, 2**31)  # number of tokens to search for the cut


class _TopP:
    """f(input_ids, scores (R, V)) -> scores, -inf but for the likeliest tokens that hold `top_p` of the mass.

    The cut is searched among each row's best tokens, in float64, which decides at a token's edge; of equal
    probabilities at the cut all stay. On a CPU more tokens are looked at for rows whose cut lies outside of them. On a
    card nobody waits to know that: too_few() says so once the completions are read, and they are made again by sorting.
    sort: on a card, by sorting from the beginning.
    """

    def __init__(self, top_p: float, *, sort: bool = False) -> None:
        self.top_p = top_p
        self._candidates = _CANDIDATES[2 if sort else 1]
        self._cut_outside: torch.Tensor | bool = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.is_cuda:
            return self.without_waiting(scores)
        rows, warped = torch.arange(len(scores)), torch.empty_like(scores)
        for candidates in _CANDIDATES:
            if len(rows):
                warped[rows], is_outside = self._warp(scores[rows], candidates)
                rows = rows[is_outside]
        return warped

    def without_waiting(self, scores: torch.Tensor) -> torch.Tensor:
        """The same, and a note on the device where the candidates hold less than top_p."""
        warped, is_outside = self._warp(scores, self._candidates)
        self._cut_outside = is_outside.any() | self._cut_outside
        return warped

    def _warp(self, scores: torch.Tensor, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores with the cut among so many, and in which rows it lies outside of them, bool (R,)."""
        probs, vocabulary = _softmax(scores), scores.size(1)
        best = probs.topk(min(candidates, vocabulary), dim=-1).values
        mass = best.double().cumsum(-1)
        count = (mass - best < self.top_p).sum(-1, keepdim=True).clamp_(min=1)
        warped = torch.where(probs < best.gather(1, count - 1), -torch.inf, scores)
        return warped, (mass[:, -1] < self.top_p) & (candidates < vocabulary)

    def too_few(self) -> bool:
        """Did a cut lie outside of the candidates? From then on all tokens are candidates. Waits for the device."""
        if not self._cut_outside:
            return False
        self._candidates, self._cut_outside = _CANDIDATES[2], False
        return True
