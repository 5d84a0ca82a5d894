"""Train on several cards with TRL's trainer, on the same task and numbers: copy this file, change it, run it.

    accelerate launch --num_processes 2 scripts/train_trl.py --preset gpu24
    accelerate launch --config_file zero3.yaml scripts/train_trl.py --model Qwen/Qwen2.5-7B-Instruct
    accelerate launch --cpu --num_processes 2 scripts/train_trl.py --preset smoke    to see that it runs

For a model that one card cannot hold: DeepSpeed and FSDP divide its weights. `accelerate config` writes such a file.
Where it fits, `torchrun --nproc_per_node 2 scripts/train.py` has chart, red flags and exact resume.
Needs the extra trl: pip install "grpo-kit[trl]".
"""

import argparse

from transformers import AutoTokenizer

import grpo_kit as kit

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--preset", default="auto", help="smoke, cpu, t4, gpu24; default: what this machine can run"
)
parser.add_argument("--model", help="a name on the hub or a folder; default: the preset's")
parser.add_argument(
    "--folder",
    default="runs/trl",
    help="of TRL's checkpoints; the model goes into <folder>/model",
)
arguments = parser.parse_args()

# The numbers: any that kit.preset takes. What TRL cannot be told is printed.
config = kit.preset(arguments.preset, tuning="full")
task = config.make_task()  # your own by kit.tasks.from_rows(...)

if arguments.model:  # by its name, so that its weights are divided as they are loaded
    model, tokenizer = arguments.model, AutoTokenizer.from_pretrained(arguments.model)
else:
    model, tokenizer = kit.load_policy(config.model, dtype=config.dtype)

trainer = kit.to_trl(task, config, model, tokenizer, arguments.folder)
trainer.train()
trainer.save_model(f"{arguments.folder}/model")
