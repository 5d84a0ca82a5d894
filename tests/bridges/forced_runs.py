"""The same few updates by trl's trainer and by from_trl: the same forced completions, and what each made of them."""

from statistics import fmean

import few_words
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from grpo_kit.loop.batch import as_batch
from grpo_kit.loop.protocols import Hook
from grpo_kit.models._model_facts import end_ids
from grpo_kit.more.bridges.trl import from_trl

GROUP = 4


def texts():
    return Dataset.from_dict(
        {
            "prompt": [f"Say {i} and {'more ' * (i % 3)}:" for i in range(6)],
            "size": list(range(6)),
        }
    )


def chats():
    turns = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Say {i}."}]
        for i in range(6)
    ]
    return Dataset.from_dict({"prompt": turns, "size": list(range(6))})


def points(completions, completion_ids, size, **columns):
    """From below 0 to far above 1, by tokens, text and a column of the data set."""
    made = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [
        len(ids) - 3 + 0.1 * (len(text) % 7) + s
        for ids, text, s in zip(completion_ids, made, size, strict=True)
    ]


def vowels(completions, **columns):
    made = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [-1.0 * sum(letter in "aeiou" for letter in text) for text in made]


def arguments(folder, **fields):
    own = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": GROUP, "max_steps": 2,
        "max_completion_length": 6, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "bf16": False,
        "use_cpu": True, "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    return GRPOConfig(output_dir=str(folder), **{**own, **fields})


def tokens(call, place, end):
    """2 to 6 tokens; every third completion is cut off."""
    generator = torch.Generator().manual_seed(100 * call + place)
    length = int(torch.randint(1, 6, (1,), generator=generator))
    ids = torch.randint(300, 2000, (length + 1,), generator=generator).tolist()
    return ids if place % 3 == 0 else [*ids[:-1], end]


def by_trl(folder, data, rewards, *, lora=None, **fields):
    """What trl's trainer did: per rollout its prompts, completions and advantages; per update loss, norm, rate."""
    model, tokenizer = few_words.policy()
    trainer = GRPOTrainer(
        model,
        rewards,
        arguments(folder, **fields),
        data,
        processing_class=tokenizer,
        peft_config=lora,
    )
    rollouts, losses = [], []

    def write(prompt_ids, *others, **more):
        made = [
            tokens(len(rollouts), place, tokenizer.eos_token_id)
            for place in range(len(prompt_ids))
        ]
        rollouts.append({"prompts": prompt_ids, "completions": made})
        return made, None

    score, loss_of = trainer._generate_and_score_completions, trainer._compute_loss

    def scored(inputs):
        made = score(inputs)
        rollouts[-1]["advantages"] = made["advantages"].tolist()
        return made

    def kept(model, inputs):
        loss = loss_of(model, inputs)
        losses.append(loss.item())
        return loss

    (
        trainer._generate_single_turn,
        trainer._generate_and_score_completions,
        trainer._compute_loss,
    ) = (
        write,
        scored,
        kept,
    )
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    parts = len(losses) // len(history)
    updates = [
        {
            "loss": sum(losses[i * parts :][:parts]),
            "grad_norm": entry["grad_norm"],
            "rate": entry["learning_rate"],
        }
        for i, entry in enumerate(history)
    ]
    return rollouts, updates, trainer.model


def by_loop(folder, data, rewards, rollouts, *, lora=None, **fields):
    """The same rollouts by from_trl: per step advantages, loss, norm, rate."""
    model, tokenizer = few_words.policy()
    steps = []

    class Keep(Hook):
        def after_step(self, trainer, row, batch):
            steps.append(
                {
                    "advantages": batch.advantages,
                    "loss": row["loss"],
                    "grad_norm": row["grad_norm"],
                }
                | {"rate": row["learning_rate"]}
            )

    trainer = from_trl(
        model, rewards, arguments(folder, **fields), data, processing_class=tokenizer, peft_config=lora,
        hooks=[Keep()],
    )  # fmt: skip
    task = trainer.task
    known = dict(
        zip(
            map(tuple, tokenizer(task.render(tokenizer, task.train))["input_ids"]),
            task.train,
            strict=True,
        )
    )

    def replayed(model, tokenizer, task, rows, config, numbers):
        rollout = rollouts[numbers.step]
        rows = [known[tuple(ids)] for ids in rollout["prompts"][:: config.group_size]]
        prompts = [list(ids) for ids in rollout["prompts"]]
        return as_batch(
            tokenizer,
            rows,
            config.group_size,
            prompts,
            rollout["completions"],
            end_ids(model, tokenizer),
        )

    trainer.sample = replayed
    trainer.train()
    return steps, trainer


def apart(one, other):
    """The distance of two models' trained weights, over the distance that the first has moved. Both began alike."""
    begun = dict(few_words.policy()[0].named_parameters())
    pairs, far, moved = dict(other.named_parameters()), 0.0, 0.0
    for name, p in one.named_parameters():
        if p.requires_grad:
            far += (p - pairs[name]).square().sum().item()
            # adapters: from where they were drawn is near 0
            moved += (p - begun.get(name, 0.0)).square().sum().item()
    return (far / moved) ** 0.5


def means(updates, a_step, name):
    return [
        fmean(one[name] for one in updates[i : i + a_step])
        for i in range(0, len(updates), a_step)
    ]
