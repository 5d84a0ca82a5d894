"""Red flags of the updates: what is not finite, what moves nothing, what jumps, what drifts. The list: _flags.py."""

from __future__ import annotations

import numpy as np
import pandas as pd

from grpo_kit.watch._red_flag import (
    WINDOW,
    Setup,
    Sign,
    column,
    first_mean,
    over_window,
    red_flag,
    trailing,
    usual_before,
)

FAR = 0.5  # nats a token from the reference; healthy runs with a beta stay below 0.25
NO_GRADIENT, NO_RATE = 1e-8, 1e-12
LOSS = 0.5  # of advantages near 1 a loss is 0.1 or so, of either sign
NOISE = 4.0  # nats a token: as if a token were drawn from 55 alike
HALF_UNIFORM = 1.5  # nats: what an entropy that has doubled must reach
CLIPPED, MOSTLY_CLIPPED = 0.1, 0.3  # of old rollouts' tokens; where the log does not say how old they are


@red_flag(
    "not finite",
    why="The weights are not moved, or are lost: after a NaN in them every later step is one.",
    first="an earlier checkpoint and a lower learning rate; float32 or bfloat16 in place of float16",
)
def _not_finite(table: pd.DataFrame, setup: Setup) -> Sign:
    """A step's loss or gradient norm is NaN or infinite.

    A column that was never recorded reads as NaN too. So a NaN counts in rows that trained: a loss after a finite one
    or beside such a gradient; a gradient after a finite one, but for fp16, which skips a step now and then. Five
    gradients in a row count in any case.
    """
    loss, norm = column(table, "loss"), column(table, "grad_norm")
    trained = np.isfinite(column(table, "learning_rate" if "learning_rate" in table else "reward"))
    bad_loss, bad_norm = ~np.isfinite(loss) & trained, ~np.isfinite(norm) & trained
    loss_is_recorded = np.logical_or.accumulate(np.isfinite(loss)) | bad_norm & ("loss" in table)
    norm_is_recorded = np.logical_or.accumulate(np.isfinite(norm)) & (not setup.skips)
    lasted = (trailing(bad_norm, WINDOW) == 1) & ("grad_norm" in table)
    return (
        np.isinf(loss) | bad_loss & loss_is_recorded | bad_norm & norm_is_recorded | lasted,
        lambda at: f"loss {loss[at]:.3g} and gradient norm {norm[at]:.3g}",
    )


