"""Train: the whole run, what notebook 05 does, from wherever it was stopped."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_kit.commands import CommandEnds

if TYPE_CHECKING:
    from grpo_kit.lab.job import Job
    from grpo_kit.loop.processes import Processes

BEFORE, AFTER, RESULTS, MODEL = "before.json", "after.json", "results.json", "model"


def train(arguments: Namespace) -> None:
    """Train a model: readiness, accuracy before, GRPO, accuracy after, model and card; what notebook 05 does.

    examples:
      grpo-kit train                                  the preset that fits this machine, its task
      grpo-kit train my_task.py --preset cpu --tuning lora --set steps=24 \\
          --set "temperature=linear(1.2, 0.8)" --folder runs/mine
      grpo-kit train countdown --preset t4            one of the kit's tasks
      grpo-kit train --resume runs/mine               go on where it was stopped or killed
      torchrun --nproc_per_node 2 -m -- grpo_kit train my_task.py --folder runs/mine

    my_task.py has a line task = kit.tasks.from_rows(...). Ctrl-C ends the step, saves and says how to go on. While it
    trains, `grpo-kit watch runs/mine` follows it from another terminal. No run is overwritten.
    """
    from grpo_kit.cuda import own_device
    from grpo_kit.episodes.environment import EpisodeError
    from grpo_kit.hooks.watch_run import StoppedByFlag
    from grpo_kit.lab.job import OPTIONS, Job, settings_of
    from grpo_kit.loop.processes import Processes
    from grpo_kit.record.files import next_run_folder, run_settings
    from grpo_kit.record.run_path import run_path
    from grpo_kit.rewards import RewardError

    given, values, resumed = vars(arguments), settings_of(arguments.set), arguments.resume is not None
    options = {name: given[name] for name in OPTIONS if given[name] is not None}
    values |= {} if arguments.tuning is None else {"tuning": arguments.tuning}
    if arguments.rank is not None and not resumed and values.get("tuning", "full") == "full":
        raise ValueError(f"--rank {arguments.rank} is of adapters, which are trained with --tuning lora")
    folder = arguments.folder if arguments.resume in (None, True) else arguments.resume
    if resumed and (folder is None or arguments.folder not in (None, folder)):
        raise ValueError("--resume needs one run folder: grpo-kit train --resume runs/mine")
    if not resumed:
        job = Job.asked(arguments.task, arguments.preset, values, **options)
    else:
        job = Job.of_run(Path(folder), arguments.task, trains=True)
        preset = {} if arguments.preset is None else {"preset": arguments.preset}
        job.change(preset | options | values)
    processes = Processes(job.config.prompts_per_step, own_device())
    folder = next_run_folder("runs", job.task.name) if folder is None else folder
    folder, shown = processes.from_main(lambda: (run_path(folder, "--folder"), Path(folder)))
    try:
        _whole(job, folder, shown, processes, resumed=resumed)
    except (KeyboardInterrupt, RewardError, EpisodeError, OSError) as error:
        kept = run_settings(folder) is not None
        goes_on = f"To go on: grpo-kit train --resume {shown}" if kept else "Nothing was kept."
        said = str(error).partition("; train() ")[0].rstrip(".") or "Stopped while it was evaluated"
        stopped = isinstance(error, KeyboardInterrupt) and not isinstance(error, StoppedByFlag)
        raise CommandEnds(f"{said}. {goes_on}", 130 if stopped else 1) from error
    if processes.count > 1:
        from torch.distributed import destroy_process_group

        destroy_process_group()


def _whole(job: Job, folder: Path, shown: Path, processes: Processes, *, resumed: bool) -> None:
    """The run, from wherever it was stopped. Of several processes the main one measures and prints.

    folder: its absolute path, which a reward's chdir does not move. shown: as it was given.
    """
    from grpo_kit.evaluation.accuracy import Evaluation, evaluate
    from grpo_kit.evaluation.comparison import compare
    from grpo_kit.evaluation.held_out import HeldOut
    from grpo_kit.evaluation.readiness import readiness
    from grpo_kit.hooks.standard import GRPOTrainer
    from grpo_kit.record.files import steps_done
    from grpo_kit.record.run_lock import alone
    from grpo_kit.trackers import by_name
    from grpo_kit.watch.run_card import model_card

    main, task, config, options = processes.is_main, job.task, job.config, job.options
    hooks = [by_name(name) for name in options["report_to"]]  # before anything loads
    processes.from_main(lambda: _check_folder(shown, config.steps, resumed=resumed))
    done, trained = processes.from_main(lambda: (steps_done(folder), (folder / MODEL).is_dir()))
    trained = trained and done >= config.steps

    def say(text: str) -> None:
        if main:
            print(text, flush=True)

    def evaluated(name: str) -> Evaluation:
        if not (folder / name).is_file():
            evaluate(model, tokenizer, task, batch_size=config.eval_batch).save(folder / name)
        return Evaluation.load(folder / name)

    def lock() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(alone(folder))

    say(
        f"{config.model} on {task.name}, {config.tuning}, {config.steps} steps of {config.prompts_per_step} x "
        f"{config.group_size} completions, temperature {config.temperature!r}, seed {config.seed}; preset "
        f"{config.preset} ({config.why('preset')})\n{'Going on with' if done else 'Training into'} {shown}"
    )
    model, tokenizer = job.policy()
    with ExitStack() as held:
        processes.from_main(lock)
        if not trained:
            rows, every = min(64, len(task.held_out)), options["held_out_every"]
            trainer = GRPOTrainer(
                model, task, config, tokenizer=tokenizer, folder=folder, live=True if main else None, hooks=hooks,
                held_out=HeldOut(task, rows=rows, every=every) if every else None,
                keep=options["keep"], on_flag=options["on_flag"],
            )  # fmt: skip
            trainer.notes |= options
            if not done:
                trainer.open()  # from here on there is something to go on with
            if main and not done:
                ready = readiness(
                    model, tokenizer, task, rows=task.train[: min(32, rows)], samples=config.group_size,
                    group_size=config.group_size, temperature=config.at(0).temperature, quiet=True,
                )  # fmt: skip
                say(f"{'GO' if ready.verdict == 'ready' else 'CHANGE SOMETHING FIRST'}  {ready.reason}")
        before = processes.from_main(lambda: evaluated(BEFORE))
        say(f"Before: {before.sentence}")
        if not trained:
            processes.from_main(lambda: _set_aside(folder, MODEL, AFTER, RESULTS))  # of a shorter run
            trainer.train(resume=done > 0)
            processes.from_main(lambda: _keep(trainer, folder))
        elif not (folder / AFTER).is_file():
            model, tokenizer = job.policy(folder / MODEL)
        comparison = compare(before, processes.from_main(lambda: evaluated(AFTER)))
        if main:
            model_card(folder, comparison)
            comparison.save(folder)
    say(f"{comparison}\n\nThe model is in {shown / MODEL}. Try it: grpo-kit chat {shown}")
    say(f"Ship it: grpo-kit export {shown} exports/{folder.name}")


def _check_folder(folder: Path, steps: int, *, resumed: bool) -> None:
    """Refuse a new run where there is one; of a run that was stopped in its first step set aside what it wrote."""
    from grpo_kit.record.digests import newest_whole
    from grpo_kit.record.files import RUN, RunFolderError, holds_run, next_run_folder, steps_done
    from grpo_kit.record.lines import COMPLETIONS_LINES, METRICS_LINES

    if folder.is_file():
        raise RunFolderError(f"--folder {folder} is a file; name a folder")
    if not resumed and holds_run(folder):
        raise RunFolderError(
            f"{folder} holds a run already, and no run is overwritten: give --folder "
            f"{next_run_folder(folder.parent, folder.name)}, or go on with it: grpo-kit train --resume {folder}"
        )
    if 0 < (done := steps_done(folder)) < steps and newest_whole(folder, digests=False) is None:
        raise RunFolderError(
            f"{folder} kept no checkpoint of its {done} steps (--set save_steps=10) to go on from: begin a new one, "
            f"and if it has a model, from that: --set model={folder / MODEL}"
        )
    if resumed and not done:
        _set_aside(folder, RUN, METRICS_LINES, COMPLETIONS_LINES, "flags.jsonl")


def _keep(trainer: Any, folder: Path) -> None:
    """Save the model, whole or not at all, with digests that load_policy compares."""
    from grpo_kit.record.digests import write_digests

    part = folder / f".{MODEL}"
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed here
    write_digests(trainer.save_model(part))
    os.replace(part, folder / MODEL)


def _set_aside(folder: Path, *names: str) -> None:
    from grpo_kit.record.files import REDONE, next_run_folder

    for path in (folder / name for name in names if (folder / name).exists()):
        (folder / REDONE).mkdir(exist_ok=True)
        os.replace(path, next_run_folder(folder / REDONE, path.name))
