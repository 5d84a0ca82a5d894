"""grpo_kit: GRPO fine-tuning of small language models on one card, in notebooks.

The names below are the public interface; tasks and rewards live in `grpo_kit.tasks` and `grpo_kit.rewards`.
"""

from grpo_kit import rewards, tasks
from grpo_kit.evaluate import Comparison, Estimate, Evaluation, compare, evaluate, pass_at_k, wilson_interval
from grpo_kit.live import browse, config_panel, plot_run
from grpo_kit.memory import MemoryPlan, plan_memory
from grpo_kit.models import PolicyLoadError, describe, load_policy
from grpo_kit.optim import OPTIMIZERS, make_optimizer
from grpo_kit.precision import survival_plot, update_survival
from grpo_kit.profiles import Profile, profile
from grpo_kit.prompts import PromptError, audit_tags, build_dataset, build_prompt, roundtrip_drift
from grpo_kit.rollout import RolloutEngine, Rollouts
from grpo_kit.run_folder import RunFolderError, next_run_folder, read_completions, read_metrics
from grpo_kit.schedules import constant, cosine, exponential, linear, stepwise
from grpo_kit.trainer import GRPOTrainer
from grpo_kit.trainer_checks import RewardError

__all__ = [
    "OPTIMIZERS",
    "Comparison",
    "Estimate",
    "Evaluation",
    "GRPOTrainer",
    "MemoryPlan",
    "PolicyLoadError",
    "Profile",
    "PromptError",
    "RewardError",
    "RolloutEngine",
    "Rollouts",
    "RunFolderError",
    "audit_tags",
    "browse",
    "build_dataset",
    "build_prompt",
    "compare",
    "config_panel",
    "constant",
    "cosine",
    "describe",
    "evaluate",
    "exponential",
    "linear",
    "load_policy",
    "make_optimizer",
    "next_run_folder",
    "pass_at_k",
    "plan_memory",
    "plot_run",
    "profile",
    "read_completions",
    "read_metrics",
    "rewards",
    "roundtrip_drift",
    "stepwise",
    "survival_plot",
    "tasks",
    "update_survival",
    "wilson_interval",
]
