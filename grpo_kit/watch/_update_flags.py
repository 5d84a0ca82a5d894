"""Red flags of the updates: what is not finite, what moves nothing, what jumps, what drifts. The list: _flags.py."""

import numpy as np
import pandas as pd

from grpo_kit.watch._red_flag import (
    WINDOW,
    Sign,
    Steps,
    first_mean,
    red_flag,
    trailing,
    usual_before,
)

FAR = 0.5  # nats a token from the reference; healthy runs with a beta stay below 0.25
NO_GRADIENT = 1e-8
NO_RATE = 1e-12
LOSS = 0.5  # of advantages near 1 a loss is 0.1 or so, of either sign
NOISE = 4.0  # nats a token: as if a token were drawn from 55 alike
HALF_UNIFORM = 1.5  # nats: what an entropy that has doubled must reach
CLIPPED = 0.1  # of old rollouts' tokens
MOSTLY_CLIPPED = 0.3  # of a rollout's tokens where the log does not say how old it is


@red_flag(
    "not finite",
    why="The weights are not moved, or are lost: after a NaN in them every later step is one.",
    first="an earlier checkpoint and a lower learning rate; float32 or bfloat16 in place of float16",
)
def _not_finite(steps: Steps) -> Sign:
    """A step's loss or gradient norm is NaN or infinite.

    A column that was never recorded reads as NaN too. So a NaN counts in rows that trained: a loss after a finite one
    or beside such a gradient; a gradient after a finite one, but for fp16, which skips a step now and then. Five
    gradients in a row count in any case.
    """
    loss = steps["loss"]
    norm = steps["grad_norm"]
    trained = np.isfinite(
        steps["learning_rate" if "learning_rate" in steps.table else "reward"]
    )
    bad_loss = trained & ~np.isfinite(loss)
    bad_norm = trained & ~np.isfinite(norm)
    loss_was_finite = np.logical_or.accumulate(np.isfinite(loss))
    norm_was_finite = np.logical_or.accumulate(np.isfinite(norm))
    counts = np.isinf(loss) | bad_loss & loss_was_finite
    if "loss" in steps.table:
        counts |= bad_loss & bad_norm
    if not steps.setup.skips:
        counts |= bad_norm & norm_was_finite
    if "grad_norm" in steps.table:
        counts |= trailing(bad_norm, WINDOW) == 1
    return (
        counts,
        lambda row: f"loss {loss[row]:.3g} and gradient norm {norm[row]:.3g}",
    )


@red_flag(
    "no update",
    lasted=WINDOW,
    why="The weights stay as they are, whatever the rewards say.",
    first="the learning rate and its schedule; which weights need a gradient; whether the loss reaches them",
)
def _no_update(steps: Steps) -> Sign:
    """Over 5 steps: a learning rate of 0, or no gradient although rewards differ within groups.

    Where they do not differ there is none to be had: other flags say so, unless the task is solved.
    """
    norm = steps["grad_norm"]
    rate = steps["learning_rate"]
    # A rollout's later passes have its share of equal groups.
    equal = pd.Series(steps["groups/equal_rewards"]).ffill().to_numpy()
    no_signal = trailing(equal, WINDOW) == 1
    no_gradient = (trailing(np.abs(norm) <= NO_GRADIENT, WINDOW) == 1) & ~no_signal
    no_rate = trailing(np.abs(rate) <= NO_RATE, WINDOW) == 1

    def evidence(row: int) -> str:
        if no_rate[row]:
            return f"learning rate {rate[row]:.2g} in {WINDOW} steps"
        return f"gradient norm {norm[row]:.2g} in {WINDOW} steps"

    return no_gradient | no_rate, evidence


@red_flag(
    "KL spike",
    before=4,
    why="The policy left the reference in a few updates, and seldom comes back.",
    first="a learning rate 3 to 10 times lower, with warmup; then a higher beta",
)
def _kl_spike(steps: Steps) -> Sign:
    """A step's KL above 0.5 nats a token and 5 times the usual, the median of up to 8 steps before it."""
    kl = steps["kl"]
    usual = usual_before(kl)
    return (
        kl > np.maximum(5 * usual, FAR),
        lambda row: f"KL {kl[row]:.2g} where {usual[row]:.2g} was usual",
    )


@red_flag(
    "KL drift",
    lasted=WINDOW,
    why="The policy leaves the reference without a jump, and what the reference could do goes with it.",
    first="see whether held-out accuracy still rises; then a lower learning rate or a higher beta",
)
def _kl_drift(steps: Steps) -> Sign:
    """Over 5 steps: a KL above 0.5 nats a token in each, that no KL spike has led to."""
    kl = steps["kl"]
    is_far = kl > FAR
    jumps = is_far & (kl > 5 * usual_before(kl))
    last_jump = _last_row(jumps)
    last_near = _last_row(~is_far)
    lowest = pd.Series(kl).rolling(WINDOW).min().to_numpy()
    start = first_mean(kl)
    return (
        (lowest > FAR) & (last_jump <= last_near),
        lambda row: f"KL {lowest[row]:.2g} and more in {WINDOW} steps, {start:.2g} at first",
    )