@red_flag(
    "no update",
    lasted=WINDOW,
    why="The weights stay as they are, whatever the rewards say.",
    first="the learning rate and its schedule; which weights need a gradient; whether the loss reaches them",
)
def _no_update(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 5 steps: a learning rate of 0, or no gradient although rewards differ within groups.

    Where they do not differ there is none to be had: other flags say so, unless the task is solved.
    """
    norm, rate = column(table, "grad_norm"), column(table, "learning_rate")
    equal = (
        pd.Series(column(table, "groups/equal_rewards")).ffill().to_numpy()
    )  # also of a rollout's later passes
    no_gradient = (trailing(np.abs(norm) <= NO_GRADIENT, WINDOW) == 1) & ~(trailing(equal, WINDOW) == 1)
    no_rate = trailing(np.abs(rate) <= NO_RATE, WINDOW) == 1

    def saw(at: int) -> str:
        what = f"learning rate {rate[at]:.2g}" if no_rate[at] else f"gradient norm {norm[at]:.2g}"
        return f"{what} in {WINDOW} steps"

    return no_gradient | no_rate, saw


@red_flag(
    "KL spike",
    why="The policy left the reference in a few updates, and seldom comes back.",
    first="a learning rate 3 to 10 times lower, with warmup; then a higher beta",
)
def _kl_spike(table: pd.DataFrame, setup: Setup) -> Sign:
    """A step's KL above 0.5 nats a token and 5 times the usual, the median of up to 8 steps before it."""
    kl = column(table, "kl")
    usual = usual_before(kl)
    return _jumps(kl), lambda at: f"KL {kl[at]:.2g} where {usual[at]:.2g} was usual"


def _jumps(kl: np.ndarray) -> np.ndarray:
    return kl > np.maximum(5 * usual_before(kl), FAR)


@red_flag(
    "KL drift",
    lasted=WINDOW,
    why="The policy leaves the reference without a jump, and what the reference could do goes with it.",
    first="see whether held-out accuracy still rises; then a lower learning rate or a higher beta",
)
def _kl_drift(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 5 steps: a KL above 0.5 nats a token in each, that no KL spike has led to."""
    kl, row = column(table, "kl"), np.arange(len(table))
    least, start = pd.Series(kl).rolling(WINDOW).min().to_numpy(), first_mean(kl)
    last_jump, last_near = (np.maximum.accumulate(np.where(at, row, -1)) for at in (_jumps(kl), ~(kl > FAR)))
    return (
        (least > FAR) & (last_jump <= last_near),
        lambda at: f"KL {least[at]:.2g} and more in {WINDOW} steps, {start:.2g} at first",
    )


@red_flag(
    "gradient spike",
    why="Clipping bounds the step but not its direction: one odd batch decides it.",
    first="warmup and a lower learning rate; look at that step's completions and rewards",
)
def _gradient_spike(table: pd.DataFrame, setup: Setup) -> Sign:
    """A step's gradient norm, before clipping, 5 times the usual; steps without a gradient do not count as usual."""
    norm = column(table, "grad_norm")
    norm = np.where(np.isinf(norm), np.nan, norm)
    usual = usual_before(np.where(norm > 0, norm, np.nan))  # groups without a signal have none
    return norm > 5 * usual, lambda at: f"gradient norm {norm[at]:.3g} where {usual[at]:.3g} was usual"


@red_flag(
    "loss spike",
    why="A few tokens with a huge ratio or KL decide this update.",
    first="that step's completions, advantages and KL; a lower learning rate, fewer passes over a rollout",
)
def _loss_spike(table: pd.DataFrame, setup: Setup) -> Sign:
    """A step's loss, of either sign, above 0.5 and 3 times the largest of up to 8 steps before it."""
    loss = column(table, "loss")
    size = np.abs(np.where(np.isinf(loss), np.nan, loss))
    largest = pd.Series(size).shift(1).rolling(8, min_periods=4).max().to_numpy()
    return (
        size > np.maximum(3 * largest, LOSS),
        lambda at: f"loss {loss[at]:.3g} where at most {largest[at]:.3g} was usual",
    )


@red_flag(
    "entropy explosion",
    lasted=WINDOW,
    why="The policy samples nearly at random: what it learnt is being lost, as in a collapse.",
    first="an earlier checkpoint and a lower learning rate; a lower temperature or epsilon_high",
)
def _entropy_explosion(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 5 steps: twice the entropy of the first steps and above 1.5 nats a token, or above 4 in any case."""
    entropy = column(table, "entropy")
    least, start = pd.Series(entropy).rolling(WINDOW).min().to_numpy(), first_mean(entropy)
    return (
        least > np.clip(2 * start, HALF_UNIFORM, NOISE),
        lambda at: f"entropy {entropy[at]:.2f} nats a token where {start:.2f} was usual",
    )


@red_flag(
    "sampler gap",
    lasted=3,
    why="The gradient is of another policy than the one that wrote the completions.",
    first="the kit's engine; else look at dtype, dropout, adapters and the sampler's temperature and top-k",
)
def _sampler_gap(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 3 steps: 0.05 nats a token between sampler and trainer on fresh rollouts; bfloat16 rounds by about 0.01."""
    fresh = ~(column(table, "rollout/age") > 0)  # older weights give other probabilities without any error
    gap = trailing(np.where(fresh, column(table, "rollout/logprob_gap"), np.nan), 3)
    return gap > 0.05, lambda at: f"sampler and trainer differ by {gap[at]:.2g} nats a token"


@red_flag(
    "stale rollouts",
    lasted=WINDOW,
    why="A clipped token has no gradient, and one that is not weighted has another policy's: little of it is learnt.",
    first="fewer passes over a rollout (iterations, minibatches, sync_every), or a lower learning rate",
)
def _stale_rollouts(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 5 steps: a tenth of the tokens clipped, or 0.1 nats a token from the policy, on rollouts that are not fresh.

    With importance weights that gap is recorded as 0, and clipping shows it; without them nothing is clipped. Where
    the age is not known, or 0, so that nothing should be clipped at all: three tenths of the tokens.
    """
    age = pd.Series(column(table, "rollout/age")).fillna(setup.age).to_numpy()
    cut, gap = over_window(table, "clip_ratio"), over_window(table, "rollout/logprob_gap")

    def saw(at: int) -> str:
        gone = f"{cut[at]:.0%} of their tokens are clipped"
        how = gone if cut[at] > CLIPPED else f"{gap[at]:.2g} nats a token away"
        return (
            f"rollouts up to {age[at]:.0f} steps old, and {how}"
            if age[at] > 0
            else f"rollouts of which {how}"
        )

    return (age > 0) & ((cut > CLIPPED) | (gap > 0.1)) | (cut > MOSTLY_CLIPPED), saw


OF_UPDATES = (
    _not_finite, _no_update, _kl_spike, _kl_drift, _gradient_spike, _loss_spike, _entropy_explosion, _sampler_gap,
    _stale_rollouts,
)  # fmt: skip
"""On the rows of all steps."""
