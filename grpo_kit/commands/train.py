"""Train: the whole run, what notebook 05 does, from wherever it was stopped."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from typer import Option

import grpo_kit as kit
from grpo_kit.commands import MAIN, NEW_TASK, PRESET, SETTINGS, CommandEnds, Preset

BEFORE, AFTER, RESULTS, MODEL = "before.json", "after.json", "results.json", "model"


def train(
    task: str | None = NEW_TASK,
    preset: Preset = PRESET,
    settings: list[str] | None = SETTINGS,
    tuning: Literal["full", "lora", "qlora"] | None = Option(None, help="what is trained; default: full"),
    rank: int | None = Option(None, min=1, help="of LoRA adapters; their alpha is twice that"),
    folder: str | None = Option(None, metavar="RUN", help="of the run; default: the next free runs/<task>"),
    resume: str | None = Option(None, metavar="RUN", help="go on with the run in this folder"),
    held_out_every: int | None = Option(
        None, min=0, help="look at held-out rows so often; default: 8; 0: never"
    ),
    keep: Literal["last", "best"] | None = Option(None, help="which weights in the end; default: last"),
    on_flag: Literal["warn", "stop"] | None = Option(None, help="what a red flag does; default: warn"),
    report_to: list[str] | None = Option(None, metavar="NAME", help="a tracker: tensorboard, trackio, wandb"),
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
    from grpo_kit.record.files import holds_run, run_settings
    from grpo_kit.record.run_path import run_path
    from grpo_kit.trainer.job import Job, settings_of
    from grpo_kit.trainer.watch_run import StoppedByFlag

    given = {"preset": preset, "tuning": tuning, "rank": rank, "held_out_every": held_out_every, "keep": keep}
    given |= {"on_flag": on_flag, "report_to": report_to or None}
    asked = settings_of(settings) | {name: value for name, value in given.items() if value is not None}
    if resume is None:
        job = Job.asked(task, asked)
        folder = str(kit.next_run_folder("runs", job.task.name)) if folder is None else folder
    else:
        job = Job.of_run(Path(resume), task, asked | ({} if folder is None else {"folder": folder}))
        folder = resume
    if rank is not None and job.config.tuning == "full":
        raise ValueError(f"--rank {rank} is of adapters, which are trained with --tuning lora")
    run = run_path(folder, "--folder")  # which a reward's chdir does not move
    if resume is None and holds_run(run):
        what = f"{folder} holds a run, and none is overwritten: give another --folder, or go on with it:"
        raise ValueError(f"{what} grpo-kit train --resume {folder}")
    try:
        with ExitStack() as held:
            _whole(job, run, folder, held, resumed=resume is not None)
    except (KeyboardInterrupt, kit.rewards.RewardError, OSError) as error:
        goes_on = f"To go on: grpo-kit train --resume {folder}" if run_settings(run) else "Nothing was kept."
        said = str(error).partition("; train() ")[0].rstrip(".") or "Stopped while it was evaluated"
        stopped = isinstance(error, KeyboardInterrupt) and not isinstance(error, StoppedByFlag)
        raise CommandEnds(f"{said}. {goes_on}", 130 if stopped else 1) from error


def _whole(job: Any, run: Path, shown: str, held: ExitStack, *, resumed: bool) -> None:
    """The run, from wherever it was stopped. Of several processes the main one measures, writes and prints."""
    from grpo_kit.evaluation.accuracy import Evaluation
    from grpo_kit.record._run_lock import alone
    from grpo_kit.record.files import REDONE, steps_done

    task, config, options, done = job.task, job.config, job.options, steps_done(run)
    hooks = [*map(kit.more.bridges.trackers.by_name, options["report_to"])]  # before anything loads
    trained = done >= config.steps and (run / MODEL).is_dir()
    if MAIN:
        print(
            f"{config.model} on {task.name}, {config.tuning}, {config.steps} steps, seed {config.seed}; preset "
            f"{config.preset} ({config.why('preset')})\n{'Going on with' if done else 'Training into'} {shown}",
            flush=True,
        )
    model, tokenizer = job.policy(run / MODEL if trained else None)

    def measured(name: str) -> Evaluation:
        if not (run / name).is_file():
            kit.evaluate(model, tokenizer, task, batch_size=config.eval_batch).save(run / name)
        return Evaluation.load(run / name)

    def before_training() -> None:
        if not done:
            ready = kit.readiness(
                model, tokenizer, task, rows=task.train[: min(32, len(task.held_out))], samples=config.group_size,
                group_size=config.group_size, temperature=config.at(0).temperature, quiet=True,
            )  # fmt: skip
            print(ready.sentence, flush=True)
        print(f"Before: {measured(BEFORE).sentence}", flush=True)
        of_fewer_steps = [run / name for name in (MODEL, AFTER, RESULTS) if (run / name).exists()]
        for path in of_fewer_steps:
            (run / REDONE).mkdir(exist_ok=True)
            os.replace(path, kit.next_run_folder(run / REDONE, path.name))

    class SaveModel(kit.Hook):
        def end(self, trainer: Any, error: BaseException | None) -> None:
            if error is None:
                trainer.save_model(run / MODEL)

    def after_training() -> None:
        comparison = kit.compare(Evaluation.load(run / BEFORE), measured(AFTER))
        kit.model_card(run, comparison)
        comparison.save(run)
        print(f"{comparison}\n\nThe model is in {shown}/{MODEL}. Try it: grpo-kit chat {shown}")
        print(f"Ship it: grpo-kit export {shown} exports/{run.name}", flush=True)

    if trained:  # and perhaps stopped while it was evaluated
        if MAIN:
            held.enter_context(alone(run))
            after_training()
        return
    rows, every = min(64, len(task.held_out)), options["held_out_every"]
    trainer = kit.GRPOTrainer(
        model, task, config, tokenizer=tokenizer, folder=run, live=True if MAIN else None, hooks=[*hooks, SaveModel()],
        held_out=kit.HeldOut(task, rows=rows, every=every) if every else None,
        keep=options["keep"], on_flag=options["on_flag"],
    )  # fmt: skip
    trainer.notes |= options
    from_main = trainer.processes.from_main
    from_main(lambda: held.enter_context(alone(run)))
    if not done:
        trainer.open(resume=resumed)  # from here on there is something to go on with
    from_main(before_training)
    trainer.train(resume=resumed)
    from_main(after_training)
    if trainer.processes.count > 1:
        from torch.distributed import destroy_process_group

        destroy_process_group()
