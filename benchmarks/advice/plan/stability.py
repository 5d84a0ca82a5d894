"""Claims about the objective, optimizers, and what keeps a run steady."""

from benchmarks.advice.plan.condition import Condition
from benchmarks.advice.plan.entry import Asked
from benchmarks.advice.plan.when import EXACT

_ONE_CHANGE = (
    "loss_type changed too, and of six tokens a sequence's ratio is nearly a token's; now one change, and programs of "
    "up to 128 tokens; runs with the clip of tokens, hundreds of times too wide for a sequence's ratio, were taken back"
)

STABILITY = [
    Asked(
        "full-or-lora",
        "C12",
        "Full fine-tuning ends higher than LoRA, each at the best of its three rates, after as many steps.",
        "full, best",
        "LoRA, best",
        "accuracy",
        priority=1,
        tuned=(
            ("full, 5e-06", "full, 1e-05", "full, 2e-05"),
            ("LoRA, 0.0001", "LoRA, 0.0002", "LoRA, 0.0004"),
        ),
        redone="one rate each, and LoRA's was the main job's; now a sweep of three for both, on two seeds of its own",
        replaces="Full fine-tuning rather than LoRA",
    ),
    Asked(
        "kl-keeps-near",
        "C8",
        "With beta 0.04 the policy ends nearer to the base model than with 0.001.",
        "beta 0.04",
        "beta 0.001",
        "kl_last",
        "less",
        0.05,
        priority=2,
    ),
    Asked(
        "beta-rescues",
        "E6",
        "Where the rate is ten times too high, beta 0.1 finds right answers sooner than none.",
        "too fast, beta 0.1",
        "too fast",
        EXACT,
        priority=2,
        counts_if=Condition(
            "the arm without beta ends (last quarter) at least 10 points below its control `fast`",
            "too fast",
            "reward/exact_answer",
            0,
            "<=",
            -0.1,
            than="fast",
        ),
    ),
    Asked(
        "warmup",
        "C9",
        "Warmup makes the gradients of the first 5 steps smaller.",
        "fast",
        "no warmup",
        "grad_norm_early",
        "less",
        0.5,
        priority=2,
        redone="the outcome was the largest norm of the whole run, which one step decides",
        replaces="Warmup tames early gradients",
    ),
    Asked(
        "warmup-learns",
        "C9",
        "Warmup finds right answers no later than none.",
        "fast",
        "no warmup",
        EXACT,
        "no less",
        priority=2,
    ),
    Asked(
        "dr-grpo-length",
        "A7",
        "Under Dr. GRPO's loss, still divided by the spread, wrong answers end shorter than under GRPO's.",
        "code, Dr. GRPO",
        "code, GRPO",
        "tokens_mean_wrong",
        "less",
        8.0,
        priority=4,
        redone="all wrong answers had nine tokens: no length to choose; now programs of up to 128 tokens",
        replaces="Dr. GRPO keeps wrong answers short",
    ),
    Asked(
        "sequence-level-slower",
        "B14",
        "GSPO, with its own clip, passes tests later than GRPO, two updates on each rollout.",
        "code, GSPO",
        "code, tokens",
        "reward/code_tests_mean",
        "less",
        priority=4,
        redone=_ONE_CHANGE,
        replaces="A sequence-level loss is slower",
    ),
    Asked(
        "sequence-level-steadier",
        "B14",
        "GSPO's reward curve, with its own clip, is less rough than GRPO's, two updates on each rollout.",
        "code, GSPO",
        "code, tokens",
        "reward_roughness",
        "less",
        0.02,
        priority=4,
        redone=_ONE_CHANGE,
        replaces="A sequence-level loss is steadier",
    ),
]
