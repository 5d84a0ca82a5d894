"""What is checked before a run's first step, and before a change, so that it does not fail in the middle of the run."""

from __future__ import annotations

import math
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_kit._support.argument_checks import check_job, template_tokens
from grpo_kit.engine.optim.choose import OPTIMIZERS
from grpo_kit.loop.batch import render
from grpo_kit.loop.config import CANNOT_CHANGE, FIELDS, Config, Preset, check_fields
from grpo_kit.loop.config_checks import check_steps, check_together
from grpo_kit.loop.processes import autocast
from grpo_kit.loop.protocols import Task
from grpo_kit.models._model_facts import base_model, end_ids, evaluating, has_adapters
from grpo_kit.models.token_lists import left_pad, logits_of
from grpo_kit.record._digests import checkpoints
from grpo_kit.rewards._parts import check_calls, with_parts

# The arguments that score() gives every reward, besides the columns of its rows.
_REWARD_ARGUMENTS = {
    "completions",
    "prompts",
    "completion_ids",
    "prefill",
    "log_extra",
    "log_metric",
}
_OPEN_TAG = re.compile(r"<(\w+)>\s*\Z")
_GIB = 2**30
_TRAINED = "_grpo_kit_trained"  # a model's own mark: (folder, steps)


# ---- the arguments of a trainer ----------------------------------------------------------------------------------


def check_given(
    model: Any, task: Any, config: Any, tokenizer: Any, sample: Any, update: Any, hooks: Any
) -> None:
    """Raises ValueError, with what would do, where an argument of a trainer is something else than it takes."""
    check_job(model, tokenizer, task)
    if config is not None and not isinstance(config, Config):
        call = (
            f"kit.preset({config!r})"
            if isinstance(config, str)
            else "kit.Config(...) or kit.preset(...)"
        )
        raise ValueError(f"config={config!r:.100} must be a Config, as {call} makes one")
    check_together(config or Config())  # fields may have been assigned one by one since
    embeddings = (
        model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    )
    count = getattr(embeddings, "num_embeddings", len(tokenizer))
    if len(tokenizer) > count:
        raise ValueError(
            f"tokenizer has {len(tokenizer) - count} tokens more than the model's {count} embeddings; call "
            "model.resize_token_embeddings(len(tokenizer)) first, or load the tokenizer that belongs to the model"
        )
    if sample is not None and not callable(sample):
        raise ValueError(
            f"sample={sample!r:.100} must be a function as generate is; vLLM's is VllmSample()"
        )
    if update is not None and not hasattr(update, "gradients"):
        raise ValueError(
            f"update={update!r:.100} must have gradients and logprobs, as PaddedUpdate has"
        )
    if not isinstance(hooks, Sequence):
        raise ValueError(f"hooks={hooks!r:.100} must be a list of them: hooks=[...]")
    for hook in hooks:
        if isinstance(hook, type):
            raise ValueError(
                f"hooks has {hook!r:.100}, which is no Hook; make one: {hook.__name__}()"
            )
        if not hasattr(hook, "before_step"):
            raise ValueError(f"hooks has {hook!r:.100}, which is no Hook; subclass kit.Hook")


def check_run(model: Any, tokenizer: Any, task: Task, config: Config) -> None:
    """Raises ValueError, with what would do, for a model, a task and a config that do not fit together."""
    if len(task.train) < config.prompts_per_step:
        raise ValueError(
            f"task {task.name!r} has {len(task.train)} train rows, and prompts_per_step={config.prompts_per_step} "
            "needs as many different ones; add rows or lower it"
        )
    _check_weights(task, config.reward_weights)
    _check_loaded(config, model)
    _check_precision(config, model)
    _check_task(model, tokenizer, task, config)


def _check_loaded(config: Config, model: torch.nn.Module) -> None:
    """Raises ValueError for a model that was loaded otherwise than the config says: another tuning or dtype."""
    if not isinstance(config, Preset):
        return
    load = "load it with load_policy(cfg.model, tuning=cfg.tuning, dtype=cfg.dtype), or change the config"
    if config.tuning is not None and (config.tuning == "full") == has_adapters(model):
        count = "" if has_adapters(model) else "no "
        raise ValueError(f"tuning={config.tuning!r}: this model has {count}adapters; {load}")
    if config.dtype is not None and config.tuning != "qlora":
        frozen = has_adapters(model)  # adapters are float32 over weights of any dtype
        largest = max(
            (p for p in model.parameters() if p.requires_grad != frozen), key=torch.numel
        )
        dtype = str(largest.dtype).removeprefix("torch.")
        if dtype != config.dtype:
            raise ValueError(
                f"dtype={config.dtype!r}: this model's weights are {dtype}; {load}"
            )


