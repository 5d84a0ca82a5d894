"""Every field of GRPOConfig and of Config has a word on what becomes of it, and the words are true."""

import dataclasses
import math

import pytest
from transformers import get_scheduler
from trl import GRPOConfig

from grpo_kit.loop.config import Config, as_json, from_json
from grpo_kit.more.bridges._trl_config import config_of, fields_of, rates
from grpo_kit.more.bridges._trl_fields import IGNORED, MAPPED, REFUSED, check_fields, is_set
from grpo_kit.schedules import cosine, linear

FIELDS = {each.name for each in dataclasses.fields(GRPOConfig)}
# For each mapped field: what a script sets, the field of Config that follows, and its value; base: `args` below.
EFFECTS = {
    "per_device_train_batch_size": (16, "prompts_per_step", 8),
    "gradient_accumulation_steps": (4, "prompts_per_step", 8),
    "steps_per_generation": (4, "minibatches", 2),
    "generation_batch_size": (64, "prompts_per_step", 16),
    "num_generations": (8, "group_size", 8),
    "num_iterations": (3, "iterations", 3),
    "max_steps": (7, "steps", 7),
    "num_train_epochs": (2.0, "steps", 20),
    "max_completion_length": (33, "max_completion_tokens", 33),
    "seed": (5, "seed", 5),
    "temperature": (0.7, "temperature", 0.7),
    "top_p": (0.9, "top_p", 0.9),
    "top_k": (20, "top_k", 20),
    "min_p": (0.1, "min_p", 0.1),
    "repetition_penalty": (1.1, "repetition_penalty", 1.1),
    "beta": (0.04, "beta", 0.04),
    "use_bias_correction_kl": (False, "loss_options", {"correct_kl": False}),
    "loss_type": ("dr_grpo", "loss", "dr_grpo"),
    "importance_sampling_level": ("sequence", "level", "sequence"),
    "epsilon": (0.1, "epsilon_high", 0.1),
    "epsilon_high": (0.3, "epsilon_high", 0.3),
    "entropy_coef": (0.01, "entropy_bonus", 0.01),
    "scale_rewards": (False, "scale", "none"),
    "mask_truncated_completions": (True, "mask_truncated_completions", True),
    "learning_rate": (5e-6, "learning_rate", linear(5e-6, 5e-6 / 30)),
    "lr_scheduler_type": ("constant", "learning_rate", 1e-6),
    "optim": ("paged_adamw_8bit", "optimizer", "adamw-8bit"),
    "weight_decay": (0.1, "weight_decay", 0.1),
    "max_grad_norm": (0.0, "max_grad_norm", 1e12),
    "bf16": (True, "autocast", "bfloat16"),
    "activation_checkpointing": (True, "gradient_checkpointing", True),
    "gradient_checkpointing": (False, "gradient_checkpointing", False),
    "save_strategy": ("no", "save_steps", 0),
    "save_steps": (0.5, "save_steps", 15),
    "save_total_limit": (3, "save_total_limit", 3),
}  # fmt: skip
# These are tested elsewhere: by what the trainer does, or in a test of their own below.
ELSEWHERE = {
    "output_dir", "reward_weights", "adam_beta1", "adam_beta2", "adam_epsilon", "use_cpu", "model_init_kwargs",
    "trust_remote_code", "disable_dropout", "chat_template_kwargs", "remove_unused_columns", "lr_scheduler_kwargs",
    "warmup_steps", "fp16", "report_to", "project", "trackio_space_id", "eval_strategy", "eval_steps", "eval_on_start",
    *(name for name in MAPPED if name.startswith(("sapo_", "vespo_"))),
}  # fmt: skip
# What a script would set a refused field to.
SETS = {
    "use_vllm": True, "deepspeed": "zero2.json", "fsdp": "full_shard", "parallelism_config": object(),
    "generation_kwargs": {"num_beams": 2}, "delta": 1.5,
    "multi_objective_aggregation": "normalize_then_sum", "sync_ref_model": True, "top_entropy_quantile": 0.2,
    "use_adaptive_entropy": True, "off_policy_mask_threshold": 0.5, "router_aux_loss_coef": 0.01,
    "cast_lm_head_to_fp32": True, "neftune_noise_alpha": 5.0, "optim_args": "a=1", "optim_target_modules": "all-linear",
    "max_tool_calling_iterations": 3, "shuffle_dataset": False, "eval_delay": 2, "bf16_full_eval": True,
    "fp16_full_eval": True, "trackio_bucket_id": "a/b", "trackio_static_space_id": "a/b",
    "load_best_model_at_end": True, "push_to_hub": True, "log_completions_hub_repo": "a/b", "full_determinism": True,
    "resume_from_checkpoint": "runs/x",
}  # fmt: skip


