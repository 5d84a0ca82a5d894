"""Checks of arguments that many rooms take, one a fact: numbers, texts, models, tokenizers and their tokens, tasks.

A bool, a text and a NaN never count as numbers here; numpy's numbers do.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

# a message by which a chat template is read: no template holds, trims or looks for it
PROBE = "KITPROBE"
# beyond: samples alike, noise, weights gone after a step
COLDEST, HOTTEST, FASTEST = 0.01, 10, 1
# AdamW moves a weight by about the rate; below, float32 rounds that away at most weights
SLOWEST = 1e-9
# and weight of one: training squares rewards in float32, which ends at 3e38
LARGEST_REWARD = 1e15
# What other libraries call a field of Config, an argument or what a trainer has, and what stands in its place here.
ELSEWHERE = {
    "max_completion_tokens": "max_tokens max_new_tokens max_completion_length max_length",
    "group_size": "num_generations n num_return_sequences", "learning_rate": "lr", "loss": "loss_type",
    "repetition_penalty": "frequency_penalty presence_penalty", "iterations": "num_iterations mu",
    "steps": "max_steps", "beta": "kl_coef kl_beta", "optimizer": "optim", "eval_batch": "per_device_eval_batch_size",
    "steps, which counts steps, not passes: a pass takes rows / prompts_per_step": "num_train_epochs epochs num_epochs",
    "prompts_per_step, which counts prompts, not completions: divide it by group_size":
        "per_device_train_batch_size train_batch_size generation_batch_size",
    "prompts_per_step": "batch_size", "micro_batch": "mini_batch_size per_device_batch_size",
    "prompts_per_step, all in one update; minibatches makes several": "gradient_accumulation_steps",
    "scale": "scale_rewards", "autocast or dtype": "bf16 fp16 tf32", "warmup": "warmup_steps warmup_ratio",
    "learning_rate, with a schedule such as kit.cosine(1e-5, 0)": "lr_scheduler_type lr_scheduler",
    "level": "importance_sampling_level", "mask_truncated_completions": "mask_cut_off",
    "dynamic_sampling": "resample", "importance_sampling_cap": "sampler_weight_cap",
    "model": "model_name model_name_or_path model_id", "tuning='qlora'": "load_in_4bit quantization_config",
    "tuning='lora', and lora={'r': 8} of kit.load_policy, which takes peft.LoraConfig's arguments":
        "lora_r lora_alpha lora_rank lora_dropout lora_target_modules target_modules r peft_config use_peft",
    "folder= of the trainer": "output_dir run_name", "hooks= of the trainer": "callbacks add_callback",
    "hooks=[trackers.by_name('wandb')] of the trainer": "report_to",
    "sample= of the trainer, VllmSample()": "use_vllm vllm_mode",
    "task= of the trainer": "train_dataset dataset", "tokenizer= of the trainer": "processing_class",
    "held_out= of tasks.from_rows, and held_out=kit.HeldOut(task) of the trainer":
        "eval_dataset eval_strategy eval_steps",
    "credit= and discount= of a task of several turns": "credit discount gamma",
    "reward= of tasks.from_rows": "rewards reward_funcs reward_func reward_fn reward_function",
    "system= of tasks.from_rows": "system_prompt system_message",
    "trainer.config, given as config=kit.Config(...)": "args training_args",
    "trainer.step, and kit.read_metrics(trainer.folder)": "state log_history",
    "kit.evaluate(trainer.model, trainer.tokenizer, trainer.task)": "evaluate predict",
    "trainer.save()": "save_state", "trainer.model.push_to_hub(...)": "push_to_hub",
    "train(resume=True)": "resume_from_checkpoint",
    "nothing: every step is written down": "logging_steps logging_strategy log_completions",
    "nothing: completions end at the end tokens of tokenizer and model, and the task has the answer's tag":
        "stop stop_strings stop_token_ids eos_token_id",
    "nothing: a prompt is never cut off": "max_prompt_length max_seq_length",
    "nothing: the engine has no graph for torch.compile to make": "torch_compile",
}  # fmt: skip


def is_number(value: Any) -> bool:
    """Whether a value is a finite real number.

    >>> [is_number(value) for value in (1, 0.5, float("inf"), True, "1")]
    [True, True, False, False, False]
    """
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any, least: int) -> bool:
    """Whether a value is a whole number of at least `least`; 2.0 is not.

    >>> [is_whole(value, 1) for value in (1, 0, 2.0, True)]
    [True, False, False, False]
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= least


