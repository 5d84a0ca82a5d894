"""The commands that train nothing: watch, diagnose, evaluate, readiness, chat, export. Docstrings are their help."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Exit, Option

import grpo_kit as kit
from grpo_kit.more.commands import (
    NEW_TASK,
    PRESET,
    RUN,
    RUNS_TASK,
    SETTINGS,
    CommandEnds,
    Preset,
)
from grpo_kit.more.commands.train import AFTER, BEFORE
from grpo_kit.more.doctor import _self_check as self_check
from grpo_kit.more.doctor import _surroundings as surroundings
from grpo_kit.more.doctor._machine import as_data, as_text, line_of, scrubbed
from grpo_kit.record._run_folder import path_of


def watch(
    run: Path = RUN,
    once: bool = Option(False, "--once", help="print what there is and end"),
    last: int = Option(10, help="earlier steps that are shown"),
    every: float = Option(1.0, help="seconds between two looks"),
) -> None:
    """Follow a run from another terminal: a line a step, held-out accuracy, red flags; it ends when the run ends.

    \b
    examples:
      grpo-kit watch runs/mine                        from the last ten steps on
      grpo-kit watch runs/mine --once                 how far it is, and no more
    """
    from grpo_kit.watch.terminal import follow

    follow(run, last=last, every=every, once=once)


def diagnose(
    log: str = Argument(
        help="trainer_state.json, a notebook, printed lines, a CSV, TensorBoard's or a run folder"
    ),
) -> None:
    """What went wrong in a run of anybody, from its log: red flags, since which step, and what to try.

    \b
    examples:
      grpo-kit diagnose outputs/checkpoint-500/trainer_state.json
      grpo-kit diagnose my_grpo.ipynb                 the outputs that it has stored
      grpo-kit diagnose train.log                     the lines that TRL prints
    """
    print(kit.diagnose(log))


def evaluate(
    run: Path = RUN,
    task: str | None = RUNS_TASK,
    rows: int | None = Option(
        None, min=1, help="the first so many held-out questions; default: all"
    ),
    samples: int = Option(0, min=0, help="completions a question, for pass@k"),
    examples: int = Option(0, min=0, help="so many that were fixed, and that broke"),
) -> None:
    """Accuracy on held-out questions, base beside tuned, with 95 % intervals and a paired test.

    \b
    examples:
      grpo-kit evaluate runs/mine                     both asked the same questions greedily
      grpo-kit evaluate runs/mine --samples 8         pass@k besides
      grpo-kit evaluate runs/05 --task my_task.py     where the run does not say its task, or the file has moved
    """
    job, place = _trained(run, task)
    options: dict[str, Any] = {}
    if samples:
        options["k"] = [1 << power for power in range(samples.bit_length())]
    options |= {
        "rows": job.task.held_out[:rows],
        "samples": samples,
        "batch_size": job.config.eval_batch,
    }
    base = kit.evaluate(*job.policy(), job.task, **options)
    tuned = kit.evaluate(*job.policy(place), job.task, **options)
    comparison = kit.compare(base, tuned)
    print(comparison)
    if samples:
        print(f"\nbase\n{base.table()}\n\ntuned\n{tuned.table()}")
    if examples:
        print(f"\n{comparison.examples(examples)}")


def readiness(
    task: str | None = NEW_TASK,
    preset: Preset = PRESET,
    settings: list[str] | None = SETTINGS,
    rows: int = Option(32, min=1, help="training questions asked"),
    samples: int | None = Option(
        None, min=1, help="completions a question; default: one group"
    ),
    seconds: float = Option(300.0, help="about the most that it may take"),
) -> None:
    """Can GRPO learn anything from this model on this task? Counted before any training.

    \b
    examples:
      grpo-kit readiness my_task.py && grpo-kit train my_task.py
      grpo-kit readiness countdown --set model=Qwen/Qwen2.5-0.5B-Instruct --samples 64

    The exit code is 0 for GO and 1 for CHANGE SOMETHING FIRST.
    """
    from grpo_kit.more.lab._job import Job, settings_of

    job = Job.asked(task, {"preset": preset} | settings_of(settings))
    size = job.config.group_size
    report = kit.readiness(
        *job.policy(),
        job.task,
        rows=job.task.train[:rows],
        samples=samples or size,
        group_size=size,
        temperature=job.config.at(0).temperature,
        seconds=seconds,
        quiet=True,
    )
    print(
        f"{job.config.model} on {job.task.name}: {report.sentence}\n",
        report.lengths.table(),
        sep="\n",
    )
    print(report.table(), flush=True)
    if report.verdict != "ready":
        raise Exit(1)


def chat(
    model: str = Argument(help="a run folder, an export, a model's folder or name"),
    question: str | None = Argument(None, help="ask this alone; default: one after another"),
    task: str | None = RUNS_TASK,
    base: bool = Option(False, "--base", help="of a run: ask the base model too"),
    temperature: float | None = Option(None, help="0 (default, but for exports): greedy"),
    tokens: int | None = Option(
        None, min=1, help="that a completion has at most; default: the task's"
    ),
    seed: int = Option(0, help="of sampling; it moves on with each question"),
) -> None:
    """Ask a trained model, an export or any model by hand, with the training's prompt around the question.

    \b
    examples:
      grpo-kit chat runs/mine --base                  question after question; an empty line ends it
      grpo-kit chat exports/mine "Which number is the largest: 4, 19, 7?"
      grpo-kit chat smollm2-135m-instruct --task largest
    """
    from grpo_kit.more.lab._job import Job
    from grpo_kit.record.files import run_settings

    policy: tuple[Any, ...] = (model,)
    options = {"temperature": temperature, "max_completion_tokens": tokens, "seed": seed}
    if run_settings(model) is not None:
        job, place = _trained(Path(model), task)
        policy = job.policy(place)
        options["task"] = job.task
        if base:
            options["base"] = job.policy()[0]
    elif base:
        raise ValueError("--base is for run folders: of others the base is not known")
    elif task is not None:
        options["task"] = Job.asked(task, {}).task
    conversation = kit.chat(*policy, **options)
    if question is None:
        conversation.run()
    else:
        conversation.say(question)


def export(
    run: Path = RUN,
    folder: Path = Argument(help="where the export goes; it must not be there, or be empty"),
    task: str | None = RUNS_TASK,
    format: Literal["merged", "adapter", "gguf"] = Option("merged", help="what is written"),
    quant: Literal["f32", "f16", "bf16", "q8_0"] | None = Option(
        None, help="of the weights; default: f16"
    ),
    temperature: float | None = Option(None, help="to serve at; default: the training's last"),
    rows: int = Option(64, min=1, help="held-out questions both answer"),
    no_proof: bool = Option(False, "--no-proof", help="write it, and do not read it back"),
    license: str | None = Option(
        None, help="of the base, as the hub names it, such as apache-2.0"
    ),
) -> None:
    """Write a run's model with its prompt into a folder that others load, read it back, and compare.

    \b
    examples:
      grpo-kit export runs/mine exports/mine                               for transformers, vLLM and the like
      grpo-kit export runs/mine exports/mine --format gguf --quant q8_0    one file for llama.cpp and Ollama

    It is read back in a fresh process and answers the held-out questions beside the trained model. An export that is
    not the trained model is refused (exit code 1), and left with its report.
    """
    from grpo_kit.evaluation.accuracy import Evaluation

    job, place = _trained(run, task)
    folder_of_run = place.parent
    if temperature is None:
        temperature = float(kit.read_metrics(folder_of_run)["temperature"].dropna().iloc[-1])
    comparison = None
    before = folder_of_run / BEFORE
    after = folder_of_run / AFTER
    if before.is_file() and after.is_file():
        comparison = kit.compare(Evaluation.load(before), Evaluation.load(after))
    try:
        report = kit.export(
            *job.policy(place),
            folder,
            task=job.task,
            format=format,
            quant=quant,
            rows=rows,
            proof=not no_proof,
            temperature=temperature,
            run=folder_of_run,
            license=license,
            comparison=comparison,
        )
    except kit.more.export.ExportError as error:
        raise CommandEnds(str(error)) from error
    print(f"{report}\nTry it: grpo-kit chat {folder}")


def _trained(run: Path, task: str | None) -> tuple[Any, Path]:
    """A run's job, and the place of its model, after a line that says which model it is."""
    from grpo_kit.more.lab._job import Job, model_in

    run = path_of(run, "run")
    # which a reward's chdir does not move; words have it as it was given
    folder = run.absolute()
    job = Job.of_run(run, task)
    place, description = model_in(run)
    print(
        f"{run} is {description}: {place}, trained from {job.config.model} on {job.task.name}.",
        flush=True,
    )
    return job, folder / place.name


