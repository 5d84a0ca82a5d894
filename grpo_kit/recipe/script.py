"""A recipe written down as a plain script of public names, with what `accelerate launch` needs beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from grpo_kit.argument_checks import check_whole
from grpo_kit.episodes.episode_task import EpisodeTask
from grpo_kit.recipe import remembered
from grpo_kit.recipe.sources import Source
from grpo_kit.record.control import in_a_file
from grpo_kit.record.files import write_whole

_SCRIPT = '''"""{title}

Written by grpo_kit from a recipe: the whole run in names of `import grpo_kit as kit`, yours to change.

    python {name}  # one process
    accelerate launch --config_file {config} {name}  # {processes}
    ... --resume  # after a stop: goes on from the last checkpoint
"""

import sys
from pathlib import Path

from accelerate import PartialState

import grpo_kit as kit

RUN = {run}  # the run's folder, below where this is started; no run is overwritten
recipe = kit.Recipe({recipe})


def main(resume: bool) -> None:
    cfg, task = recipe.cfg, recipe.make_task()
    args = recipe.grpo_config(RUN)  # a trl.GRPOConfig; several processes share a step's completions
    state = PartialState()
    first = state.is_main_process  # evaluates, writes and prints; all of them train
    if first and not resume:
        recipe.save(RUN, script=Path(__file__).name)  # for grpo-kit evaluate, export and chat

    model, tokenizer = kit.load_policy(
        cfg.model,
        tuning={tuning},
        dtype=cfg.{dtype},{lora}
        seed=cfg.seed,
        quiet=not first,
    )
    if first:
        before = kit.evaluate(model, tokenizer, task, batch_size=cfg.eval_batch)
        print(before.table(), flush=True)
    state.wait_for_everyone()

    trainer = {trainer}
    trainer.train(resume_from_checkpoint=resume or None){stop}

    trainer.save_model(f"{{RUN}}/model")
    if first:
        tokenizer.save_pretrained(f"{{RUN}}/model")
        after = kit.evaluate(model, tokenizer, task, batch_size=cfg.eval_batch)
        comparison = kit.compare(before, after)
        print(comparison, flush=True)
        kit.model_card(RUN, comparison)
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main(resume="--resume" in sys.argv[1:])
'''

_STOP = """
    if trainer.stopped_by is not None:  # it has saved; what is half trained is not kept as the model
        raise SystemExit(f"Stopped by the red flag {trainer.stopped_by.name}; go on with --resume")"""

# What accelerate calls MULTI_GPU is the launcher that starts several processes; on a CPU they talk by gloo.
_CONFIG = """# accelerate launch --config_file {config} {name}
# {what}
compute_environment: LOCAL_MACHINE
distributed_type: {kind}  # several processes; where there is no card they run on the CPU (gloo)
num_machines: 1
machine_rank: 0
num_processes: {processes}
gpu_ids: all
mixed_precision: 'no'  # the script's profile says in what is computed
main_process_port: 0  # any free one
rdzv_backend: static
same_network: true
use_cpu: false
debug: false
"""


def write_script(recipe: Any, path: Path, *, processes: int, run: str | os.PathLike | None) -> list[Path]:
    """See Recipe.to_script."""
    check_whole("processes", processes)
    if recipe.cfg.completions_per_step % processes:
        raise ValueError(
            f"processes={processes}, but a step has {recipe.cfg.completions_per_step} completions "
            "(prompts_per_step x group_size), which they cannot share evenly"
        )
    if path.suffix != ".py":
        raise ValueError(f"path={str(path)!r} must end in .py")
    config, source = path.with_suffix(".yaml"), recipe.home()
    copy = _task_file(recipe, source, path.parent)
    for new in (path, config):
        if new.exists():
            raise ValueError(f"{new} is there already, and no file is overwritten; name another")
    files = {
        path: _script(recipe, path, copy, source, processes, run),
        config: _config(path, config, processes),
    }
    if copy is not None and not copy.exists():
        files[copy] = source.text
    path.parent.mkdir(parents=True, exist_ok=True)
    for target, text in files.items():
        write_whole(target, text.encode())
    return list(files)


def _task_file(recipe: Any, source: Source | None, folder: Path) -> Path | None:
    """Where the file with the task stands beside the script; None for a task of the kit's."""
    if source is None:
        if recipe.task is not None and recipe.task_name is None:
            raise ValueError(
                f"task {recipe.make_task().name!r} lives in memory alone, and a script cannot make it again; put what "
                "makes it into a Python file (in a notebook: %%writefile my_task.py) and give Recipe('my_task.py')"
            )
        return None
    copy = folder / source.path.name
    if copy.exists() and copy.read_text(encoding="utf-8") != source.text:
        raise ValueError(f"{copy} is there already and is not the recipe's own file; name another folder")
    return copy


