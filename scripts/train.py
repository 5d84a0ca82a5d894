"""Train a model, with its accuracy before and after: copy this file, change it, run it.

    python scripts/train.py                                 the preset that fits this machine, its task
    python scripts/train.py --preset smoke --folder runs/a  seconds, with a tiny model that learns nothing
    python scripts/train.py --folder runs/mine --resume     go on where it was stopped or killed
    torchrun --nproc_per_node 2 scripts/train.py --folder runs/mine

`grpo-kit train` and notebook 05 do the same, and end in the same weights.
"""

import argparse
from pathlib import Path

import grpo_kit as kit

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--preset", default="auto", help="smoke, cpu, t4, gpu24; default: what this machine can run"
)
parser.add_argument(
    "--folder", type=Path, help="of the run; default: the next free runs/<task>"
)
parser.add_argument("--resume", action="store_true", help="go on with the run in --folder")
arguments = parser.parse_args()

# The numbers: any that kit.preset takes, such as steps=24 or temperature=kit.linear(1.2, 0.8).
config = kit.preset(arguments.preset, tuning="full")  # or "lora"

# The task, which is rows, a prompt and rewards: your own by kit.tasks.from_rows(...).
task = config.make_task()

model, tokenizer = kit.load_policy(
    config.model, tuning=config.tuning, dtype=config.dtype, seed=config.seed
)
held_out = kit.HeldOut(task, rows=min(64, len(task.held_out)), every=8)
trainer = kit.GRPOTrainer(
    model, task, config, tokenizer=tokenizer, folder=arguments.folder, held_out=held_out
)
# of several processes one measures and writes; all train
from_main = trainer.processes.from_main


def before_training():
    """Is there anything to learn from, and how good is the base?"""
    size, rows = config.group_size, task.train[: min(32, len(task.held_out))]
    ready = kit.readiness(
        model, tokenizer, task, rows=rows, samples=size, group_size=size, quiet=True
    )
    print(ready.sentence)
    before = kit.evaluate(model, tokenizer, task, batch_size=config.eval_batch)
    print(f"Before: {before.sentence}", flush=True)
    return before


def after_training():
    """The model, what it came to, and a card with both."""
    trainer.save_model(trainer.folder / "model")
    comparison = kit.compare(
        before, kit.evaluate(model, tokenizer, task, batch_size=config.eval_batch)
    )
    comparison.save(trainer.folder)
    kit.model_card(trainer.folder, comparison)
    print(f"{comparison}\n\nThe model is in {trainer.folder / 'model'}")


before = from_main(before_training)
trainer.train(resume=arguments.resume)
from_main(after_training)
