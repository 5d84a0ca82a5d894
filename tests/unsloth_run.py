"""Run by test_unsloth.py in an environment with Unsloth: prints one JSON line of what came of it.

    python unsloth_run.py first|late [generate]

generate: also make Unsloth's GRPO trainer and config, which it makes itself only where it finds a GPU. The package
`unsloth.models` is stood in for, since its decoders need one; what rewrites TRL's trainer is Unsloth's own.
"""

# ruff: noqa: E402  the order of imports is what is tried

import json
import os
import sys
import types
import warnings
from dataclasses import replace

order, *more = sys.argv[1:]
if order == "first":
    import unsloth

import grpo_kit as kit

model, tokenizer = kit.load_policy("tiny-random", quiet=True)
if order == "late":
    import unsloth

if "generate" in more:
    package = types.ModuleType("unsloth.models")
    package.__path__ = [os.path.join(os.path.dirname(unsloth.__file__), "models")]
    sys.modules["unsloth.models"] = package
    from unsloth.models import rl

    rl._patch_trl_rl_trainers("grpo_trainer")

import trl

from grpo_kit._support.unsloth import changed_defaults, replaced_layers


def letters(completions, **columns):
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


found = {
    "versions": [unsloth.__version__, trl.__version__],
    "trainer": trl.GRPOTrainer.__name__,
}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    task = kit.tasks.largest(n_train=16, n_held_out=4, max_completion_tokens=12)
    task.dataset(tokenizer)
found["late"] = [str(one.message) for one in said if one.category is RuntimeWarning]
weights = [weight / 2 for weight in task.reward_weights] + [0.5]
task = replace(task, rewards=[*task.rewards, letters], reward_weights=weights)
config = kit.Config(steps=2, prompts_per_step=2, group_size=4, learning_rate=1e-4, seed=5)
found["changed"] = sorted(changed_defaults(trl.GRPOConfig))


def unsloths_model():
    """The tiny model with adapters, by Unsloth's own loaders."""
    made, own = unsloth.FastLanguageModel.from_pretrained(
        "model", max_seq_length=512, load_in_4bit=False
    )
    targets = {"target_modules": ["q_proj", "v_proj"]}
    return unsloth.FastLanguageModel.get_peft_model(
        made, r=8, lora_alpha=16, random_state=0, **targets
    ), own


model.save_pretrained("model"), tokenizer.save_pretrained("model")
model, tokenizer = unsloths_model()
found["replaced"] = replaced_layers(model)
loop = kit.GRPOTrainer(model, task, config, tokenizer=tokenizer, folder="loop", live=None)
loop.train()
rows = kit.read_metrics("loop")
found["loop"] = {"steps": loop.step, "grad_norm": float(rows["grad_norm"].iloc[-1])}

original = [base for base in trl.GRPOConfig.__mro__ if base.__name__ == "GRPOConfig"][-1]
# Before the trainer: making a config resets accelerate's state.
own = original(output_dir="own")
trainer = kit.to_trl(task, config, *unsloths_model(), "trl")
# What the config does not set is as in trl.
sets = {
    "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "learning_rate",
    "warmup_steps", "optim", "bf16", "logging_steps", "seed", "epsilon_high", "max_completion_length", "save_strategy",
    "save_total_limit", "top_k", "lr_scheduler_type", "steps_per_generation", "reward_weights",
}  # fmt: skip
kept = [name for name in found["changed"] if name not in sets]
found["kept"] = [name for name in kept if getattr(trainer.args, name) != getattr(own, name)]
trainer.train()
first = trainer.state.log_history[0]
found["rewards"] = {
    n: v for n, v in first.items() if n.startswith("rewards/") and n.endswith("/mean")
}
found["steps"], found["grad_norm"] = trainer.state.global_step, float(first["grad_norm"])
print("FOUND " + json.dumps(found))