def doctor(
    as_json: Annotated[
        Path | None,
        Option("--json", help="write the same as data; an existing file is replaced"),
    ] = None,
    verbose: Annotated[
        bool, Option("--verbose", help="show the stack trace of what failed")
    ] = False,
) -> None:
    """What this machine has, a check of every part of the kit on it, and what to do: paste it into a bug report.

    Nothing is left on the disk but --json's file. Each part that is checked is ok, failed or skipped; one that fails
    hides no other. The exit code is 1 where one failed, else 0.
    """
    as_json = as_json and path_of(as_json, "--json")
    if as_json and not as_json.absolute().parent.is_dir():
        raise ValueError(
            f"--json {as_json}: there is no such folder; name a file in one that is there"
        )
    with tempfile.TemporaryDirectory(
        prefix="grpo_kit-doctor-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        sections, checks = [], []
        for section in surroundings.sections():
            print(as_text(section) + "\n", flush=True)
            sections.append(section)
        print("Self-check", flush=True)
        width = max(map(len, self_check.PARTS))
        for check, trace in self_check.checks(folder):
            print(line_of(check, width), flush=True)
            if verbose and trace:
                print(scrubbed(trace), flush=True)
            checks.append(check)
    to_do = [line for section in sections for line in section.to_do]
    failed = [check.part for check in checks if check.outcome == "failed"]
    if failed:
        hint = "" if verbose else "run it again with --verbose and "
        to_do.append(
            f"{', '.join(failed)} failed: where no line above says why, {hint}open an issue with all of this and the "
            "output of python -m torch.utils.collect_env"
        )
    print("\nWhat to do")
    print(
        "\n".join(f"  - {scrubbed(line)}" for line in to_do)
        or "  nothing: no trouble was found"
    )
    if as_json:
        data = as_data(sections, checks, to_do)
        as_json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if failed:
        raise Exit(1)
