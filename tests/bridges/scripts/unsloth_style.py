"""Rewards in the style of Unsloth's GRPO notebooks: points from -2.5 to 5, adapters, an 8-word system prompt."""

import re

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from grpo_kit.models import load_policy

START, END, OPEN, CLOSE = (
    "<start_working_out>",
    "<end_working_out>",
    "<SOLUTION>",
    "</SOLUTION>",
)
SYSTEM = f"Think between {START} and {END}, answer between {OPEN} and {CLOSE}."
match_format = re.compile(rf"{END}.*?{OPEN}(.+?){CLOSE}\s*$", flags=re.MULTILINE | re.DOTALL)
match_numbers = re.compile(
    OPEN + r".*?[\s]{0,}([-]?[\d\.\,]{1,})", flags=re.MULTILINE | re.DOTALL
)

dataset = Dataset.from_list(
    [
        {
            "prompt": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{a} + {b} = ?"},
            ],
            "answer": str(a + b),
        }
        for a, b in ((2, 3), (10, 5), (7, 7))
    ]
)


def match_format_exactly(completions, **kwargs):
    return [
        3.0 if match_format.search(completion[0]["content"]) else 0.0
        for completion in completions
    ]


def match_format_approximately(completions, **kwargs):
    scores = []
    for completion in completions:
        response = completion[0]["content"]
        scores.append(
            sum(0.5 if response.count(tag) == 1 else -1.0 for tag in (END, OPEN, CLOSE))
        )
    return scores


def check_answer(prompts, completions, answer, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    guesses = [m.group(1) if (m := match_format.search(r)) else None for r in responses]
    scores = []
    for guess, true_answer in zip(guesses, answer, strict=True):
        if guess is None:
            scores.append(-2.0)
        elif guess == true_answer:
            scores.append(5.0)
        elif guess.strip() == true_answer:
            scores.append(3.5)
        else:
            try:
                ratio = float(guess) / float(true_answer)
                scores.append(
                    2.0 if 0.9 <= ratio <= 1.1 else 1.5 if 0.8 <= ratio <= 1.2 else -2.5
                )
            except ValueError:
                scores.append(-4.5)
    return scores


def check_numbers(prompts, completions, answer, **kwargs):
    question = prompts[0][-1]["content"]
    responses = [completion[0]["content"] for completion in completions]
    guesses = [m.group(1) if (m := match_numbers.search(r)) else None for r in responses]
    print(
        "*" * 20,
        f"Question:\n{question}",
        f"\nAnswer:\n{answer[0]}",
        f"\nExtracted:\n{guesses[0]}",
    )
    return [
        -2.5 if guess is None else 3.5 if float(guess.replace(",", "")) == float(true) else -1.5
        for guess, true in zip(guesses, answer, strict=True)
    ]


model, tokenizer = load_policy("tiny-random", quiet=True)
training_args = GRPOConfig(
    temperature=1.0,
    learning_rate=5e-5,
    weight_decay=0.001,
    warmup_steps=0.1,
    lr_scheduler_type="linear",
    optim="adamw_torch",
    logging_steps=1,
    bf16=False,
    use_cpu=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=1,
    num_generations=4,
    max_completion_length=16,
    max_steps=2,
    save_steps=1,
    report_to="none",
    output_dir=OUTPUT,  # noqa: F821  the test's
)
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    peft_config=LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]
    ),
    reward_funcs=[
        match_format_exactly,
        match_format_approximately,
        check_answer,
        check_numbers,
    ],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