def args(**fields):
    """4 groups of 4 in an update; 30 updates for 40 rows."""
    own = {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4, "bf16": False,
        "use_cpu": True,
    }  # fmt: skip
    return GRPOConfig(output_dir="runs", **{**own, **fields})


def test_every_field_of_the_installed_trl_has_a_word():
    tables = [*MAPPED, *IGNORED, *REFUSED]
    assert set(tables) == FIELDS, "say what becomes of a new field in trl_fields.py"
    assert len(tables) == len(FIELDS)
    assert {*EFFECTS, *ELSEWHERE} == set(MAPPED) and not set(EFFECTS) & ELSEWHERE
    assert set(SETS) == set(REFUSED)


@pytest.mark.parametrize("name", EFFECTS)
def test_a_mapped_field_arrives(name):
    value, field, wanted = EFFECTS[name]
    plain, made = config_of(args(), 40), config_of(args(**{name: value}), 40)
    found = getattr(made, field)
    if callable(found):
        assert [found(p) for p in (0, 0.5, 1)] == pytest.approx(
            [wanted(p) for p in (0, 0.5, 1)]
        )
    else:
        assert found == wanted
    assert getattr(plain, field) != found or name in ("activation_checkpointing",), (
        "the default gives the same"
    )


@pytest.mark.parametrize("name", SETS)
def test_a_refused_field_is_named_with_what_would_do(name):
    asked = args()
    check_fields(asked)
    setattr(asked, name, SETS[name])
    with pytest.raises(ValueError, match=f"{name}=") as error:
        config_of(asked, 40)
    assert REFUSED[name] in str(error.value)


def test_what_means_nothing_is_not_set():
    for fields in ({"router_aux_loss_coef": 0.0}, {"report_to": "none"}):
        check_fields(args(**fields))
    assert not is_set(args(report_to="none"), "report_to") and is_set(
        args(report_to=["wandb"]), "report_to"
    )
    assert [name for name in REFUSED if is_set(args(), name)] == []


def test_options_of_the_losses_that_have_them():
    assert config_of(args(loss_type="sapo", sapo_temperature_neg=2.0), 40).loss_options == {
        "temperature_pos": 1.0,
        "temperature_neg": 2.0,
    }
    assert config_of(args(loss_type="vespo", vespo_k_pos=1.0, vespo_lambda_neg=4.0), 40).loss_options == {
        "k_pos": 1.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 4.0,
    }  # fmt: skip
    assert config_of(args(sapo_temperature_neg=2.0), 40).loss_options == {}
    half = args()
    half.fp16 = True
    assert config_of(half, 40).autocast == "float16"
    assert config_of(args(optim="adamw_8bit"), 40).optimizer == "adamw-8bit"
    assert config_of(args(), 40).optimizer is None


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type"),
        ({"optim": "lion_32bit"}, "optim="),
        ({"save_strategy": "best"}, "save_strategy"),
        ({"loss_type": "bnpo"}, "loss_type='bnpo'"),
        ({"steps_per_generation": 3}, "steps_per_generation=3"),
        (
            {"per_device_train_batch_size": 2, "steps_per_generation": 8, "num_generations": 8},
            "whole groups",
        ),
        ({"max_completion_length": None}, "max_completion_length=None"),
    ],
)
def test_a_value_that_cannot_be_mapped_is_refused(fields, why):
    with pytest.raises(ValueError, match=why):
        config_of(args(**fields), 40)


