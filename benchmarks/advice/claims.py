"""The claims of the first campaign: who says what, and which two arms decide it.

The outcome, its direction (the advice's own) and the margin were written down when 3 of the runs had been seen;
`reward_roughness` was redefined later, because at first an even rise counted as rough. The second campaign (plan/) asks
most of them again; what stands in the table is said in table.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.advice.plan.entry import null_of

# As the table names them, and in full.
SHORT = {
    "A": "9 Lessons",
    "B": "Boosting Post-Training",
    "C": "GRPO Training Notes",
    "D": "What I've learned",
    "E": "From Intuition to GRPO",
}
SOURCES = {
    "A": "9 Lessons I Learned while Doing RL Post-Training for LLMs (2025-07-08)",
    "B": "Boosting LLM Post-Training with RL: Tips for Efficiency and Stability",
    "C": "Some GRPO Training Notes (2025-03-03)",
    "D": "GRPO: what I've learned (2025-05-15)",
    "E": "Post-Training LLMs: From RL Intuition to GRPO",
}


@dataclass(frozen=True)
class Claim:
    """One row of the table.

    arm, against: the two arms compared. outcome: "accuracy" (held out, greedy) or a column of Lab.runs.
    says: "more" or "less" (of the outcome than against), or "no less". margin: the smallest difference that matters, in
    the outcome's unit. withdrawn: why its runs do not decide it; the row keeps its effect and gets no verdict and no p.
    published: its verdict in the first version of the table, where that is not what entry.verdict says of its runs now.
    runs: the benchmark whose runs decide it, a key of elsewhere.FILES, with outcomes of its own; "": this one's.
    """

    text: str
    by: str
    arm: str = ""
    against: str = ""
    outcome: str = "accuracy"
    says: str = "more"
    margin: float = 0.05
    withdrawn: str = ""
    published: str = ""
    runs: str = ""

    @property
    def null(self) -> float:
        """The difference that the row's p is against."""
        return null_of(self.says, self.margin)


# A task given as a Task and one made by the profile had other train rows: theirs began where the held-out rows ended,
# and those were 256 in the one and 128 in the other. So control and an arm with a task of its own differ in that too.
_OTHER_QUESTIONS = "the arms trained on different questions"

