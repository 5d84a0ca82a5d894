"""The proof of an export: a fresh process reads it from disk, and its results are compared with the trained model's."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_kit.engine.complete import Completion, complete
from grpo_kit.engine.memory._free import free_bytes
from grpo_kit.evaluation.accuracy import evaluation_of
from grpo_kit.evaluation.comparison import Comparison, compare
from grpo_kit.evaluation.generate_and_score import Answers
from grpo_kit.models._model_facts import evaluating, token_rows
from grpo_kit.more.export._reader import logprobs_of
from grpo_kit.more.export._template import Prompting, trained_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The largest allowed mean KL divergence, in nats a token, from the model in memory, by storage type.
FARTHEST = {"f32": 1e-4, "f16": 1e-3, "bf16": 1e-2, "q8_0": 2e-2}
LEAST_AGREEMENT = 0.9  # lowest share of tokens where the export's likeliest is the model's
# a model that computes in 16 bits differs this much from its own weights
_COMPUTED_IN_16 = 1e-2
_POSITIONS = 256  # completion tokens to compare
_BROKEN = 0.05  # p below which more broken than fixed rows are not chance


class ProofError(RuntimeError):
    """The reading process failed; the message has its output."""


@dataclass(frozen=True)
class Proof:
    """An export read from disk, compared with the trained model.

    prompts_same: number of questions that its chat template alone renders to the training's tokens. positions: tokens
    compared. kl: mean of KL(trained || export) in nats a token. largest: largest difference in log-probability of the
    written tokens. mean, widest: differences over the whole vocabulary.
    agreement: share of positions with the same likeliest token. same_answers: number of equal greedy completions.
    comparison: of held-out rows, trained and exported; None without a task.
    """

    questions: int
    prompts_same: int
    positions: int
    kl: float
    largest: float
    mean: float
    widest: float
    agreement: float
    same_answers: float
    stored: str
    computed: str
    comparison: Comparison | None = None

    @property
    def objections(self) -> list[str]:
        """Why this export is not the trained model; [] if it is."""
        reasons, farthest = [], FARTHEST[self.stored]
        if self.computed != "float32":
            farthest = max(farthest, _COMPUTED_IN_16)
        if self.prompts_same < self.questions:
            reasons.append(
                f"{self.questions - self.prompts_same} of {self.questions} prompts are others"
            )
        if not self.kl <= farthest:
            reasons.append(
                f"it is {self.kl:.2g} nats a token from the trained model, above {farthest:g}"
            )
        if not self.agreement >= LEAST_AGREEMENT:
            reasons.append(
                f"its likeliest token is the trained model's in {self.agreement:.0%} of {self.positions}"
            )
        if self.comparison is None:
            return reasons
        fixed, broken = self.comparison.fixed, self.comparison.broken
        p = self.comparison.p.get("strict")
        if p is None:  # nothing is right or wrong
            if self.comparison.difference["reward"].high < 0:
                reasons.append(
                    f"its mean reward on held-out rows is lower: {self.comparison.sentence}"
                )
        elif broken > fixed and p < _BROKEN:
            reasons.append(f"{broken} held-out rows broke and {fixed} were fixed, p = {p:.2g}")
        return reasons

    def __str__(self) -> str:
        lines = [
            f"prompts by the chat template alone: {self.prompts_same} of {self.questions} as in training",
            f"{self.positions} tokens: {self.kl:.2g} nats from the trained model in the mean, a written token's "
            f"log-probability off by {self.largest:.2g} at most, same likeliest token in {self.agreement:.1%}",
            f"greedy completions: {self.same_answers:.1%} the same",
        ]
        if self.comparison is not None:
            lines.append(f"held out, trained -> exported: {self.comparison.sentence}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """A dict for export.json."""
        entries = {**self.__dict__, "objections": self.objections}
        comparison = entries.pop("comparison")
        if comparison is not None:
            measure = comparison.leads
            entries["held_out"] = {
                "n": comparison.base.n,
                "measure": measure,
                "trained": asdict((comparison.base.rates | comparison.base.rewards)[measure]),
                "exported": asdict(
                    (comparison.tuned.rates | comparison.tuned.rewards)[measure]
                ),
                "difference": asdict(comparison.difference[measure]),
                "fixed": comparison.fixed,
                "broken": comparison.broken,
                "p": comparison.p[measure],
            }
        return entries


def prove(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    exported: Any,
    prompting: Prompting,
    questions: Sequence[str],
    tokens: int,
    task: Any,
    rows: Sequence[dict],
) -> Proof:
    """Read the folder in a fresh process and compare. rows: of the task, evaluated with both if it has one turn.

    exported: an Exported. Raises ProofError with the process's output if it could not read the folder.
    """
    print(f"export: the trained model answers {len(questions)} questions", flush=True)
    prompts = [prompting.prompt(tokenizer, question) for question in questions]
    prompt_ids = [trained_ids(tokenizer, prompt) for prompt in prompts]
    completions = complete(model, tokenizer, prompts, max_completion_tokens=tokens)
    scored, positions = [], 0
    for ids, completion in zip(prompt_ids, completions, strict=True):
        if positions < _POSITIONS:
            completion_ids = list(completion.ids)[: _POSITIONS - positions]
            scored.append((ids, completion_ids))
            positions += len(completion_ids)
    request = {
        "folder": str(folder.absolute()),
        "format": exported.format,
        "file": exported.file,
        "device": _device(model),
        "questions": list(questions),
        "tokens": tokens,
        "scored": scored,
        "rows": token_rows(model),
    }
    print("export: a fresh process reads the export and answers them", flush=True)
    answer, exported_logprobs = _read_back(request)
    with evaluating(model), torch.no_grad():
        trained_logprobs = [logprobs_of(model, *ids, request["rows"]) for ids in scored]
    comparison = None
    if task is not None and not hasattr(task, "play"):
        exported_completions = [
            Completion(text, len(ids), not has_end, tuple(ids))
            for text, ids, has_end in zip(
                answer["texts"], answer["answers"], answer["ended"], strict=True
            )
        ]
        answers = Answers(
            task, list(rows), prompts, completions, 1, {"max_completion_tokens": tokens}
        )
        exported_answers = replace(answers, completions=exported_completions)
        comparison = compare(evaluation_of(answers), evaluation_of(exported_answers))
    equal = [ids == list(c.ids) for ids, c in zip(answer["answers"], completions, strict=True)]
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return Proof(
        questions=len(questions),
        prompts_same=sum(a == b for a, b in zip(answer["prompts"], prompt_ids, strict=True)),
        positions=positions,
        **_distances(trained_logprobs, exported_logprobs, scored),
        same_answers=sum(equal) / len(equal),
        stored=exported.stored,
        computed=str(dtype).removeprefix("torch."),
        comparison=comparison,
    )


def _read_back(request: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The reader's answer, and its log-probabilities of the scored tokens."""
    with tempfile.TemporaryDirectory(prefix="grpo_kit-proof-") as directory:
        logprobs, answer = Path(directory) / "logprobs.pt", Path(directory) / "answer.json"
        _ask(
            request | {"out": str(logprobs), "answer": str(answer)},
            Path(directory) / "request.json",
        )
        return json.loads(answer.read_text(encoding="utf-8")), torch.load(logprobs)


