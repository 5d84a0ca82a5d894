"""Small runs of trl's own trainer, which the kit is compared with."""

import few_words
import torch
from datasets import Dataset
from loop_runs import letters
from trl import GRPOConfig, GRPOTrainer


def data(rows=8):
    return Dataset.from_dict(
        {
            "prompt": [f"Say {i} and {'more ' * (i % 3)}:" for i in range(rows)],
            "answer": [str(i) for i in range(rows)],
        }
    )


def settings(folder, **overrides):
    base = dict(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        gradient_accumulation_steps=1,
        max_steps=4,
        max_completion_length=6,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=3,
    )
    return GRPOConfig(**{**base, **overrides})


def make_plain(folder, *, model=None, rewards=letters, dataset=None, **overrides):
    """trl's trainer on a fresh tiny model."""
    fresh, tokenizer = few_words.policy()
    torch.manual_seed(0)
    return GRPOTrainer(
        model=fresh if model is None else model,
        args=settings(folder, **overrides),
        reward_funcs=rewards,
        train_dataset=data() if dataset is None else dataset,
        processing_class=tokenizer,
    )


def ragged_batch(prompts=3, group=4, width=7, *, with_old=False, with_ref=False, seed=0):
    """Prompts of several lengths, completions of 0 (masked) to 7 tokens, rows shuffled as TRL does."""
    g = torch.Generator().manual_seed(seed)
    longest = 9
    rows = []
    for p in range(prompts):
        prompt = torch.randint(20, 2000, (4 + 2 * p,), generator=g)
        for i in range(group):
            n = 0 if (p, i) == (1, 2) else int(torch.randint(1, width + 1, (1,), generator=g))
            rows.append((prompt, torch.randint(20, 2000, (n,), generator=g)))
    rows = [rows[i] for i in torch.randperm(len(rows), generator=g)]
    batch = {
        "prompt_ids": torch.stack(
            [torch.nn.functional.pad(p, (longest - len(p), 0)) for p, _ in rows]
        ),
        "prompt_mask": torch.stack(
            [
                torch.nn.functional.pad(torch.ones_like(p), (longest - len(p), 0))
                for p, _ in rows
            ]
        ),
        "completion_ids": torch.stack(
            [torch.nn.functional.pad(c, (0, width - len(c))) for _, c in rows]
        ),
        "completion_mask": torch.stack(
            [torch.nn.functional.pad(torch.ones_like(c), (0, width - len(c))) for _, c in rows]
        ),
        "advantages": torch.randn(len(rows), generator=g),
    }
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    noise = lambda: -7.6 + 0.3 * torch.randn(len(rows), width, generator=g)  # noqa: E731
    if with_old:
        batch["old_per_token_logps"] = noise()
    if with_ref:
        batch["ref_per_token_logps"] = noise()
    return batch
