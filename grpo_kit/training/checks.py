"""What is checked before training starts."""

from __future__ import annotations

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from datasets import Dataset, IterableDataset
from torch.nn import Module

from grpo_kit.prompts import from_list
from grpo_kit.rewards.judge import all_parts, check_columns, reward_names
from grpo_kit.training.messages import prefill_of

_AT_ONCE = 1000  # prompts tokenized together
_PROBE = "KITPROBE"  # a word that no template holds


def as_data(data: Any, name: str) -> Any:
    """What trl takes as a data set: itself, a list of dicts made into one, a dict of such by name.

    name: the argument's. Raises ValueError for anything else, naming what would do.
    """
    if data is None or isinstance(data, (Dataset, IterableDataset)):
        return data
    if isinstance(data, (list, tuple)) and data:
        return from_list(data, name)
    if isinstance(data, dict):  # a DatasetDict too
        if name == "eval_dataset" and data:
            return {key: as_data(value, f"{name}[{key!r}]") for key, value in data.items()}
        raise ValueError(
            f"{name} is a {type(data).__name__} of {sorted(map(str, data))}; give one of them, such as "
            f"data[{next(iter(data), 'train')!r}]"
        )
    kind = type(data).__name__
    cure = "Dataset.from_pandas(frame)" if kind == "DataFrame" else "a list of dicts"
    rows = " without rows" if isinstance(data, (list, tuple)) else ""
    raise ValueError(f"{name} is a {kind}{rows}; use a datasets.Dataset, an IterableDataset or {cure}")


def check_reward_kinds(rewards: Sequence[Any], tokenizers: Any) -> None:
    """Refuse what trl cannot ask: objects that are not called, and reward models whose tokenizer nobody names.

    tokenizers: reward_processing_classes. Raises ValueError naming the reward and what would do.
    """
    given = tokenizers if isinstance(tokenizers, (list, tuple)) else [tokenizers] * len(rewards)
    for i, reward in enumerate(rewards):
        kind = type(reward).__name__
        if not callable(reward) and not isinstance(reward, str):
            raise ValueError(
                f"reward_funcs[{i}] is a {kind}, which cannot be called; give f(completions, **columns) -> list of "
                "numbers in [0, 1], a sequence-classification model of transformers, or the name of one"
            )
        config = getattr(reward, "config", None) if isinstance(reward, Module) else None
        if config is not None and not config._name_or_path and (i >= len(given) or given[i] is None):
            raise ValueError(
                f"reward_funcs[{i}] is a {kind} that was not loaded from a folder or the hub, so its tokenizer is not "
                "known; give it as reward_processing_classes, a list with one entry a reward (None for functions)"
            )


def check_rewards(rewards: Sequence[Callable], *, environments: bool) -> None:
    """Refuse rewards that would fail after a rollout: parts of one name, or parameters that trl's call does not fit.

    rewards: those that trl calls as functions. environments: is there an environment_factory?
    """
    named = {id(p): n for r in rewards for p, n in zip(all_parts(r), getattr(r, "names", ()), strict=False)}
    twice = sorted(name for name, count in Counter(named.values()).items() if count > 1)
    if twice:
        raise ValueError(
            f"reward_funcs has several parts named {twice}; metrics are kept by name, so set __name__ on one"
        )
    given = ["completions", "prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"]
    given += ["environments"] * environments
    for reward in rewards:
        try:
            parameters = inspect.signature(reward).parameters
        except (TypeError, ValueError):  # some built-in callables have none
            continue
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        by_name = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        refused = [name for name in given if name not in by_name and not takes_all]
        if refused:
            raise ValueError(
                f"reward {reward_names([reward])[0]!r} has the parameters ({', '.join(parameters)}), but is called "
                f"with {', '.join(refused)} and the data set's columns too, by keyword; add **columns to its parameters"
            )


def check_data(
    data: Any,
    name: str,
    rewards: Sequence[Callable],
    *,
    least: int = 1,
    environments: bool = False,
    more_columns: bool = False,
) -> None:
    """Refuse data that trl would fail on late, or train 0 steps on with only a warning.

    data: as as_data gives it; an IterableDataset is only checked for columns that it declares. name: the argument's.
    least: unique prompts of one rollout buffer. environments: the prompts may come from them. more_columns: a
    rollout_func may add columns that rewards ask for.
    Raises ValueError naming what is missing.
    """
    if isinstance(data, dict):
        for key, part in data.items():
            check_data(
                part,
                f"{name}[{key!r}]",
                rewards,
                least=least,
                environments=environments,
                more_columns=more_columns,
            )
    elif data is not None:
        _check_size(data, name, least)
        columns = data.column_names
        if columns is None:
            return
        if "prompt" not in columns and not environments:
            raise ValueError(
                f"{name} has columns {columns} but no 'prompt'; build it with grpo_kit.build_dataset"
            )
        messages = isinstance(data, Dataset) and "prompt" in columns and prefill_of(data[0]["prompt"])
        if not more_columns:
            check_columns(rewards, [*columns, "prefill"] if messages else columns, name)


def _check_size(data: Any, name: str, least: int) -> None:
    if not isinstance(data, Dataset):
        return
    if len(data) == 0:
        raise ValueError(f"{name} is empty; give it at least one prompt{' a step' if least > 1 else ''}")
    if len(data) < least:
        raise ValueError(
            f"{name} has {len(data)} prompts, but one step needs {least} different ones "
            "(generation_batch_size / num_generations); add rows or lower the batch"
        )