def check_whole(name: str, value: Any, least: int = 1, *, hint: str = "") -> int:
    """The value as an int. Raises ValueError, naming the argument, unless it is a whole number of at least `least`.

    hint: the end of the message, such as ", or None for all".

    >>> check_whole("samples", 0)
    Traceback (most recent call last):
    ValueError: samples=0 must be a whole number of at least 1
    """
    if not is_whole(value, least):
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}{hint}")
    return int(value)


def check_number(name: str, value: Any, least: float = -math.inf, *, hint: str = "") -> float:
    """The value as a float. Raises ValueError, naming the argument, unless it is a finite number of at least `least`.

    hint: the end of the message, such as "; 0 means no reference model".

    >>> check_number("beta", 0, 0)
    0.0
    """
    if not is_number(value) or value < least:
        least_words = "" if least == -math.inf else f" of at least {least}"
        raise ValueError(f"{name}={value!r} must be a number{least_words}{hint}")
    return float(value)


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises ValueError, naming the argument and the choices, unless the value is one of the choices.

    choices: two or more, such as the keys of a dict.

    >>> check_choice("keep", "first", ("last", "best"))
    Traceback (most recent call last):
    ValueError: keep='first' is not known; use 'last' or 'best'
    """
    choices = list(choices)
    if value not in [choice for choice in choices if type(choice) is type(value)]:
        *first, last = map(repr, choices)
        raise ValueError(
            f"{name}={value!r:.200} is not known; use {', '.join(first)} or {last}{nearest(value, choices)}"
        )


def nearest(value: Any, names: Iterable[Any]) -> str:
    """The end of a message: the kit's name for another library's, or the name that was misspelt; "" for neither.

    >>> nearest("max_new_tokens", [])
    '; here it is max_completion_tokens'
    >>> nearest("Larges", ["largest", "code", None])
    "; did you mean 'largest'?"
    """
    if not isinstance(value, str):
        return ""
    for kit_name, other_names in ELSEWHERE.items():
        if value in other_names.split():
            return f"; here it is {kit_name}"
    by_lower_case = {name.lower(): name for name in names if isinstance(name, str)}
    matches = difflib.get_close_matches(value.lower(), by_lower_case, 1)
    return f"; did you mean {by_lower_case[matches[0]]!r}?" if matches else ""


def check_known(problem: str, values: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises ValueError for a name that is not known, with the kit's name for it, or all that are known.

    >>> check_known("Config has no such field", {"lr": 1e-5}, ["learning_rate"])
    Traceback (most recent call last):
    ValueError: lr=1e-05: Config has no such field; here it is learning_rate
    """
    names = list(known)
    for name, value in values.items():
        if name not in names:
            mend = nearest(name, names) or f"; it has {', '.join(names)}"
            raise ValueError(f"{name}={value!r:.100}: {problem}{mend}")


def check_text(name: str, value: Any, *, hint: str = "", blank: bool = False) -> str:
    """The value. Raises ValueError, naming the argument, unless it is a text; blank: one without a letter will do.

    hint: the end of the message, such as ", or None for none".

    >>> check_text("name", 3)
    Traceback (most recent call last):
    ValueError: name=3 must be a text that is not blank
    """
    if not isinstance(value, str) or not (blank or value.strip()):
        raise ValueError(
            f"{name}={value!r:.200} must be a text{'' if blank else ' that is not blank'}{hint}"
        )
    return value


def check_above_zero(name: str, value: Any, *, hint: str = "") -> None:
    """Raises ValueError, naming the argument, unless the value is a finite number above 0.

    hint: the end of the message, such as ", or None for no limit".

    >>> check_above_zero("learning_rate", -1.0)
    Traceback (most recent call last):
    ValueError: learning_rate=-1.0 must be a number above 0
    """
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name}={value!r} must be a number above 0{hint}")