@pytest.mark.parametrize(
    "kind, warmup, more",
    [
        ("linear", 0, None),
        ("linear", 0.1, None),
        ("cosine", 3, None),
        ("constant", 3, None),
        ("constant_with_warmup", 4, None),
        ("constant_with_warmup", 20, None),  # a line from 0, whose first step TRL has too
        ("cosine_with_min_lr", 2, {"min_lr": 1e-7}),
        ("polynomial", 0, {"lr_end": 1e-7, "power": 2.0}),
    ],
)
@pytest.mark.parametrize("passes", [1, 2])
def test_each_steps_rate_is_that_of_transformers(kind, warmup, more, passes):
    asked = args(
        lr_scheduler_type=kind, warmup_steps=warmup, lr_scheduler_kwargs=more, max_steps=20 * passes,
        num_iterations=passes, learning_rate=1e-5,
    )  # fmt: skip
    config = config_of(asked, 40)
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-5)
    ramp = math.ceil(warmup * 20 * passes) if warmup < 1 else warmup
    schedule = get_scheduler(kind, optimizer, ramp, 20 * passes, scheduler_specific_kwargs=more)
    wanted = []
    for _ in range(20 * passes):
        wanted.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    wanted = [sum(wanted[i : i + passes]) / passes for i in range(0, len(wanted), passes)]
    assert config.steps == 20
    assert [config.at(step).learning_rate for step in range(20)] == pytest.approx(
        wanted, rel=1e-6, abs=1e-15
    )
    # what a resumed run reads
    again = from_json("learning_rate", as_json(config.learning_rate), None)
    config.learning_rate = again
    assert [config.at(step).learning_rate for step in range(20)] == pytest.approx(
        wanted, rel=1e-6, abs=1e-15
    )


def test_a_schedule_reads_as_what_it_is():
    assert rates(args(lr_scheduler_type="constant"), 30, 1) == 1e-6
    found = rates(args(), 30, 1)
    assert (
        isinstance(found, linear)
        and found.start == 1e-6
        and found.end == pytest.approx(1e-6 / 30)
    )


def test_steps_are_rollouts():
    config = config_of(args(steps_per_generation=4, num_iterations=2, max_steps=9), 40)
    # 9 updates, 4 a rollout
    assert (config.minibatches, config.prompts_per_step, config.steps) == (2, 8, 3)
    assert config_of(args(save_steps=10, num_iterations=4), 40).save_steps == 3
    assert config_of(args(save_strategy="epoch"), 43).save_steps == 10  # 43 // 4 groups
    assert config_of(args(), 40).save_total_limit == 30  # all stay


# ---- the way back -----------------------------------------------------------------------------------------------


class Read(Config):
    """A Config that knows which of its fields were asked for."""

    def __getattribute__(self, name):
        object.__getattribute__(self, "__dict__").setdefault("_read", set()).add(name)
        return super().__getattribute__(name)


def test_every_field_of_config_is_read_on_the_way_back():
    config = Read(learning_rate=1e-5)
    object.__getattribute__(config, "__dict__")["_read"] = set()
    fields_of(config, 9, [1.0], 1, {})
    left = {each.name for each in dataclasses.fields(Config)} - object.__getattribute__(
        config, "__dict__"
    )["_read"]
    with_the_task = {
        "max_completion_tokens",
        "reward_weights",
    }  # to_trl reads these two, with the task's beside them
    assert left <= {*with_the_task, "reasons"}