def check_prompts(trainer: Any, data: Any, name: str) -> None:
    """Refuse prompts that cannot be rendered, or leave no room for a completion.

    trl never truncates, the model would read past its end. Prompts of a Dataset are checked, as text or as messages;
    not those that an environment, a rollout_func or images change, nor an IterableDataset's.
    Raises ValueError naming the row. Warns once of texts that hold nothing of the tokenizer's chat template.
    """
    if isinstance(data, dict):
        for key, part in data.items():
            check_prompts(trainer, part, f"{name}[{key!r}]")
        return
    changed = trainer.environment_factories is not None or trainer.rollout_func is not None or trainer._is_vlm
    if not isinstance(data, Dataset) or changed:
        return
    context = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    completion = trainer.max_completion_length
    for first in range(0, len(data), _AT_ONCE):
        prompts = data[first : first + _AT_ONCE]["prompt"]
        for row, ids in enumerate(_ids(trainer, prompts, name, first), start=first):
            if not ids:
                raise ValueError(f"{name} row {row}: its prompt has no tokens; give it at least one")
            if len(ids) + completion > context:
                raise ValueError(
                    f"{name} row {row}: its prompt has {len(ids)} tokens, which with max_completion_length="
                    f"{completion} exceeds the model's context of {context}; drop the row or shorten the completion"
                )
    _warn_of_bare_prompts(trainer, data[0]["prompt"], name)


def _ids(trainer: Any, prompts: list[Any], name: str, first: int) -> list[list[int]]:
    try:
        return trainer._tokenize_prompts(prompts)[0]
    except Exception:  # templates raise whatever they like
        for row, prompt in enumerate(prompts, start=first):
            try:
                trainer._tokenize_prompts([prompt])
            except Exception as error:
                raise ValueError(f"{name} row {row}: {error}") from error
        raise


def _warn_of_bare_prompts(trainer: Any, prompt: Any, name: str) -> None:
    """An instruct model that is given bare text answers as a base model would, and nobody has said why."""
    tokenizer = trainer._tokenizer
    if trainer._warned_of_bare_prompts or not isinstance(prompt, str) or not tokenizer.chat_template:
        return
    try:
        shown = tokenizer.apply_chat_template(
            [{"role": "user", "content": _PROBE}], tokenize=False, add_generation_prompt=True
        )
    except Exception:  # a template that wants other roles: nothing to compare with
        return
    mark = next(iter(shown.partition(_PROBE)[2].split()), "")  # what closes the user's turn: "<|im_end|>"
    if mark and mark not in prompt:
        trainer._warned_of_bare_prompts = True
        warnings.warn(
            f"{name}: the first prompt, {prompt[:60]!r}, holds no {mark!r}, as a chat rendered by this tokenizer's "
            "template would. An instruct model then sees no turns: build prompts with grpo_kit.build_prompt, or give "
            "messages. For a base model set tokenizer.chat_template = None.",
            UserWarning,
            stacklevel=4,
        )


_ROLLOUTS = ("kit", "hf", "vllm", "continuous")


def choose_rollout(rollout: str | None, args: Any) -> str:
    """The engine's name; sets what trl reads of args (use_vllm, use_transformers_continuous_batching).

    Raises ValueError for an unknown name, one that contradicts args, and for vllm where it is not installed.
    """
    asked = "vllm" if args.use_vllm else "continuous" if args.use_transformers_continuous_batching else None
    if rollout is None:
        return asked or "kit"
    if rollout not in _ROLLOUTS:
        raise ValueError(f"rollout={rollout!r} is not known; use one of {', '.join(map(repr, _ROLLOUTS))}")
    if asked not in (None, rollout):
        raise ValueError(f"rollout={rollout!r}, but args ask for {asked!r}; say one of the two")
    if rollout == "vllm" and asked is None:
        if find_spec("vllm") is None:
            raise ValueError(
                "rollout='vllm', but vllm is not installed; pip install grpo-kit[vllm], or use 'kit'"
            )
        args.use_vllm, args.vllm_mode = True, "colocate"
    args.use_transformers_continuous_batching = rollout == "continuous"
    return rollout


def one_card(args: Any) -> None:
    """One card a process: transformers would copy the model to every card that it sees (DataParallel), trl refuses."""
    if args.n_gpu > 1:
        print(
            f"{args.n_gpu} cards are visible, and this process trains on {args.device} alone. To use all of them start "
            f"the script by `accelerate launch --num_processes {args.n_gpu}`, or in a notebook put everything from "
            f"loading the model on into a function for accelerate.notebook_launcher(f, num_processes={args.n_gpu})."
        )
        args._n_gpu = 1


def buffer_steps(args: Any) -> int:
    """Optimizer steps that share one rollout buffer."""
    return max(1, args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps)


def align(args: Any, warmup: float) -> None:
    """One row a step, warmup, and checkpoints where a rollout buffer ends (elsewhere resuming is not exact)."""
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup={warmup} must be a fraction of the steps in [0, 1)")
    args.logging_steps = 1
    if args.warmup_steps == 0:
        args.warmup_steps = warmup
    size = buffer_steps(args)
    if args.save_strategy == "steps" and args.save_steps >= 1 and args.save_steps % size:
        args.save_steps = int(-(-args.save_steps // size) * size)
        print(
            f"save_steps is now {args.save_steps}, a multiple of the {size} steps that share a rollout buffer"
        )


def check_temperature(value: float, name: str) -> float:
    """value as a float; raises ValueError, naming it, unless it is above 0."""
    if not value > 0:
        raise ValueError(f"{name}={value} must be above 0; greedy decoding has no gradient to learn from")
    return float(value)