def _script(
    recipe: Any, path: Path, copy: Path | None, source: Source | None, processes: int, run: Any
) -> str:
    task, full = recipe.make_task(), recipe.tuning == "full"
    many = f"{processes} processes" if processes > 1 else "as many as the config says"
    return _SCRIPT.format(
        title=f"GRPO: {recipe.cfg.model} on {task.name}, {recipe.tuning}.",
        name=path.name,
        config=path.with_suffix(".yaml").name,
        processes=many,
        run=_written(os.fspath(run) if run is not None else f"runs/{path.stem}"),
        recipe=_recipe(recipe, copy, source),
        tuning=_written(recipe.tuning),
        dtype="dtype" if full else "lora_dtype",
        lora=f"\n        lora={_written(dict(recipe.lora))}," if recipe.lora else "",
        trainer=_trainer(recipe, task),
        stop=_STOP if recipe.on_flag == "stop" else "",
    )


def _recipe(recipe: Any, copy: Path | None, source: Source | None) -> str:
    """The arguments of kit.Recipe, those that say something."""
    overrides = remembered.overrides_of(recipe.cfg)
    told = [_written(recipe.cfg.name), *(f"{name}={_written(value)}" for name, value in overrides.items())]
    lines = []
    if copy is not None:
        lines.append(f'str(Path(__file__).with_name("{copy.name}:{source.name}"))')
    lines.append(f"profile=kit.profile({', '.join(told)})" if overrides else f"profile={told[0]}")
    if recipe.schedule is not None:
        lines.append(f"temperature=kit.{in_a_file(recipe.schedule)}")
    plain = type(recipe)(profile="smoke")
    lines += [
        f"{name}={_written(value)}"
        for name in remembered.PLAIN
        if (value := getattr(recipe, name)) != getattr(plain, name)
    ]
    return "\n    " + ",\n    ".join(lines) + ",\n"


def _trainer(recipe: Any, task: Any) -> str:
    episodes = isinstance(task, EpisodeTask)
    lines = ["model", "task", "args", "processing_class=tokenizer"]
    if recipe.schedule is not None:
        lines.append("temperature=recipe.schedule")
    if recipe.trains_with is not None:
        lines.append(
            f"optimizer={'cfg.optimizer' if recipe.optimizer is None else _written(recipe.optimizer)}"
        )
    if recipe.held_out_every is not None:
        rows = min(recipe.held_out_rows, len(task.held_out))
        lines.append(f"held_out=kit.HeldOut(task, rows={rows}, every={recipe.held_out_every})")
    given = {"keep": recipe.keep, "on_flag": recipe.on_flag, **recipe.options}
    plain = {"keep": "last", "on_flag": "warn"}
    lines += [f"{name}={_written(value)}" for name, value in given.items() if value != plain.get(name)]
    kind = "EpisodeTrainer" if episodes else "GRPOTrainer"
    return f"kit.{kind}(\n        " + ",\n        ".join(lines) + ",\n    )"


def _written(value: Any) -> str:
    """As the formatter of this code writes a value."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_written(key)}: {_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _config(path: Path, config: Path, processes: int) -> str:
    """For accelerate."""
    return _CONFIG.format(
        config=config.name,
        name=path.name,
        what="each process has all weights and a share of every step; another number of them is num_processes",
        kind="MULTI_GPU" if processes > 1 else "'NO'",
        processes=processes,
    )