def check_temperature(value: Any, name: str = "temperature", *, greedy: bool = False) -> float:
    """The temperature as a float.

    greedy: 0 is allowed and means the likeliest token each time. Sampling, scoring and training need a value above 0.
    Raises ValueError, naming the argument, unless it is a finite number above 0, or 0 with `greedy`.

    >>> check_temperature(0, greedy=True)
    0.0
    """
    if is_number(value) and (value > 0 or greedy and value == 0):
        return float(value)
    if greedy:
        raise ValueError(
            f"{name}={value!r} must be 0 (greedy) or a number above 0, such as 1.0"
        )
    raise ValueError(
        f"{name}={value!r} must be a number above 0, such as 1.0; at 0 (greedy) all samples of a prompt are alike"
    )


def check_model(model: Any) -> None:
    """Raises ValueError, with what would do, for what is no loaded model: a name, or load_policy's pair.

    >>> check_model("tiny-random")
    Traceback (most recent call last):
    ValueError: model='tiny-random' is a name; load it: model, tokenizer = kit.load_policy('tiny-random')
    """
    if not hasattr(model, "parameters"):
        raise ValueError(_not_loaded("model", model))


def check_tokenizer(tokenizer: Any) -> None:
    """Raises ValueError, with what would do, for what is no tokenizer: a name, a model, or load_policy's pair."""
    if not hasattr(tokenizer, "chat_template") or hasattr(tokenizer, "parameters"):
        raise ValueError(_not_loaded("tokenizer", tokenizer))


def template_tokens(tokenizer: Any, ends: Collection[int] = ()) -> dict[int, str]:
    """The special tokens around texts, by id: begin, end, padding, and what the chat template writes between messages.

    ends: ids that end a completion too. Other special tokens are text: a task may use them as its tags ("<answer>",
    "[TOOL_CALLS]"), and rewards see them.

    >>> template_tokens(qwen25_tokenizer)  # doctest: +SKIP
    {151643: '<|endoftext|>', 151644: '<|im_start|>', 151645: '<|im_end|>'}
    """
    # A tokenizer that is not transformers' may have none.
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number: token.content for number, token in added.items() if token.special}
    if special.keys() <= set(ends):
        return special
    markers = [
        tokenizer.bos_token,
        tokenizer.eos_token,
        tokenizer.pad_token,
        tokenizer.unk_token,
    ]
    between = _between_messages(tokenizer)
    return {
        number: token
        for number, token in special.items()
        if number in ends or token in markers or token in between
    }


def _between_messages(tokenizer: Any) -> str:
    """The chat template's text from the end of an answer to the next question; "" without a template.

    The text behind the question is left out: a template may open the answer with a tag of its thoughts.
    """
    turns = [{"role": role, "content": PROBE} for role in ("user", "assistant", "user")]
    try:
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # no template, or one that refuses these roles
        return ""
    return "".join(rendered.split(PROBE)[2:])


def _not_loaded(name: str, value: Any) -> str:
    call = "model, tokenizer = kit.load_policy"
    if isinstance(value, tuple | list) and len(value) == 2:
        return f"{name} is a pair, as kit.load_policy gives it; take it apart: {call}(...)"
    if isinstance(value, str | os.PathLike):
        return f"{name}={os.fspath(value)!r} is a name; load it: {call}({os.fspath(value)!r})"
    return f"{name}={value!r:.60} is no {name} of transformers; {call}(...) loads both"


def check_job(model: Any, tokenizer: Any, task: Any) -> None:
    """check_model, check_tokenizer and check_task: what trains and what measures begins with the three."""
    check_model(model)
    check_tokenizer(tokenizer)
    check_task(task)


def check_task(task: Any) -> None:
    """Raises ValueError, with what would do, for what is no task: a name, a function that makes one, or rows.

    >>> check_task("largest")
    Traceback (most recent call last):
    ValueError: task='largest' is a name; make the task: kit.tasks.largest()
    """
    if isinstance(task, str):
        raise ValueError(f"task={task!r} is a name; make the task: kit.tasks.{task}()")
    if callable(task) and hasattr(task, "__name__"):
        raise ValueError(f"task={task.__name__} is a function; call it: {task.__name__}()")
    if not hasattr(task, "train") or not hasattr(task, "name"):
        raise ValueError(
            f"task={task!r:.100} is no task; kit.tasks has some, and of your rows kit.tasks.from_rows makes one"
        )
