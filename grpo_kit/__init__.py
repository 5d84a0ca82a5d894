"""grpo_kit: GRPO fine-tuning of small language models on one card, in notebooks.

The names below are the public interface; tasks and rewards live in `grpo_kit.tasks` and `grpo_kit.rewards`, the losses
by hand in `grpo_kit.objectives`.
"""

import grpo_kit.quiet  # noqa: F401
from grpo_kit import lab, objectives, rewards, tasks
from grpo_kit.evaluate import Comparison, Estimate, Evaluation, compare, evaluate, pass_at_k, wilson_interval
from grpo_kit.flags import Flag
from grpo_kit.lengths import cost_of_maximum, length_probe
from grpo_kit.live import browse, config_panel, plot_run
from grpo_kit.memory import MemoryPlan, plan_memory
from grpo_kit.models import PolicyLoadError, describe, load_policy
from grpo_kit.monitor import read_flags, red_flags
from grpo_kit.off_policy import OffPolicyTrainer
from grpo_kit.optim import OPTIMIZERS, make_optimizer
from grpo_kit.pass_curves import plot_pass_at_k
from grpo_kit.positives import PositivesTrainer
from grpo_kit.precision import survival_plot, update_survival
from grpo_kit.preferences import Samples, sample
from grpo_kit.profiles import Profile, profile
from grpo_kit.prompts import PromptError, audit_tags, build_dataset, build_prompt, roundtrip_drift
from grpo_kit.readiness import Readiness, readiness
from grpo_kit.rollout import RolloutEngine, Rollouts
from grpo_kit.run_folder import RunFolderError, next_run_folder, read_completions, read_metrics
from grpo_kit.schedules import constant, cosine, exponential, linear, stepwise
from grpo_kit.trainer import GRPOTrainer
from grpo_kit.trainer_checks import RewardError
from grpo_kit.which_method import which_method

__all__ = [
    "OPTIMIZERS",
    "Comparison",
    "Estimate",
    "Evaluation",
    "Flag",
    "GRPOTrainer",
    "MemoryPlan",
    "OffPolicyTrainer",
    "PolicyLoadError",
    "PositivesTrainer",
    "Profile",
    "PromptError",
    "Readiness",
    "RewardError",
    "RolloutEngine",
    "Rollouts",
    "RunFolderError",
    "Samples",
    "audit_tags",
    "browse",
    "build_dataset",
    "build_prompt",
    "compare",
    "config_panel",
    "constant",
    "cosine",
    "cost_of_maximum",
    "describe",
    "evaluate",
    "exponential",
    "lab",
    "length_probe",
    "linear",
    "load_policy",
    "make_optimizer",
    "next_run_folder",
    "objectives",
    "pass_at_k",
    "plan_memory",
    "plot_pass_at_k",
    "plot_run",
    "profile",
    "read_completions",
    "read_flags",
    "read_metrics",
    "readiness",
    "red_flags",
    "rewards",
    "roundtrip_drift",
    "sample",
    "stepwise",
    "survival_plot",
    "tasks",
    "update_survival",
    "which_method",
    "wilson_interval",
]