CLAIMS = [
    Claim(
        "A prefill speeds the start",
        "C3",
        "control",
        "no prefill",
        "reward_mean",
        withdrawn=_OTHER_QUESTIONS,
        published="holds",
    ),
    Claim("Soft rewards beat binary ones", "C4, E3", "no prefill", "no prefill, binary"),
    Claim(
        "Rewards of at least 0 train better than rewards around 0",
        "C5",
        "control",
        "rewards -1 to 1",
        withdrawn=_OTHER_QUESTIONS,
        published="cannot tell",
    ),
    Claim("Annealing the temperature helps", "C6", "linear", "control"),
    Claim(
        "A group of 2 is enough (equal completions)",
        "C7",
        "group of 2",
        "control",
        says="no less",
    ),
    Claim("More generations help (twice the completions)", "A5, E5", "4 x 16", "control"),
    Claim(
        "More generations are steadier",
        "A5",
        "4 x 16",
        "control",
        "reward_roughness",
        "less",
        margin=0.02,
    ),
    Claim(
        "num_iterations = 2 saves half the rollouts at no loss",
        "A6",
        "2 iterations",
        "control",
        says="no less",
    ),
    Claim(
        "num_iterations = 2 is smoother",
        "A6",
        "2 iterations",
        "control",
        "reward_roughness",
        "less",
        margin=0.02,
    ),
    Claim(
        "Dr. GRPO keeps wrong answers short",
        "A7",
        "longer, Dr. GRPO",
        "longer, GRPO",
        "tokens_mean_wrong",
        "less",
        margin=1.0,
        published="does not",
    ),
    Claim(
        "Dropping the KL term costs nothing",
        "A7 (C8 keeps it)",
        "control",
        "beta 0.04",
        says="no less",
    ),
    Claim(
        "Warmup tames early gradients",
        "C9",
        "control",
        "no warmup",
        "grad_norm_max",
        "less",
        margin=0.5,
    ),
    Claim("8-bit AdamW learns as well", "C10", "8-bit AdamW", "control", says="no less"),
    Claim("Full fine-tuning rather than LoRA", "C12", "control", "LoRA"),
    Claim("SFT first helps", "A2, B2", "no prefill, SFT first", "no prefill"),
    Claim(
        "Positives upweighted help at low success",
        "B10",
        "binary, positives x 4",
        "no prefill, binary",
    ),
    Claim(
        "Negatives filtered help at low success",
        "B10",
        "binary, positives only",
        "no prefill, binary",
    ),
    Claim(
        "Groups without a signal resampled help at low success",
        "B10",
        "binary, resampled",
        "no prefill, binary",
    ),
    Claim("Rollouts up to 5 steps old do no harm", "B9", "sync 5", "sync 1", says="no less"),
    Claim("Rollouts up to 10 steps old do no harm", "B9", "sync 10", "sync 1", says="no less"),
    Claim("Importance weights help with old rollouts", "B9", "sync 10", "sync 10, no weights"),
    Claim("A buffer that serves newer data first helps", "B9", "newest first", "oldest first"),
    Claim(
        "A sequence-level loss is slower",
        "B14",
        "GSPO, 2 iterations",
        "2 iterations",
        "reward_mean",
        "less",
    ),
    Claim(
        "A sequence-level loss is steadier",
        "B14",
        "GSPO, 2 iterations",
        "2 iterations",
        "reward_roughness",
        "less",
        margin=0.02,
    ),
    Claim(
        "Sampling at 0.7 in training and 1 in evaluation costs",
        "B8",
        "control",
        "temperature 0.7",
        "sampled_1.0",
    ),
    Claim(
        "Sampling at 1.3 in training and 1 in evaluation costs",
        "B8",
        "control",
        "temperature 1.3",
        "sampled_1.0",
    ),
    Claim(
        "Repeating the goal in every turn helps",
        "B7",
        "lookup, goal in every turn",
        "lookup",
        "success_mean",
        runs="agents",
    ),
    Claim(
        "Naming the last two actions helps",
        "B7",
        "grid, last 2 actions",
        "grid",
        "success_mean",
        runs="agents",
    ),
    Claim(
        "A mock trains as well as the slow environment",
        "B11",
        "grid, mocked",
        "grid, slow",
        "success",
        "no less",
        runs="agents",
    ),
    Claim(
        "A mock makes steps shorter",
        "B11",
        "grid, mocked",
        "grid, slow",
        "step_seconds_mean",
        "less",
        margin=1.0,
        runs="agents",
    ),
    Claim(
        "Training on thoughts that serving drops costs",
        "B4",
        "as served",
        "kept",
        "success",
        runs="thinking",
    ),
    Claim(
        "Sampled tokens are not those of their text",
        "B6",
        "tokenized again",
        "as sampled",
        "differ",
        margin=0.01,
        runs="tokens",
    ),
    Claim(
        "A hint in the prompt, trained without it, helps",
        "B",
        "weights off",
        "never hinted",
        "success",
        runs="hinted",
    ),
    Claim(
        "Importance weights help between two prompts",
        "B",
        "weights on",
        "weights off",
        "success",
        runs="hinted",
    ),
    Claim(
        "Imitating what was sampled with the hint does as well",
        "B",
        "sft",
        "weights off",
        "success",
        "no less",
        runs="hinted",
    ),
    # Looks of notebook 13, made rows after they had been seen, so that all looks are in one family.
    Claim("Annealing by a cosine helps", "C6", "cosine", "control"),
    Claim("Annealing exponentially helps", "C6", "exponential", "control"),
    Claim("Sampling at 1.3 helps", "A4", "temperature 1.3", "control"),
    Claim("Sampling at 0.7 does no harm", "E4", "temperature 0.7", "control", says="no less"),
    Claim(
        "Sampling from the nucleus does no harm", "A4", "top-p 0.9", "control", says="no less"
    ),
    Claim(
        "A group of 16 does no harm (equal completions)",
        "E5",
        "group of 16",
        "control",
        says="no less",
    ),
    Claim(
        "A group of 4 is enough (equal completions)",
        "C7, E5",
        "group of 4",
        "control",
        says="no less",
    ),
    Claim(
        "num_iterations = 4 saves three quarters of the rollouts at no loss",
        "A6",
        "4 iterations",
        "control",
        says="no less",
    ),
    Claim(
        "The smaller model keeps the format less often (of two families)",
        "C1",
        "smollm2-135m-instruct",
        "qwen2.5-coder-0.5b-instruct",
        "formatted",
        "less",
        margin=0.1,
        runs="readiness",
    ),
    Claim(
        "Words of reflection are there before training",
        "D4",
        "smollm2-135m-instruct",
        "nothing",
        "reflecting",
        margin=0.01,
        runs="readiness",
    ),
]
