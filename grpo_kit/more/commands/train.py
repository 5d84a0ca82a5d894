"""Train: the whole run, what notebook 05 does, from wherever it was stopped."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from typer import Option

import grpo_kit as kit
from grpo_kit.more.commands import MAIN, NEW_TASK, PRESET, SETTINGS, CommandEnds, Preset

BEFORE, AFTER, RESULTS, MODEL = "before.json", "after.json", "results.json", "model"

TUNING = Option(None, help="what is trained; default: full")
RANK = Option(None, min=1, help="of LoRA adapters; their alpha is twice that")
FOLDER = Option(None, metavar="RUN", help="of the run; default: the next free runs/<task>")
RESUME = Option(None, metavar="RUN", help="go on with the run in this folder")
HELD_OUT_EVERY = Option(
    None, min=0, help="look at held-out rows so often; default: 8; 0: never"
)
KEEP = Option(None, help="which weights in the end; default: last")
ON_FLAG = Option(None, help="what a red flag does; default: warn")
REPORT_TO = Option(None, metavar="NAME", help="a tracker: tensorboard, trackio, wandb")


def train(
    task: str | None = NEW_TASK,
    preset: Preset = PRESET,
    settings: list[str] | None = SETTINGS,
    tuning: Literal["full", "lora", "qlora"] | None = TUNING,
    rank: int | None = RANK,
    folder: str | None = FOLDER,
    resume: str | None = RESUME,
    held_out_every: int | None = HELD_OUT_EVERY,
    keep: Literal["last", "best"] | None = KEEP,
    on_flag: Literal["warn", "stop"] | None = ON_FLAG,
    report_to: list[str] | None = REPORT_TO,
) -> None:
    """Train a model: readiness, accuracy before, GRPO, accuracy after, model and card; what notebook 05 does.

    \b
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
    from grpo_kit.more.lab._job import Job, settings_of
    from grpo_kit.record._run_folder import run_path
    from grpo_kit.record.files import holds_run, run_settings
    from grpo_kit.trainer.watch_run import StoppedByFlag

    options = {
        "preset": preset,
        "tuning": tuning,
        "rank": rank,
        "held_out_every": held_out_every,
        "keep": keep,
        "on_flag": on_flag,
        "report_to": report_to or None,
    }
    values = settings_of(settings) | {
        name: value for name, value in options.items() if value is not None
    }
    if resume is None:
        job = Job.asked(task, values)
        if folder is None:
            folder = str(kit.next_run_folder("runs", job.task.name))
    else:
        if folder is not None:
            values["folder"] = folder
        job = Job.of_run(Path(resume), task, values)
        folder = resume
    if rank is not None and job.config.tuning == "full":
        raise ValueError(f"--rank {rank} is of adapters, which are trained with --tuning lora")
    run = run_path(folder, "--folder")  # which a reward's chdir does not move
    if resume is None and holds_run(run):
        raise ValueError(
            f"{folder} holds a run, and none is overwritten: give another --folder, or go on with it: "
            f"grpo-kit train --resume {folder}"
        )
    try:
        with ExitStack() as lock:
            _train(job, run, folder, lock, resumes=resume is not None)
    except (KeyboardInterrupt, kit.rewards.RewardError, OSError) as error:
        reason = (
            str(error).partition("; train() ")[0].rstrip(".")
            or "Stopped while it was evaluated"
        )
        goes_on = "Nothing was kept."
        if run_settings(run):
            goes_on = f"To go on: grpo-kit train --resume {folder}"
        is_stop = isinstance(error, KeyboardInterrupt) and not isinstance(error, StoppedByFlag)
        raise CommandEnds(f"{reason}. {goes_on}", 130 if is_stop else 1) from error