def _ask(request: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(request), encoding="utf-8")
    script = Path(__file__).with_name("_reader.py")
    result = subprocess.run(
        [sys.executable, "-P", str(script), str(path)], capture_output=True, text=True
    )
    if result.returncode < 0:
        raise ProofError(
            f"the process that read it was killed (signal {-result.returncode}), as happens where memory runs out; "
            "free some, or take fewer rows, and export again"
        )
    if result.returncode:
        raise ProofError(f"a fresh process could not read it:\n{result.stderr[-2000:].strip()}")


def _device(model: PreTrainedModel) -> str:
    """The card if the weights in float32 fit beside the model; else the CPU."""
    device = next(model.parameters()).device
    n_bytes = 5 * sum(p.numel() for p in model.parameters())
    return "cuda" if device.type == "cuda" and free_bytes(device) > n_bytes else "cpu"


def _distances(trained: list, exported: list, scored: list) -> dict[str, float]:
    """A Proof's kl, largest, mean, widest and agreement."""
    first, second = torch.cat(trained), torch.cat(exported)
    completion_ids = torch.tensor([token for _, ids in scored for token in ids])[:, None]
    distances = (first - second).abs()
    return {
        "kl": max(0.0, float((first.exp() * (first - second)).sum(-1).mean())),
        "largest": float(distances.gather(1, completion_ids).max()),
        "mean": float(distances.mean()),
        "widest": float(distances.max()),
        "agreement": float((first.argmax(-1) == second.argmax(-1)).float().mean()),
    }
