"""A cell that makes a trainer of a tiny model, and what its run has written."""

import csv

MAKE = """
import grpo_kit as kit
cfg = kit.profile("smoke", steps={steps}, seed=1)
folder = "../runs/{name}"
task = cfg.make_task()
model, tokenizer = kit.load_policy(cfg.model, quiet=True)
args = cfg.grpo_config(folder, task=task, lr_scheduler_type="constant")
trainer = kit.GRPOTrainer(model, task, args, processing_class=tokenizer, on_flag=lambda flag: None)
"""

MAKE_EPISODES = """
import grpo_kit as kit
cfg = kit.profile("smoke", steps={steps}, seed=1)
folder = "../runs/{name}"
task = kit.episodes.grid(16, 8)
model, tokenizer = kit.load_policy(cfg.model, quiet=True)
args = cfg.grpo_config(folder, task=task, lr_scheduler_type="constant")
trainer = kit.EpisodeTrainer(model, task, args, processing_class=tokenizer, on_flag=lambda flag: None)
"""
TRAINERS = {"completions": MAKE, "episodes": MAKE_EPISODES}


def rows(folder):
    path = folder / "metrics.csv"
    return list(csv.DictReader(path.open())) if path.is_file() else []


def step(folder):
    return int(rows(folder)[-1]["step"]) if rows(folder) else 0