def test_there_and_back_gives_the_same_config():
    first = Config(
        steps=6, prompts_per_step=8, group_size=4, max_completion_tokens=9, iterations=2, minibatches=2, seed=4,
        temperature=0.8, top_p=0.9, loss="vespo", level="sequence", epsilon=0.1, epsilon_high=0.4, beta=0.02,
        loss_options={"k_pos": 1.0, "lambda_pos": 2.0, "k_neg": 1.5, "lambda_neg": 2.5, "correct_kl": False},
        entropy_bonus=0.01, scale="batch", mask_truncated_completions=True, learning_rate=2e-6, warmup=0,
        optimizer="adamw-8bit", weight_decay=0.1, max_grad_norm=0.5, gradient_checkpointing=True, micro_batch=4,
        save_steps=2, save_total_limit=3,
    )  # fmt: skip
    made, left = fields_of(first, 9, [1.0, 3.0], 1, {})
    again = config_of(GRPOConfig("runs", use_cpu=True, **made), 40)
    assert again.values() == first.values() and left == []
    assert made["reward_weights"] == [1.0, 3.0] and made["max_steps"] == 24


def test_what_trl_cannot_be_told_is_said_by_name():
    config = Config(
        temperature=linear(1.2, 0.6), beta=cosine(0.1, 0.01), learning_rate=linear(1e-6, 2e-6), dynamic_sampling=2,
        positive_weight=2.0, negative_weight=0.5, optimizer="adamw-8bit-split",
    )  # fmt: skip
    made, left = fields_of(config, 9, [1.0], 1, {})
    assert (made["temperature"], made["beta"], made["learning_rate"]) == (1.2, 0.1, 1e-6)
    named = [line.split("=")[0] for line in left]
    assert sorted(named) == sorted(
        [
            "dynamic_sampling",
            "positive_weight",
            "negative_weight",
            "temperature",
            "beta",
            "learning_rate",
            "optimizer",
        ]
    )
    assert (
        made["loss_type"] == "dapo"
        and fields_of(Config(loss="gspo"), 9, [1.0], 1, {})[0]["loss_type"] == "grpo"
    )


@pytest.mark.parametrize("rate", [linear(1e-5, 1e-6), cosine(1e-5, 1e-6), linear(1e-5, 0)])
def test_a_falling_rate_falls_there_too(rate):
    config = Config(steps=200, learning_rate=rate, warmup=0)
    made, left = fields_of(config, 9, [1.0], 1, {})
    back = config_of(
        GRPOConfig(
            "runs", bf16=False, use_cpu=True, **{k: v for k, v in made.items() if k != "bf16"}
        ),
        2000,
    )
    assert not left
    for step in (0, 50, 100, 199):
        assert back.at(step).learning_rate == pytest.approx(
            config.at(step).learning_rate, rel=0.05
        )


def test_a_rate_that_rises_from_0_is_refused_as_trl_would_stay_there():
    with pytest.raises(ValueError, match="starts at 0.*warmup=30"):
        fields_of(Config(steps=30, learning_rate=linear(0, 1e-5)), 9, [1.0], 1, {})


@pytest.mark.parametrize(
    "processes, at_once, parts", [(1, 8, 8), (2, 8, 4), (4, 8, 2), (16, 4, 1)]
)
def test_a_batch_is_divided_among_processes(processes, at_once, parts):
    made, _ = fields_of(Config(minibatches=2, prompts_per_step=16), 9, [1.0], processes, {})
    assert (
        made["per_device_train_batch_size"] == at_once
        and made["gradient_accumulation_steps"] == parts
    )
    assert made["steps_per_generation"] == 2 * parts


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(ValueError, match="3 processes"):
        fields_of(Config(), 9, [1.0], 3, {})
    made, _ = fields_of(Config(), 9, [1.0], 1, {"per_device_train_batch_size": 2})
    assert made["gradient_accumulation_steps"] == 32
    with pytest.raises(ValueError, match="per_device_train_batch_size=5"):
        fields_of(Config(), 9, [1.0], 1, {"per_device_train_batch_size": 5})
