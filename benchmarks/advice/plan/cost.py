"""What a run of the plan takes, in seconds of one core: scaled from one measured setting.

Measured: 30 steps of `largest`, 4 prompts x 8 completions, took 196 s on one core of an AMD EPYC (AVX2, 2026-11-24, the
other core busy), the evaluation of 256 held-out rows 40 s. All else is scaled and so an estimate, to be trusted within
a factor of about two: a step by the tokens that are computed in it, an evaluation by rows and tokens.
"""

from __future__ import annotations

from grpo_kit.more.lab._arm import Arm

MEASURED = (
    "30 steps of largest, 4 x 8: 196 s; an evaluation of 256 rows: 40 s; one AVX2 core, the rest is scaled "
    "(on AVX-512 cores a third of it)"
)
STEP, ROW = 196 / 30, 40 / 256  # seconds
_FIXED = 0.2  # of a step: what does not grow with its tokens
# tokens of largest: example and system text, a question, an answer
_SHARED, _QUESTION, _ANSWER = 59, 25, 6
_TOKENS = _SHARED + 4 * _QUESTION + 32 * _ANSWER  # of the measured step, each computed once
# Factors from the first table's runs: 161 s for 115 with a reference model, 217 for 90 with three rounds.
_REFERENCE, _ROUND = 1.4, 0.47
# of a rollout and its update, a further update: 89 s for 115 with every second one
_REUSED = 0.54
_COLD_START = 8  # steps that its seconds were worth, at most


def seconds(arm: Arm) -> float:
    """Of one run: training, evaluations, and what comes before training."""
    config, answer = arm.config, tokens_of_an_answer(arm)
    tokens = (
        _SHARED + config.prompts_per_step * _QUESTION + config.completions_per_step * answer
    )
    step = STEP * (_FIXED + (1 - _FIXED) * tokens / _TOKENS)
    step *= _REFERENCE if config.beta else 1.0
    step *= 1 + _ROUND * config.dynamic_sampling
    step *= 1 + (config.iterations - 1) * _REUSED
    steps = config.steps + (_COLD_START if arm.prepare else 0)
    row = ROW * (0.5 + 0.5 * answer / _ANSWER)
    sampled = min(64, len(arm.task.held_out)) * arm.eval_samples * len(arm.eval_temperatures)
    return steps * step + row * (len(arm.task.held_out) + sampled)


def tokens_of_an_answer(arm: Arm) -> float:
    """How many are expected: answers end early behind a prefill, programs hardly."""
    most = arm.task.max_completion_tokens
    if arm.task.name == "code":
        return 0.85 * most
    # Measured without the prefill: 11.5 of 16. With room for 256 some go on for long.
    return _ANSWER if arm.task.prefill else min(0.7 * most, 30)
