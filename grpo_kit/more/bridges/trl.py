"""from_trl: a TRL GRPO script runs in the loop. to_trl: a task of the kit runs under TRL, on more than one card.

A script changes two lines:

    from trl import GRPOConfig                              # was: GRPOConfig, GRPOTrainer
    from grpo_kit.more.bridges import from_trl
    trainer = from_trl(model, reward_funcs=..., args=..., train_dataset=..., processing_class=...)  # was: GRPOTrainer(

Where the loop differs from TRL's trainer on the same fields:
- A completion that one reward judges and another does not, in a group where both judge some, has no total and so no
  advantage. TRL counts what is missing as 0.
- With several updates a rollout, each takes whole groups and divides by its own tokens. TRL mixes the groups, and
  divides by the mean of the rollout.
- The order of the rows and every sampled token are others: they follow from (seed, step).
- Prompts of messages that end in the assistant's words are continued. TRL opens a second message behind them.
- A run's folder must be new. trainer.save() writes a checkpoint; save_model(args.output_dir) writes its `model`.
- Held-out rows, eval_dataset, are answered once, greedily, as eval_strategy says; a tracker of report_to sends nothing
  unless it is asked to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

try:
    from trl import GRPOConfig
    from trl import GRPOTrainer as TRLTrainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'from_trl and to_trl need trl; pip install "grpo-kit[trl]"'
    ) from error

from grpo_kit._support.argument_checks import (
    check_known,
    check_model,
    check_task,
    template_tokens,
)
from grpo_kit._support.unsloth import changed_defaults
from grpo_kit.loop.config import Config
from grpo_kit.loop.protocols import Hook
from grpo_kit.loop.run_checks import check_tags
from grpo_kit.models.loading import load_policy
from grpo_kit.more.bridges._trl_config import config_of, fields_of, steps_between
from grpo_kit.more.bridges._trl_fields import IGNORED, PRINTED, is_set
from grpo_kit.more.bridges._trl_task import TrlTask, warn_of_bare_prompt
from grpo_kit.more.bridges.trackers import Trackio, by_name
from grpo_kit.record._run_folder import path_of
from grpo_kit.rewards._parts import reward_names
from grpo_kit.rewards.scoring import PendingScores
from grpo_kit.trainer.grpo_trainer import Autosave, GRPOTrainer
from grpo_kit.trainer.held_out import HeldOut

_ELSEWHERE = {
    "callbacks": "write them as hooks of grpo_kit.loop.protocols and give them as hooks=",
    "optimizers": "leave it out, and name one by args.optim",
    "reward_processing_classes": "write a function that calls the reward model, and give that",
    "quantization_config": "load the model with it first, and give the model",
    "tools": "use trl.GRPOTrainer",
    "rollout_func": "write it as the loop's sample, and set trainer.sample",
    "environment_factory": "use trl.GRPOTrainer",
}


class _FollowTRL(Hook):
    """Keeps the trainer_state of rewards up to date, and saves after the last step as save_strategy='steps' does."""

    def __init__(self, task: TrlTask, a_step: int, *, save_last: bool) -> None:
        self.state, self.a_step, self.save_last = task.state, a_step, save_last

    def before_step(self, trainer: GRPOTrainer) -> None:
        """Updates done, updates in all, and passes over the rows."""
        self.state.global_step = trainer.step * self.a_step
        self.state.max_steps = trainer.config.steps * self.a_step
        per_pass = len(trainer.task.train) // trainer.config.prompts_per_step
        self.state.epoch = trainer.step / per_pass

    def end(self, trainer: GRPOTrainer, error: BaseException | None) -> None:
        """A checkpoint of the finished run."""
        if self.save_last and error is None:
            trainer.save()


def from_trl(
    model: Any,
    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
    args: GRPOConfig | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    *,
    processing_class: PreTrainedTokenizerBase | None = None,
    peft_config: Any = None,
    folder: str | Path | None = None,
    hooks: Sequence[Hook] = (),
    **unsupported: Any,
) -> GRPOTrainer:
    """A trainer of the loop, made of what trl.GRPOTrainer takes; trainer.train() trains.

    model: a model, or a name that is loaded in float32 unless args.model_init_kwargs says otherwise.
    reward_funcs: functions, called as TRL calls them; any finite numbers. args: _trl_fields.py has what becomes of each
    field. train_dataset: a column "prompt" of texts or messages, and the columns that rewards need.
    eval_dataset: held-out rows, measured as args.eval_strategy says.
    peft_config: adapters to train in place of all weights. folder: of the run; default args.output_dir.
    hooks: of the loop, see Hook.
    Prints what it ignores and does otherwise, a line each. Everything but the model is checked before it is loaded.
    Raises ValueError, naming the field or argument and what would do, for what the loop cannot do.

    >>> trainer = from_trl(model, [accuracy], GRPOConfig("runs/demo"), rows)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """
    check_known("from_trl and trl.GRPOTrainer have no such argument", unsupported, _ELSEWHERE)
    for name, value in unsupported.items():
        if value not in (None, [], (None, None)):
            raise ValueError(f"{name}: from_trl cannot do this; {_ELSEWHERE[name]}")
    if isinstance(model, str):
        model = path_of(model, "model").as_posix()
    else:
        check_model(model)
    args = GRPOConfig(f"{_name(model)}-GRPO") if args is None else args
    if not isinstance(args, GRPOConfig):
        raise ValueError(f"args={args!r:.100} must be a trl.GRPOConfig(...)")
    task = TrlTask(
        [] if train_dataset is None else train_dataset,
        reward_funcs,
        held_out=eval_dataset,
        reward_weights=args.reward_weights,
        max_completion_tokens=args.max_completion_length,
        template=args.chat_template_kwargs,
        columns=not args.remove_unused_columns,
    )
    config = config_of(args, len(task.train))
    held_out = _held_out(task, config, args)
    trackers = [_tracker(name, args) for name in args.report_to]
    model, tokenizer = _loaded(model, processing_class, args)
    model = _prepared(model, peft_config, args)
    warn_of_bare_prompt(tokenizer, task.train[0]["question"])
    bfloat16 = any(p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters())
    if bfloat16 and config.optimizer == "adamw-8bit":
        config.optimizer = "adamw-8bit-split"
    a_step = config.iterations * config.minibatches
    _print_differences(args, a_step)
    save_last = args.save_strategy == "steps"
    trainer = GRPOTrainer(
        model,
        task,
        config,
        tokenizer=tokenizer,
        folder=folder or args.output_dir or "trainer_output",
        held_out=held_out,
        hooks=[_FollowTRL(task, a_step, save_last=save_last), *hooks, *trackers],
    )
    # save_strategy decides.
    trainer.hooks = [hook for hook in trainer.hooks if not isinstance(hook, Autosave)]
    for group in trainer.optimizer.param_groups:
        group["betas"], group["eps"] = (args.adam_beta1, args.adam_beta2), args.adam_epsilon
    return trainer


def to_trl(
    task: Any,
    config: Config,
    model: Any,
    tokenizer: Any,
    output_dir: str | Path,
    **overrides: Any,
) -> TRLTrainer:
    """A trl.GRPOTrainer on the task, for what one card does not do: several by accelerate, DeepSpeed, FSDP; vLLM.

    task: of one turn, with its data set, rewards and weights. config: _trl_config.py says what becomes of each field.
    model: loaded, or its name where its weights are to be divided as they are loaded.
    overrides: fields of GRPOConfig (use_vllm=True, deepspeed="zero3.json"), and arguments of trl.GRPOTrainer
    (callbacks, peft_config). They stand before the config's.
    A batch is divided among the processes that torchrun or accelerate started. Completions end at the same tokens: TRL
    reads them from the tokenizer and the model, as the loop does.
    Prints each field of the config that TRL cannot be told.
    Raises ValueError for a task of episodes, for tags that are special tokens, which TRL takes out of completions, and
    for a batch that cannot be divided.

    >>> trainer = to_trl(task, Config(steps=100), model, tokenizer, "runs/two-cards")  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """
    check_task(task)
    if not hasattr(task, "dataset") or not hasattr(task, "rewards"):
        raise ValueError(
            f"task={task!r:.100} has no data set and rewards of one turn; of episodes give TRL an environment_factory"
        )
    if isinstance(model, str):
        model = path_of(model, "model").as_posix()
    else:
        check_model(model)
    special = template_tokens(tokenizer, ends=tokenizer.added_tokens_decoder)
    check_tags(task, special.values(), "TRL takes out of completions")
    weights = list(config.reward_weights or task.reward_weights)
    length = config.max_completion_tokens or task.max_completion_tokens
    processes = int(os.environ.get("WORLD_SIZE", 1))
    fields, notes = fields_of(config, length, weights, processes, overrides)
    fields = changed_defaults(GRPOConfig) | fields
    arguments = {}
    for name, value in overrides.items():
        place = fields if name in GRPOConfig.__dataclass_fields__ else arguments
        place[name] = value
    if notes:
        print("Not carried over to TRL:", *notes, sep="\n  ")
    names = reward_names(task.rewards)
    return TRLTrainer(
        model=model,
        reward_funcs=[
            PendingScores(r, name) for r, name in zip(task.rewards, names, strict=True)
        ],
        args=GRPOConfig(str(path_of(output_dir, "output_dir")), **fields),
        train_dataset=task.dataset(tokenizer),
        processing_class=tokenizer,
        **arguments,
    )


def _print_differences(args: GRPOConfig, a_step: int) -> None:
    """A line for each field that is set and ignored, and for a last rollout that TRL would cut."""
    for name in PRINTED:
        if is_set(args, name):
            print(f"Ignored: {name}={getattr(args, name)!r}; {IGNORED[name]}.")
    if args.max_steps > 0 and args.max_steps % a_step:
        print(
            f"max_steps={args.max_steps} ends inside a rollout of {a_step} updates; it is finished."
        )


def _held_out(task: TrlTask, config: Config, args: GRPOConfig) -> HeldOut | None:
    """All held-out rows, measured as often as args says; None where it does not ask."""
    a_step, per_epoch = (
        config.iterations * config.minibatches,
        len(task.train) // config.prompts_per_step,
    )
    every = steps_between("eval", args, config.steps * a_step, a_step, per_epoch)
    if not every and not args.eval_on_start:
        return None
    if not task.held_out:
        raise ValueError(
            "eval_strategy needs rows that are never trained on: give them as eval_dataset"
        )
    return HeldOut(task, rows=len(task.held_out), every=every or config.steps)


def _tracker(name: str, args: GRPOConfig) -> Hook:
    """The tracker of this name, in the project and Space of trackio that args has."""
    if name != "trackio":
        return by_name(name)
    return Trackio(args.project, space_id=args.trackio_space_id)


def _name(model: Any) -> str:
    return str(model if isinstance(model, str) else model.name_or_path).split("/")[-1]


def _loaded(
    model: Any, tokenizer: Any, args: GRPOConfig
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model and its tokenizer, of names too. Raises ValueError for a processor of images."""
    source, options = model, dict(args.model_init_kwargs or {})
    if isinstance(model, str):
        dtype = options.pop("dtype", options.pop("torch_dtype", "float32"))
        if options or args.trust_remote_code or dtype == "auto":
            options |= {"dtype": dtype, "trust_remote_code": args.trust_remote_code}
            model = AutoModelForCausalLM.from_pretrained(source, **options)
        else:
            model, loaded_tokenizer = load_policy(source, dtype=dtype, quiet=True)
            if tokenizer is None:
                tokenizer = loaded_tokenizer
    else:
        source = model.name_or_path
    if tokenizer is None:
        revision = options.get("revision", "main")
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=args.trust_remote_code, revision=revision
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(
            f"processing_class is a {type(tokenizer).__name__}; the loop trains on text: give a tokenizer"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def _prepared(model: Any, peft_config: Any, args: GRPOConfig) -> Any:
    """The model on its device, with new adapters where peft_config is given, and no dropout if args says so.

    Raises ValueError for a second adapter, and a mixture of experts whose router has a loss of its own.
    """
    text = model.config.get_text_config()
    coefficient = args.router_aux_loss_coef
    if coefficient is None:
        coefficient = getattr(text, "router_aux_loss_coef", 0.0)
    if coefficient and hasattr(text, "output_router_logits"):
        raise ValueError(
            f"router_aux_loss_coef={coefficient!r} of this mixture of experts: the loop has no loss for the router; "
            "set it to 0.0, or use trl.GRPOTrainer"
        )
    if peft_config is not None:
        if hasattr(model, "peft_config"):
            raise ValueError(
                "peft_config beside a model that has adapters; give one of the two"
            )
        from peft import get_peft_model

        with torch.random.fork_rng():
            torch.manual_seed(args.seed)
            model = get_peft_model(model, peft_config)
    if args.disable_dropout:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    placed = getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
    return model if placed else model.to(args.device)
