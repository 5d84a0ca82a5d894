"""GSM8K with XML tags: the widely copied first GRPO script, on three rows.

Format rewards give up to 0.5, a right answer 2.0.
"""

import re

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from grpo_kit.models import load_policy

SYSTEM = "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
ROWS = [
    ("Tom has 3 apples and buys 4. How many?", "3 + 4 = 7\n#### 7"),
    ("A box holds 6 eggs. How many in 2 boxes?", "6 * 2 = 12\n#### 12"),
    ("Ann had 9 coins and lost 5. How many are left?", "9 - 5 = 4\n#### 4"),
]


def extract_xml_answer(text):
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


dataset = Dataset.from_list(
    [
        {
            "prompt": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": question},
            ],
            "answer": solution.split("####")[1].strip(),
        }
        for question, solution in ROWS
    ]
)


def correctness_reward_func(prompts, completions, answer, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    assert prompts[0][-1]["role"] == "user"
    return [
        2.0 if extract_xml_answer(r) == a else 0.0
        for r, a in zip(responses, answer, strict=True)
    ]


def int_reward_func(completions, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    return [0.5 if extract_xml_answer(r).isdigit() else 0.0 for r in responses]


def strict_format_reward_func(completions, **kwargs):
    pattern = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
    return [0.5 if re.match(pattern, c[0]["content"], re.DOTALL) else 0.0 for c in completions]


def soft_format_reward_func(completions, **kwargs):
    pattern = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
    return [0.5 if re.search(pattern, c[0]["content"], re.DOTALL) else 0.0 for c in completions]


def count_xml(text):
    count = 0.125 * (text.count("<reasoning>\n") == 1) + 0.125 * (
        text.count("\n</reasoning>\n") == 1
    )
    if text.count("\n<answer>\n") == 1:
        count += 0.125 - len(text.split("\n</answer>\n")[-1]) * 0.001
    if text.count("\n</answer>") == 1:
        count += 0.125 - (len(text.split("\n</answer>")[-1]) - 1) * 0.001
    return count


def xmlcount_reward_func(completions, **kwargs):
    return [count_xml(completion[0]["content"]) for completion in completions]


model, tokenizer = load_policy("tiny-random", quiet=True)
training_args = GRPOConfig(
    output_dir=OUTPUT,  # noqa: F821  the test's
    learning_rate=5e-6,
    adam_beta1=0.9,
    adam_beta2=0.99,
    weight_decay=0.1,
    warmup_steps=0.1,
    lr_scheduler_type="cosine",
    logging_steps=1,
    bf16=False,
    use_cpu=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=16,
    max_steps=2,
    save_steps=100,
    max_grad_norm=0.1,
    report_to="none",
)
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[
        xmlcount_reward_func,
        soft_format_reward_func,
        strict_format_reward_func,
        int_reward_func,
        correctness_reward_func,
    ],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
