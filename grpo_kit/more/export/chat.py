"""Try a model by hand: a question in, its response out, with the training's prompt; base beside tuned."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_kit._support.argument_checks import (
    check_model,
    check_task,
    check_temperature,
    check_text,
    check_tokenizer,
    check_whole,
)
from grpo_kit._support.display import escape
from grpo_kit._support.kernel import in_notebook, visible
from grpo_kit.engine.complete import complete
from grpo_kit.evaluation._as_trained import say_difference
from grpo_kit.models._adapters import is_adapter
from grpo_kit.models._model_facts import base_model
from grpo_kit.models.loading import load_policy
from grpo_kit.more.export._export_folder import is_unfinished, read_report
from grpo_kit.more.export._template import ExportError, Prompting, as_export_errors, render
from grpo_kit.record._run_folder import path_of
from grpo_kit.record.files import has_metrics
from grpo_kit.watch._completions import side_by_side

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_kit.tasks import Task

ADAPTER_OFF = "without its adapter"
_SHOWN = 20  # questions that a notebook keeps visible


@dataclass
class Side:
    """One model of a chat. prompting: a task's; None: the tokenizer's template has it. prefill: for display."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    prompting: Prompting | None
    prefill: str = ""
    bare: bool = False  # with its adapter switched off

    def respond(self, question: str, *, tokens: int, temperature: float, seed: int) -> str:
        """The whole response, the prefill in front."""
        if self.prompting is not None:
            prompts: list = [self.prompting.prompt(self.tokenizer, question)]
        else:
            text = render(self.tokenizer, question)
            prompts = [self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        with self.model.disable_adapter() if self.bare else nullcontext():
            (completion,) = complete(
                self.model,
                self.tokenizer,
                prompts,
                max_completion_tokens=tokens,
                temperature=temperature,
                seed=seed,
            )
        return self.prefill + completion.text


class Chat:
    """The result of kit.chat: ask(question); in a notebook an input field, run() in a terminal."""

    def __init__(
        self, sides: dict[str, Side], *, temperature: float, tokens: int, seed: int
    ) -> None:
        self.sides, self.temperature, self.tokens, self.seed = sides, temperature, tokens, seed
        self.asked: list[tuple[str, dict[str, str]]] = []

    def ask(self, question: str) -> dict[str, str]:
        """Each side's response, the prefill included; every question is a new conversation.

        Sampled above temperature 0; the seed increases with each question. Raises PromptError for a blank one.
        """
        check_text("question", question)
        seed = self.seed + len(self.asked)
        sampling = {"tokens": self.tokens, "temperature": self.temperature, "seed": seed}
        responses = {
            name: side.respond(question, **sampling) for name, side in self.sides.items()
        }
        self.asked.append((question, responses))
        return responses

    def say(self, question: str) -> None:
        """Print each side's response; what would steer the terminal as escapes."""
        for name, text in self.ask(question).items():
            print(visible(f"{name}: {text}" if len(self.sides) > 1 else text), flush=True)

    def run(self) -> None:
        """Answer typed lines until an empty line or the end of the input."""
        print(f"{self!r}\nA question and Enter; an empty line ends it.")
        while True:
            print("> ", end="", flush=True)
            question = sys.stdin.readline().strip()
            if not question:
                print()
                return
            try:
                self.say(question)
            except ValueError as error:  # an invalid question ends nothing
                print(visible(error), flush=True)

    def __repr__(self) -> str:
        sampling = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        return f"Chat with {' and '.join(self.sides)}: {sampling}, at most {self.tokens} tokens; .ask('...'), or .run()"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """An input field; on a page without a kernel, the questions and responses so far."""
        saved = {
            "text/plain": repr(self),
            "text/html": self.page() or f"<p>{escape(repr(self))}</p>",
        }
        if not in_notebook() or importlib.util.find_spec("ipywidgets") is None:
            return saved
        return self._field()._repr_mimebundle_(**options) | saved

    def _field(self) -> Any:
        import ipywidgets as w

        field = w.Text(
            placeholder="a question, then Enter",
            continuous_update=False,
            layout=w.Layout(width="70%"),
        )
        temperature = w.BoundedFloatText(
            value=self.temperature,
            min=0.0,
            max=5.0,
            step=0.1,
            description="temperature",
            style={"description_width": "initial"},
            layout=w.Layout(width="170px"),
        )
        page = w.HTML(self.page())

        def answer(change: dict[str, Any]) -> None:
            question = change["new"].strip()
            if not question:
                return
            self.temperature = float(temperature.value)
            page.value = "..." + page.value
            try:
                self.ask(question)
                page.value = self.page()
            except ValueError as error:
                page.value = (
                    side_by_side("not asked", question, "", {"error": str(error)}) + self.page()
                )
            field.value = ""

        field.observe(answer, "value")
        return w.VBox([w.HBox([field, temperature]), page])

    def page(self) -> str:
        """The last questions and their responses as HTML, newest first."""
        page = ""
        for number, (question, responses) in list(enumerate(self.asked, 1))[-_SHOWN:]:
            page = side_by_side(f"question {number}", question, "", responses) + page
        return page


def chat(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    task: Task | None = None,
    base: Any = None,
    temperature: float | None = None,
    max_completion_tokens: int | None = None,
    seed: int = 0,
) -> Chat:
    """A chat with a model by hand, with the training's prompt.

    model: an export's folder, anything else that load_policy loads, or a model in memory with its tokenizer. task: its
    system text, worked examples and prefill surround the question; an export contains them.
    base: a second model for the same questions: a name, a folder or a model; True: a LoRA model without its adapter.
    temperature: None means the export's, else 0, greedy. max_completion_tokens: None means the export's, the task's, or
    256.
    Raises ExportError for a task of several turns, a missing base, and an export that is unfinished or was
    changed since its proof; PolicyLoadError for anything that is no model.

    >>> kit.chat("exports/largest").ask("Which number is the largest: 4, 19, 7?")  # doctest: +SKIP
    {'exports/largest': '<answer>19</answer>'}
    """
    if hasattr(task, "play"):
        raise ExportError(
            f"task {task.name!r} has several turns; let evaluate(model, tokenizer, task) play them"
        )
    if task is not None:
        with as_export_errors():
            check_task(task)
    name, tuned, sampling = _side(model, tokenizer, task)
    sides = {"tuned": tuned}
    if base is True:
        if not hasattr(tuned.model, "peft_config"):
            raise ExportError(
                "base=True switches an adapter off, and this model has none; name the base"
            )
        sides[ADAPTER_OFF] = replace(tuned, bare=True)
    elif base is not None and base is not False:
        _, side, _ = _side(base, tokenizer, task)
        if side.prompting is None and tuned.prompting is None:
            # Both models get the same prompt.
            side.tokenizer, side.prefill = tuned.tokenizer, tuned.prefill
        sides["base"] = side
    elif name:
        sides = {name: tuned}
    if temperature is None:
        temperature = float(sampling.get("temperature") or 0.0)
    tokens = max_completion_tokens
    if tokens is None:
        tokens = sampling.get("max_completion_tokens") or getattr(
            task, "max_completion_tokens", 256
        )
    with as_export_errors():
        temperature = check_temperature(temperature, greedy=True)
        check_whole("max_completion_tokens", tokens)
        check_whole("seed", seed, 0)
    say_difference(tuned.model, task, caller="chat", temperature=temperature, tokens=tokens)
    return Chat(sides, temperature=temperature, tokens=tokens, seed=seed)


def _side(model: Any, tokenizer: Any, task: Task | None) -> tuple[str, Side, dict[str, Any]]:
    """The name, the side, and the export's own sampling settings."""
    prompting, prefill = None, ""
    if task is not None:
        prompting, prefill = Prompting.of(task), task.prefill
    if not isinstance(model, str | os.PathLike):
        with as_export_errors():
            check_model(model)
            if tokenizer is None:
                raise ExportError("tokenizer=None: a model in memory needs its tokenizer")
            check_tokenizer(tokenizer)
        return "", Side(model, tokenizer, prompting, prefill), {}
    folder = path_of(model, "model")
    report, source = _report_of(folder), model
    if report.get("file"):
        source = folder / report["file"]
    if prompting is None:
        prefill = report.get("prefill", "")
    elif report.get("prompt_inside"):
        raise ExportError(
            f"task={task.name!r}: {os.fspath(model)} holds its prompt already; leave the task out"
        )
    tuning = "lora" if is_adapter(os.fspath(source)) else "full"
    loaded, tokenizer = load_policy(source, tuning=tuning, quiet=True)
    base_model(loaded).eval()
    return (
        os.fspath(model),
        Side(loaded, tokenizer, prompting, prefill),
        report.get("sampling", {}),
    )


def _report_of(folder: Path) -> dict[str, Any]:
    """An export's report, {} for another model. Raises ExportError for an export that cannot be used."""
    if is_unfinished(folder):
        raise ExportError(
            f"model={str(folder)!r} is an export that was not finished; export the model again"
        )
    if has_metrics(folder) and not any(folder.glob("*.safetensors")):
        models = [name for name in ("model", "adapter") if (folder / name).is_dir()]
        models += [path.name for path in sorted(folder.glob("checkpoint-*"))]
        remedy = f"ask {folder / models[0]}" if models else "and holds no model yet"
        raise ExportError(f"model={str(folder)!r} is the folder of a run; {remedy}")
    report = read_report(folder)
    if report is None:
        return {}
    if report["objections"]:
        warnings.warn(
            f"{folder} was refused: {'; '.join(report['objections'])}",
            UserWarning,
            stacklevel=4,
        )
    return report
