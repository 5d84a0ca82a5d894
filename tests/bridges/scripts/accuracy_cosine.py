"""Accuracy, and a cosine of the length: short right answers earn most, short wrong ones lose most, in [-10, 1]."""

import math

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from grpo_kit.models import load_policy

MAX_LEN = 60
dataset = Dataset.from_list(
    [
        {"problem": f"What is {a} * {a}?", "solution": str(a * a), "level": a}
        for a in (3, 5, 7, 9)
    ]
)


def make_conversation(example):
    return {"prompt": [{"role": "user", "content": example["problem"]}]}


dataset = dataset.map(make_conversation).remove_columns("problem")


def is_right(content, sol):
    return content.strip().split()[-1:] == [sol]


def accuracy_reward(completions, solution, **kwargs):
    """None for a row that cannot be verified: both rewards skip it."""
    contents = [completion[0]["content"] for completion in completions]
    return [
        None if sol == "81" else float(is_right(c, sol))
        for c, sol in zip(contents, solution, strict=True)
    ]


def get_cosine_scaled_reward(min_wrong=-10.0, max_wrong=-0.5, min_right=0.5, max_right=1.0):
    def cosine_scaled_reward(completions, solution, **kwargs):
        rewards = []
        for completion, sol in zip(completions, solution, strict=True):
            content = completion[0]["content"]
            low, high = (
                (min_right, max_right) if is_right(content, sol) else (max_wrong, min_wrong)
            )
            cosine = math.cos(min(len(content) / MAX_LEN, 1) * math.pi)
            rewards.append(None if sol == "81" else low + 0.5 * (high - low) * (1.0 + cosine))
        return rewards

    return cosine_scaled_reward


model, tokenizer = load_policy("tiny-random", quiet=True)
training_args = GRPOConfig(
    output_dir=OUTPUT,  # noqa: F821  the test's
    learning_rate=1e-6,
    bf16=False,
    use_cpu=True,
    gradient_accumulation_steps=2,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=16,
    num_train_epochs=2,
    temperature=0.7,
    reward_weights=[1.0, 0.5],
    loss_type="dr_grpo",
    scale_rewards=False,
    log_completions=True,
    save_strategy="no",
    report_to=[],
)
trainer = GRPOTrainer(
    model,
    [accuracy_reward, get_cosine_scaled_reward()],
    training_args,
    dataset,
    processing_class=tokenizer,
)
trainer.train()
