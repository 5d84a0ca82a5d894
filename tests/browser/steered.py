"""A cell that makes a trainer of a tiny model, and what its run has written."""

from grpo_kit.record.files import has_metrics, read_metrics

MAKE = """
import grpo_kit as kit
cfg = kit.preset("smoke", steps={steps}, seed=1)
folder = "../runs/{name}"
task = cfg.make_task()
model, tokenizer = kit.load_policy(cfg.model, quiet=True)
trainer = kit.GRPOTrainer(
    model, task, kit.preset(cfg, warmup=0), tokenizer=tokenizer, folder=folder, on_flag=lambda flag: None
)
"""

MAKE_EPISODES = """
import grpo_kit as kit
cfg = kit.preset("smoke", steps={steps}, seed=1)
folder = "../runs/{name}"
task = kit.episodes.grid(16, 8)
model, tokenizer = kit.load_policy(cfg.model, quiet=True)
trainer = kit.GRPOTrainer(
    model, task, kit.preset(cfg, warmup=0), tokenizer=tokenizer, folder=folder, on_flag=lambda flag: None
)
"""
# Nothing is done for 8 s before step 1, and before step 4.
MAKE_SLOW = """
import time
import grpo_kit as kit
class Slow(kit.Hook):
    def before_step(self, trainer):
        time.sleep(8 if trainer.step in (0, 3) else 0.1)
task = kit.preset("smoke").make_task()
cfg = kit.preset("smoke", steps={steps}, learning_rate=3e-4, temperature=0.85, warmup=0)
folder = "../runs/{name}"
model, tokenizer = kit.load_policy(cfg.model, quiet=True)
trainer = kit.GRPOTrainer(
    model, task, cfg, tokenizer=tokenizer, folder=folder, held_out=kit.HeldOut(task, rows=8, every=2), hooks=[Slow()]
)
"""
TRAINERS = {"completions": MAKE, "episodes": MAKE_EPISODES}


def rows(folder):
    return read_metrics(folder).to_dict("records") if has_metrics(folder) else []


def step(folder):
    return int(rows(folder)[-1]["step"]) if rows(folder) else 0
