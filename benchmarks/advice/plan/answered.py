"""Claims that committed data decide, claims that other benchmarks ask, and advice that this machine cannot ask."""

from benchmarks.advice.plan.entry import HELD_OUT, Answered, Elsewhere, NotAsked

_FIRST = "benchmarks/results/advice"
_AGENTS = "benchmarks/results/agents_smollm2-135m-instruct.json"
_DPO = "benchmarks/results/dpo_smollm2-135m-instruct.json"
_THINKING = "benchmarks/results/thinking_smollm2-135m-instruct.json"
_READINESS = "benchmarks/results/readiness_"
_HINTED = "benchmarks/results/hinted_smollm2-135m-instruct.json"

ANSWERED = [
    Answered(
        "no-kl",
        "A7",
        "Without the KL term training ends no lower.",
        _FIRST,
        "Dropping the KL term costs nothing",
    ),
    Answered(
        "8-bit",
        "C10",
        "8-bit AdamW ends no lower than AdamW.",
        _FIRST,
        "8-bit AdamW learns as well",
    ),
    Answered(
        "staleness",
        "B9",
        "Rollouts less than a step old end higher than those 4 to 5 steps old (published as 'newer data first').",
        _FIRST,
        "A buffer that serves newer data first helps",
    ),
    Answered(
        "10-steps-old",
        "B9",
        "Rollouts up to 10 steps old end no lower than fresh ones.",
        _FIRST,
        "Rollouts up to 10 steps old do no harm",
    ),
    Answered(
        "goal-repeated",
        "B7",
        "The goal in every turn's prompt finds the way sooner.",
        _AGENTS,
        "Repeating the goal in every turn helps",
    ),
    Answered(
        "actions-named",
        "B7",
        "The last two actions in every turn's prompt find the way sooner.",
        _AGENTS,
        "Naming the last two actions helps",
    ),
    Answered(
        "mock-quicker",
        "B11",
        "Steps with a mock are shorter than with the slow environment.",
        _AGENTS,
        "A mock makes steps shorter",
    ),
    Answered(
        "thoughts-dropped",
        "B4",
        "Trained on thoughts that serving drops, a model succeeds less often as it is served.",
        _THINKING,
        "Training on thoughts that serving drops costs",
    ),
    Answered(
        "tokens-again",
        "B6",
        "Turns tokenized again from their text are other tokens in some cases.",
        _THINKING,
        "Sampled tokens are not those of their text",
    ),
    Answered(
        "hint-left-out",
        "B",
        "Sampled with a hint and trained as if without, the model ends higher than one that never saw it.",
        _HINTED,
        "A hint in the prompt, trained without it, helps",
    ),
    Answered(
        "hint-weighed",
        "B",
        "The ratio between both prompts ends higher than a ratio of 1.",
        _HINTED,
        "Importance weights help between two prompts",
    ),
    Answered(
        "hint-imitated",
        "B",
        "Imitating what succeeded with the hint ends no lower than training on it.",
        _HINTED,
        "Imitating what was sampled with the hint does as well",
    ),
    Answered(
        "aha-before-training",
        "D4",
        "Words of reflection stand in samples of the untrained model.",
        f"{_READINESS}smollm2-135m-instruct.json",
        "Words of reflection are there before training",
        said="written down with notebook 12's 96 samples, of which 1 held one; counted in more since",
    ),
    Answered(
        "small-models-and-format",
        "C1",
        "Without a worked example the smaller of two models keeps the format less often.",
        f"{_READINESS}smollm2-135m-instruct.json and {_READINESS}qwen2.5-coder-0.5b-instruct.json",
        "The smaller model keeps the format less often (of two families)",
    ),
]

ELSEWHERE = [
    Elsewhere(
        "mock-as-good",
        "B11",
        "Trained against the mock, the model succeeds no less often than trained against the slow environment.",
        _AGENTS,
        'python -m benchmarks.agents --arms "grid, slow" "grid, mocked" --seeds 0 1 2 3 4 5 6 7',
        "success",
        "no less",
        HELD_OUT,
        2,
        0.4,
        8,
        "A mock trains as well as the slow environment",
    ),
    Elsewhere(
        "dpo-first",
        "E1",
        "DPO and then GRPO ends higher than GRPO of the same seconds.",
        _DPO,
        "KIT_PROFILE=cpu python -m papermill notebooks/10_preferences_then_grpo.ipynb 10.ipynb --cwd notebooks "
        "-y 'SEEDS: [0, 1, 2, 3, 4, 5, 6, 7]' && python -m benchmarks.notebook_runs runs/10_preferences_cpu_*",
        "accuracy",
        "more",
        HELD_OUT,
        3,
        1.5,
        8,
        runs="dpo",
        arm="DPO, then GRPO",
        against="GRPO, same seconds",
    ),
    Elsewhere(
        "ppo-or-grpo",
        "B1",
        "GRPO ends no lower than PPO on the same exact reward and as many completions.",
        "notebooks/11_ppo_and_reward_models.ipynb",
        "KIT_PROFILE=cpu python -m papermill notebooks/11_ppo_and_reward_models.ipynb 11.ipynb --cwd notebooks "
        "-y 'SEEDS: [0, 1, 2, 3, 4, 5, 6, 7]' && python -m benchmarks.notebook_runs runs/11_ppo_cpu_*",
        "accuracy",
        "no less",
        HELD_OUT,
        3,
        1.5,
        8,
        runs="ppo",
        arm="GRPO",
        against="PPO",
    ),
]

NOT_ASKED = [
    NotAsked(
        "A1",
        "says what GRPO takes, not what it does: every run here has prompts and rewards alone",
    ),
    NotAsked("A8", "is about thousands of steps; runs here have 30"),
    NotAsked("B3", "needs Qwen2.5, Mistral and Llama of one size, from the hub"),
    NotAsked("B16", "is about thousands of steps; runs here have 30"),
    NotAsked("C2", "needs a base model's weights beside its instruct model's, from the hub"),
    NotAsked(
        "C11",
        "needs a card: tf32 is none of a CPU's formats, and bfloat16 is slower on one without AMX",
    ),
    NotAsked(
        "D1",
        "says which tasks GRPO is for; a task without a verifiable answer cannot be trained on here",
    ),
    NotAsked(
        "D6",
        "its memory and speed need CUDA (its CPU backend was run), and it wants older versions of its own",
    ),
]
