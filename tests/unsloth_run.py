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

from grpo_kit.unsloth import changed_defaults, replaced_layers


def letters(completions, **columns):
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


found = {"versions": [unsloth.__version__, trl.__version__], "trainer": trl.GRPOTrainer.__name__}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    task = kit.tasks.largest(n_train=16, n_held_out=4)
    data = task.dataset(tokenizer)
found["late"] = [str(one.message) for one in said if one.category is RuntimeWarning]

args = kit.profile("smoke").grpo_config("run", task=task, reward_weights=[*task.reward_weights, 1.0])
original = [base for base in type(args).__mro__ if base.__name__ == "GRPOConfig"][-1]
own = original(output_dir="run")
found["changed"] = sorted(changed_defaults(trl.GRPOConfig))
# What the profile does not set is as in trl.
sets = {
    "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "learning_rate",
    "warmup_steps", "optim", "bf16", "logging_steps", "seed",
}  # fmt: skip
found["kept"] = [n for n in found["changed"] if n not in sets and getattr(args, n) != getattr(own, n)]

try:
    kit.GRPOTrainer(model=model, reward_funcs=letters, args=args, train_dataset=data, live=None)
except ValueError as error:
    found["refused"] = str(error)

model.save_pretrained("model"), tokenizer.save_pretrained("model")
model, tokenizer = unsloth.FastLanguageModel.from_pretrained("model", max_seq_length=512, load_in_4bit=False)
model = unsloth.FastLanguageModel.get_peft_model(
    model, r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], random_state=0
)
found["replaced"] = replaced_layers(model)
trainer = trl.GRPOTrainer(
    model=model,
    reward_funcs=[*task.rewards, letters],
    args=args,
    train_dataset=data,
    processing_class=tokenizer,
)
trainer.train()
first = trainer.state.log_history[0]
found["rewards"] = {n: v for n, v in first.items() if n.startswith("rewards/") and n.endswith("/mean")}
found["steps"], found["grad_norm"] = trainer.state.global_step, float(first["grad_norm"])
print("FOUND " + json.dumps(found))
