"""The commands that train nothing: watch, diagnose, evaluate, readiness, chat, export. Docstrings are their help."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_kit.commands import CommandEnds
from grpo_kit.commands.train import AFTER, BEFORE, MODEL

if TYPE_CHECKING:
    from grpo_kit.lab.job import Job


def watch(arguments: Namespace) -> None:
    """Follow a run from another terminal: a line a step, held-out accuracy, red flags; it ends when the run ends.

    examples:
      grpo-kit watch runs/mine                        from the last ten steps on
      grpo-kit watch runs/mine --once                 how far it is, and no more
    """
    from grpo_kit.watch.terminal import follow

    follow(Path(arguments.run), last=arguments.last, every=arguments.every, once=arguments.once)


def diagnose(arguments: Namespace) -> None:
    """What went wrong in a run of anybody, from its log: red flags, since which step, and what to try.

    examples:
      grpo-kit diagnose outputs/checkpoint-500/trainer_state.json
      grpo-kit diagnose my_grpo.ipynb                 the outputs that it has stored
      grpo-kit diagnose train.log                     the lines that TRL prints
    """
    from grpo_kit.watch.diagnose import diagnose

    print(diagnose(arguments.log))


def evaluate(arguments: Namespace) -> None:
    """Accuracy on held-out questions, base beside tuned, with 95 % intervals and a paired test.

    examples:
      grpo-kit evaluate runs/mine                     both asked the same questions greedily
      grpo-kit evaluate runs/mine --samples 8         pass@k besides
      grpo-kit evaluate runs/05 --task my_task.py     where the run does not say its task, or the file has moved
    """
    from grpo_kit.evaluation import accuracy
    from grpo_kit.evaluation.comparison import compare

    job, place = _trained(arguments.run, arguments.task)
    rows, samples = job.task.held_out[: arguments.rows], arguments.samples
    how = {"rows": rows, "samples": samples, "batch_size": job.config.eval_batch}
    if samples > 0:
        how["k"] = [1 << n for n in range(samples.bit_length())]
    found = [accuracy.evaluate(*job.policy(where), job.task, **how) for where in (None, place)]
    comparison = compare(*found)
    print(comparison)
    if samples:
        print(f"\nbase\n{found[0].table()}\n\ntuned\n{found[1].table()}")
    if arguments.examples:
        print(f"\n{comparison.examples(arguments.examples)}")


def readiness(arguments: Namespace) -> None:
    """Can GRPO learn anything from this model on this task? Counted before any training.

    examples:
      grpo-kit readiness my_task.py && grpo-kit train my_task.py
      grpo-kit readiness countdown --set model=Qwen/Qwen2.5-0.5B-Instruct --samples 64

    The exit code is 0 for GO and 1 for CHANGE SOMETHING FIRST.
    """
    from grpo_kit.evaluation.readiness import readiness
    from grpo_kit.lab.job import Job, settings_of

    job = Job.asked(arguments.task, arguments.preset, settings_of(arguments.set))
    size, model = job.config.group_size, job.policy()
    found = readiness(
        *model, job.task, rows=job.task.train[: arguments.rows], samples=arguments.samples or size, group_size=size,
        temperature=job.config.at(0).temperature, seconds=arguments.seconds, quiet=True,
    )  # fmt: skip
    ready = found.verdict == "ready"
    verdict = f"{job.config.model} on {job.task.name}: {'GO' if ready else 'CHANGE SOMETHING FIRST'}\n{found.reason}"
    numbers = found.table().to_string(float_format="{:.3f}".format, na_rep="")
    print(verdict, numbers, found.lengths.table(), sep="\n\n", flush=True)
    if not ready:
        raise CommandEnds("change something first")


def chat(arguments: Namespace) -> None:
    """Ask a trained model, an export or any model by hand, with the training's prompt around the question.

    examples:
      grpo-kit chat runs/mine --base                  question after question; an empty line ends it
      grpo-kit chat exports/mine "Which number is the largest: 4, 19, 7?"
      grpo-kit chat smollm2-135m-instruct --task largest
    """
    from grpo_kit.exports.chat import chat
    from grpo_kit.lab.job import Job
    from grpo_kit.record.files import has_metrics, run_settings

    model, task, base = (arguments.model,), None, None
    if run_settings(arguments.model) is not None or has_metrics(arguments.model):
        job, place = _trained(arguments.model, arguments.task)
        model, task, base = job.policy(place), job.task, job.policy()[0] if arguments.base else None
    elif arguments.base:
        raise ValueError("--base is for run folders: of others the base is not known")
    elif arguments.task is not None:
        task = Job.asked(arguments.task, None, {}).task
    talk = chat(
        *model, task=task, base=base, temperature=arguments.temperature, max_completion_tokens=arguments.tokens,
        seed=arguments.seed,
    )  # fmt: skip
    if arguments.question is None:
        talk.run()
        return
    for name, text in talk.ask(arguments.question).items():
        print(f"{name}: {text}" if len(talk.sides) > 1 else text)


def export(arguments: Namespace) -> None:
    """Write a run's model with its prompt into a folder that others load, read it back, and compare.

    examples:
      grpo-kit export runs/mine exports/mine                               for transformers, vLLM and the like
      grpo-kit export runs/mine exports/mine --format gguf --quant q8_0    one file for llama.cpp and Ollama

    It is read back in a fresh process and answers the held-out questions beside the trained model. An export that is
    not the trained model is refused (exit code 1), and left with its report.
    """
    from grpo_kit.evaluation.accuracy import Evaluation
    from grpo_kit.evaluation.comparison import compare
    from grpo_kit.exports import ExportError, export
    from grpo_kit.record.files import read_metrics

    job, place = _trained(arguments.run, arguments.task)
    run, last = place.parent, float(read_metrics(place.parent)["temperature"].dropna().iloc[-1])
    sides = [run / name for name in (BEFORE, AFTER)]
    measured = place.name == MODEL and all(path.is_file() for path in sides)
    try:
        made = export(
            *job.policy(place), arguments.folder, task=job.task, format=arguments.format, quant=arguments.quant,
            temperature=last if arguments.temperature is None else arguments.temperature, rows=arguments.rows,
            proof=not arguments.no_proof, run=run, license=arguments.license,
            comparison=compare(*map(Evaluation.load, sides)) if measured else None,
        )  # fmt: skip
    except ExportError as error:
        raise CommandEnds(str(error)) from error
    print(f"{made}\nTry it: grpo-kit chat {arguments.folder}")


def _trained(run: str, task: str | None) -> tuple[Job, Path]:
    """A run's job, and the place of its model, after a line that says which model it is."""
    from grpo_kit.lab.job import Job, model_in
    from grpo_kit.record.run_path import run_path

    folder = run_path(run, "run")  # which a reward's chdir does not move; words have it as it was given
    job, (place, what) = Job.of_run(Path(run), task), model_in(Path(run))
    print(f"{run} is {what}: {place}, trained from {job.config.model} on {job.task.name}.", flush=True)
    return job, folder / place.name