def _train(job: Any, run: Path, name: str, lock: ExitStack, *, resumes: bool) -> None:
    """The run, from wherever it was stopped. Of several processes the main one measures, writes and prints.

    name: the run's folder as it was given. lock: is held on the folder until the end.
    """
    from grpo_kit.record._run_folder import alone
    from grpo_kit.record.files import steps_done

    task = job.task
    config = job.config
    options = job.options
    done = steps_done(run)
    # Trackers are asked before anything loads.
    hooks = [kit.more.bridges.trackers.by_name(tracker) for tracker in options["report_to"]]
    if MAIN:
        begins = "Going on with" if done else "Training into"
        print(
            f"{config.model} on {task.name}, {config.tuning}, {config.steps} steps, seed {config.seed}; preset "
            f"{config.preset} ({config.why('preset')})\n{begins} {name}",
            flush=True,
        )
    # and perhaps stopped while it was evaluated
    if done >= config.steps and (run / MODEL).is_dir():
        policy = job.policy(run / MODEL)
        if MAIN:
            lock.enter_context(alone(run))
            _after_training(job, policy, run, name)
        return

    class SaveModel(kit.Hook):
        def end(self, trainer: Any, error: BaseException | None) -> None:
            if error is None:
                trainer.save_model(run / MODEL)

    policy = model, tokenizer = job.policy()
    held_out = None
    every = options["held_out_every"]
    if every:
        held_out = kit.HeldOut(task, rows=min(64, len(task.held_out)), every=every)
    trainer = kit.GRPOTrainer(
        model,
        task,
        config,
        tokenizer=tokenizer,
        folder=run,
        live=True if MAIN else None,
        hooks=[*hooks, SaveModel()],
        held_out=held_out,
        keep=options["keep"],
        on_flag=options["on_flag"],
    )
    trainer.notes |= options
    from_main = trainer.processes.from_main
    from_main(lambda: lock.enter_context(alone(run)))
    if not done:
        trainer.open(resume=resumes)  # from here on there is something to go on with
    from_main(lambda: _before_training(job, policy, run, is_new=not done))
    trainer.train(resume=resumes)
    from_main(lambda: _after_training(job, policy, run, name))
    if trainer.processes.count > 1:
        from torch.distributed import destroy_process_group

        destroy_process_group()


def _before_training(job: Any, policy: tuple, run: Path, *, is_new: bool) -> None:
    """Readiness and accuracy of the base; what a run of fewer steps has left is moved away."""
    from grpo_kit.record.files import REDONE

    task = job.task
    config = job.config
    if is_new:
        ready = kit.readiness(
            *policy,
            task,
            rows=task.train[: min(32, len(task.held_out))],
            samples=config.group_size,
            group_size=config.group_size,
            temperature=config.at(0).temperature,
            quiet=True,
        )
        print(ready.sentence, flush=True)
    print(f"Before: {_evaluation(job, policy, run / BEFORE).sentence}", flush=True)
    for name in (MODEL, AFTER, RESULTS):
        if (run / name).exists():
            (run / REDONE).mkdir(exist_ok=True)
            os.replace(run / name, kit.next_run_folder(run / REDONE, name))


def _after_training(job: Any, policy: tuple, run: Path, name: str) -> None:
    """Accuracy of the trained model beside the base's, and the card."""
    from grpo_kit.evaluation.accuracy import Evaluation

    comparison = kit.compare(
        Evaluation.load(run / BEFORE), _evaluation(job, policy, run / AFTER)
    )
    kit.model_card(run, comparison)
    comparison.save(run)
    print(f"{comparison}\n\nThe model is in {name}/{MODEL}. Try it: grpo-kit chat {name}")
    print(f"Ship it: grpo-kit export {name} exports/{run.name}", flush=True)


def _evaluation(job: Any, policy: tuple, path: Path) -> Any:
    """The evaluation in this file, made if it is not there."""
    from grpo_kit.evaluation.accuracy import Evaluation

    if not path.is_file():
        kit.evaluate(*policy, job.task, batch_size=job.config.eval_batch).save(path)
    return Evaluation.load(path)
