"""Claims about rewards, and about learning where nearly all is wrong."""

from benchmarks.advice.plan.condition import Condition
from benchmarks.advice.plan.entry import Asked
from benchmarks.advice.plan.when import EXACT

_LOW = Condition(
    "the mean exact reward of the control's first 5 steps is below 5 %",
    "rare",
    "reward/exact_answer",
    5,
    "<",
    0.05,
)
_SUCCESS = "the success rate began at 3 % and was 28 % over the run; now it begins at 1.6 % (256 samples)"

REWARD = [
    Asked(
        "soft-rewards",
        "C4, E3",
        "Credit for the format beside the answer finds right answers sooner than the answer alone.",
        "soft",
        "binary",
        EXACT,
        priority=1,
        replaces="Soft rewards beat binary ones",
    ),
    Asked(
        "smooth-rewards",
        "E2, E3",
        "exp(-2 distance) of the number finds right answers sooner than right or wrong.",
        "smooth",
        "threshold",
        EXACT,
        priority=2,
    ),
    Asked(
        "rewards-of-at-least-0",
        "C5",
        "Rewards in [0, 1] find right answers sooner than the same rewards in [-1, 1].",
        "fast",
        "rewards -1 to 1",
        EXACT,
        priority=1,
        redone="the arms trained on other rows; now the rows are equal, and both are read by a reward of [0, 1]",
        replaces="Rewards of at least 0 train better than rewards around 0",
    ),
    Asked(
        "lax-rewards",
        "D5, C4",
        "Paid for the right number as its answer, the model is right more often than paid for a mention of it.",
        "paid for the answer",
        "paid for a mention",
        EXACT,
        priority=2,
    ),
    Asked(
        "high-reward-is-not-quality",
        "A9",
        "Paid for a mention, the model ends with reward that no right answer earns.",
        "paid for a mention",
        "paid for the answer",
        "reward_last - reward/exact_answer_last",
        "more",
        0.1,
        priority=2,
    ),
    Asked(
        "format-alone",
        "A3",
        "Paid for tests too, programs of held-out problems are right more often than paid for the format alone.",
        "code",
        "code, format only",
        "sampled_1.0",
        priority=4,
        redone="one seed and 64 tokens, which cut most programs off (notebook 08 as it was then); now five seeds and "
        "more, and 128",
    ),
    Asked(
        "positives-upweighted",
        "B10",
        "Advantages above 0 weighed 4 times find right answers sooner where nearly all is wrong.",
        "rare, positives x 4",
        "rare",
        EXACT,
        margin=0.03,
        priority=2,
        counts_if=_LOW,
        redone=_SUCCESS,
        replaces="Positives upweighted help at low success",
    ),
    Asked(
        "negatives-filtered",
        "B10",
        "Advantages below 0 left out find right answers sooner where nearly all is wrong.",
        "rare, positives only",
        "rare",
        EXACT,
        margin=0.03,
        priority=2,
        counts_if=_LOW,
        redone=_SUCCESS,
        replaces="Negatives filtered help at low success",
    ),
    Asked(
        "resampled",
        "B10",
        "Groups without a signal sampled anew, up to 3 times, find right answers sooner a step (at up to 4 x the "
        "rollouts).",
        "rare, resampled",
        "rare",
        EXACT,
        margin=0.03,
        priority=3,
        counts_if=_LOW,
        redone=_SUCCESS,
        replaces="Groups without a signal resampled help at low success",
    ),
]