def _check_precision(config: Config, model: torch.nn.Module) -> None:
    """Raises ValueError for a scaled loss over trained weights of 16 bits: their gradients cannot be scaled back."""
    narrow = {p.dtype for p in model.parameters() if p.requires_grad} - {torch.float32}
    if config.autocast == "float16" and narrow:
        dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
        raise ValueError(
            f"autocast='float16' trains float32 weights only, these are {dtypes}: load with dtype='float32', or with "
            "tuning='lora', whose adapters are float32 over weights of any dtype"
        )


# ---- the task ----------------------------------------------------------------------------------------------------


def _check_task(model: Any, tokenizer: Any, task: Task, config: Config) -> None:
    """Refuse what would fail after a rollout, in train and held-out rows alike.

    Raises ValueError for a reward that the call does not fit, for a tag that ends a completion, and for a prompt that
    cannot be rendered, has no tokens or leaves no room for a completion. Warns where right answers are longer than a
    completion may be.
    A task that is played makes its prompts meanwhile: they are checked there.
    """
    missing_names = [name for name in Task.__annotations__ if not hasattr(task, name)]
    if missing_names:
        raise ValueError(
            f"task={task!r:.100} has no {', '.join(missing_names)}; a class of your own has what it leaves out from "
            "grpo_kit.loop.protocols.Task, if it subclasses it"
        )
    if hasattr(task, "play"):
        return
    rows = [*task.train, *task.held_out]
    columns = set.intersection(*(set(row) for row in rows))
    check_calls(task.rewards, _REWARD_ARGUMENTS | columns, f"task {task.name!r}")
    check_tags(
        task,
        template_tokens(tokenizer, end_ids(model, tokenizer)).values(),
        "ends a completion",
    )
    prompts = render(model, tokenizer, task, rows, config.max_completion_tokens)
    if config.autocast == "float16":
        _check_products(model, prompts[0], config)
    if task.answers_are != "anything":
        _warn_of_long_answers(tokenizer, task, config.max_completion_tokens)


def _warn_of_long_answers(tokenizer: Any, task: Task, max_completion_tokens: int) -> None:
    open_tag = _OPEN_TAG.search(task.prefill)
    closing = f"</{open_tag[1]}>" if open_tag else ""
    texts = [f"{row['answer']}{closing}" for row in task.train]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    too_long = sum(length > max_completion_tokens for length in lengths)
    if too_long:
        warnings.warn(
            f"task {task.name!r}: of {len(lengths)} right answers {too_long} have more than max_completion_tokens="
            f"{max_completion_tokens} tokens (the longest {max(lengths)}), so that they can only be cut off; "
            "kit.length_probe measures what is needed",
            UserWarning,
            stacklevel=6,
        )


def check_tags(task: Task, tokens: Iterable[str], role: str) -> None:
    """Raises ValueError where a tag of the task, or a text around its questions, has a token that rewards do not see.

    tokens: those taken out of completions. role: what becomes of it, for the message.
    """
    names = {task.answer_tag}
    for part in with_parts(task.rewards):
        names |= {getattr(part, name, None) for name in ("tag", "think", "answer")}
    texts = []
    for name in sorted(name for name in names if isinstance(name, str)):
        texts += [f"<{name}>", f"</{name}>"]
    texts += [task.prefill, task.system or ""]
    for pair in task.examples:
        texts += pair
    for text in texts:
        token = next((token for token in tokens if token in text), None)
        if token:
            raise ValueError(
                f"task {task.name!r}: {text!r:.100} has the special token {token!r}, which {role}, so that no reward "
                "would see it; write the task with another answer_tag or text, or add the token with special=False"
            )