def _last_row(happens: np.ndarray) -> np.ndarray:
    """The last row so far in which it happens, at each row; -1 before the first."""
    rows = np.arange(len(happens))
    return np.maximum.accumulate(np.where(happens, rows, -1))


@red_flag(
    "gradient spike",
    before=4,
    why="Clipping bounds the step but not its direction: one odd batch decides it.",
    first="warmup and a lower learning rate; look at that step's completions and rewards",
)
def _gradient_spike(steps: Steps) -> Sign:
    """A step's gradient norm, before clipping, 5 times the usual; steps without a gradient do not count as usual."""
    norm = steps["grad_norm"]
    norm = np.where(np.isinf(norm), np.nan, norm)
    usual = usual_before(np.where(norm > 0, norm, np.nan))  # groups without a signal have none
    return (
        norm > 5 * usual,
        lambda row: f"gradient norm {norm[row]:.3g} where {usual[row]:.3g} was usual",
    )


@red_flag(
    "loss spike",
    before=4,
    why="A few tokens with a huge ratio or KL decide this update.",
    first="that step's completions, advantages and KL; a lower learning rate, fewer passes over a rollout",
)
def _loss_spike(steps: Steps) -> Sign:
    """A step's loss, of either sign, above 0.5 and 3 times the largest of up to 8 steps before it."""
    loss = steps["loss"]
    size = np.abs(np.where(np.isinf(loss), np.nan, loss))
    largest = pd.Series(size).shift(1).rolling(8, min_periods=4).max().to_numpy()
    return (
        size > np.maximum(3 * largest, LOSS),
        lambda row: f"loss {loss[row]:.3g} where at most {largest[row]:.3g} was usual",
    )


@red_flag(
    "entropy explosion",
    lasted=WINDOW,
    why="The policy samples nearly at random: what it learnt is being lost, as in a collapse.",
    first="an earlier checkpoint and a lower learning rate; a lower temperature or epsilon_high",
)
def _entropy_explosion(steps: Steps) -> Sign:
    """Over 5 steps: twice the entropy of the first steps and above 1.5 nats a token, or above 4 in any case."""
    entropy = steps["entropy"]
    lowest = pd.Series(entropy).rolling(WINDOW).min().to_numpy()
    start = first_mean(entropy)
    return (
        lowest > np.clip(2 * start, HALF_UNIFORM, NOISE),
        lambda row: f"entropy {entropy[row]:.2f} nats a token where {start:.2f} was usual",
    )


@red_flag(
    "sampler gap",
    lasted=3,
    why="The gradient is of another policy than the one that wrote the completions.",
    first="the kit's engine; else look at dtype, dropout, adapters and the sampler's temperature and top-k",
)
def _sampler_gap(steps: Steps) -> Sign:
    """Over 3 steps: 0.05 nats a token between sampler and trainer on fresh rollouts; bfloat16 rounds by about 0.01."""
    # older weights and hints give other probabilities without any error
    is_other = (steps["rollout/age"] > 0) | np.isfinite(steps["hint/tokens"])
    fresh_gap = np.where(is_other, np.nan, steps["rollout/logprob_gap"])
    gap = trailing(fresh_gap, 3)
    return gap > 0.05, lambda row: f"sampler and trainer differ by {gap[row]:.2g} nats a token"


@red_flag(
    "stale rollouts",
    lasted=WINDOW,
    why="A clipped token has no gradient, and one that is not weighted has another policy's: little of it is learnt.",
    first="fewer passes over a rollout (iterations, minibatches, sync_every), or a lower learning rate",
)
def _stale_rollouts(steps: Steps) -> Sign:
    """Over 5 steps: a tenth of the tokens clipped, or 0.1 nats a token from the policy, on rollouts that are not fresh.

    With importance weights that gap is recorded as 0, and clipping shows it; without them nothing is clipped. Where
    the age is not known, or 0, so that nothing should be clipped at all: three tenths of the tokens.
    """
    age = pd.Series(steps["rollout/age"]).fillna(steps.setup.age).to_numpy()
    clipped = steps.mean("clip_ratio")
    gap = steps.mean("rollout/logprob_gap")
    is_far = (clipped > CLIPPED) | (gap > 0.1)

    def evidence(row: int) -> str:
        distance = f"{gap[row]:.2g} nats a token away"
        if clipped[row] > CLIPPED:
            distance = f"{clipped[row]:.0%} of their tokens are clipped"
        if age[row] > 0:
            return f"rollouts up to {age[row]:.0f} steps old, and {distance}"
        return f"rollouts of which {distance}"

    return (age > 0) & is_far | (clipped > MOSTLY_CLIPPED), evidence


OF_UPDATES = (
    _not_finite, _no_update, _kl_spike, _kl_drift, _gradient_spike, _loss_spike, _entropy_explosion, _sampler_gap,
    _stale_rollouts,
)  # fmt: skip
"""On the rows of all steps."""