def _check_products(model: torch.nn.Module, prompt: list[int], config: Config) -> None:
    device = next(model.parameters()).device
    with evaluating(model), torch.no_grad(), autocast(config, device):
        logits = logits_of(model, *left_pad([prompt], 0, device), 1)
    if not logits.isfinite().all():  # no scale of the loss mends it
        raise ValueError(
            "autocast='float16': the model's own numbers pass 65,504 on the first prompt and overflow, so that no "
            "update could be made; give autocast='bfloat16' or 'none'"
        )


# ---- a change while the run trains -------------------------------------------------------------------------------


def check_names(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a name that is no field, with the nearest one, and for a field that cannot change."""
    check_fields(values)
    for name, value in values.items():
        if not FIELDS[name].metadata["changes"]:
            changeable = ", ".join(
                field for field in FIELDS if FIELDS[field].metadata["changes"]
            )
            cure = f"what can: {changeable}. For another {name} make a new trainer, with a new folder"
            raise ValueError(f"{name}={value!r} {CANNOT_CHANGE}; {cure}")


def check_values(trainer: Any, values: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that cannot change, or not to that value in this run. Nothing is set here."""
    check_names(values)
    if values.get("beta") and trainer.reference is None:
        raise ValueError(
            f"beta={values['beta']!r}: the trainer was made with beta=0, so it has no reference; make it with a "
            "small beta above 0"
        )
    _check_weights(trainer.task, values.get("reward_weights"))
    check_steps(trainer.config, **values)
    if values.get("steps", trainer.step) < trainer.step:
        raise ValueError(
            f"steps={values['steps']!r}: {trainer.step} are done already; give more, or stop"
        )


def _check_weights(task: Task, weights: list[float] | None) -> None:
    """Raises ValueError unless there is one a reward of the task, or None."""
    if weights is not None and len(weights) != len(task.reward_weights):
        count = len(task.reward_weights)
        raise ValueError(
            f"reward_weights={weights!r}: the task has {count} rewards; give one number each"
        )


# ---- the disk ----------------------------------------------------------------------------------------------------


def lacks_room(
    folder: Path, model: torch.nn.Module, optimizer: str, config: Config, step: int
) -> str | None:
    """One line where the folder's disk is too small for the checkpoints to come; None where it is not.

    optimizer: its name. step: steps that are done.
    """
    size = checkpoint_bytes(model, optimizer)
    # The newest checkpoints stay.
    saves = math.ceil((config.steps - step) / config.save_steps) if config.save_steps else 1
    count = len(checkpoints(folder))
    # The next one is written before the oldest goes.
    additional = max(min(saves, config.save_total_limit + 1 - count), 0)
    disk = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(disk).free
    if additional * size <= free:
        return None
    return (
        f"The disk of {folder} is too small: a checkpoint takes {size / _GIB:.1f} GiB, {additional} more will lie "
        f"there at a time, and {free / _GIB:.1f} GiB are free. Free some, save less often (save_steps) or keep fewer "
        "(save_total_limit); what cannot be saved where it is stopped stays in memory alone."
    )


def checkpoint_bytes(model: torch.nn.Module, optimizer: str) -> int:
    """Bytes of one checkpoint: the weights, of adapters what is trained, and the optimizer's state."""
    adapters, choice = has_adapters(model), OPTIMIZERS[optimizer]
    size = 0.0
    for p in model.parameters():
        if p.requires_grad or not adapters:
            size += p.numel() * p.element_size()
        if p.requires_grad:
            size += p.numel() * choice.state_of(p.element_size())
    return int(size)


# ---- a model in memory that a run has trained ---------------------------------------------------------------------


def mark_trained(model: Any, folder: Path | str | None, steps: int) -> None:
    """The model in memory has the weights that a run made; (None, 0): as loaded. See trained_before."""
    setattr(base_model(model), _TRAINED, (folder and str(folder), steps))


def trained_in(model: Any) -> tuple[str | None, int]:
    """The folder of the run that a model in memory was trained in, and its steps; (None, 0) for one as loaded."""
    return getattr(base_model(model), _TRAINED, (None, 0))


def trained_before(model: Any, folder: Path) -> str | None:
    """The run, other than the one in `folder`, that a model in memory was trained in."""
    run, steps = trained_in(model)
    return None if run in (None, str(folder)) else f"{steps} steps in {run}"
