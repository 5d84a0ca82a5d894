"""The proof of an export: a fresh process reads it from disk, and its results are compared with the trained model's."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_kit.engine.complete import Completion, complete
from grpo_kit.engine.memory._free import free_bytes
from grpo_kit.evaluation.accuracy import evaluation_of
from grpo_kit.evaluation.comparison import Comparison, compare
from grpo_kit.evaluation.generate_and_score import Answers
from grpo_kit.models._model_facts import token_rows
from grpo_kit.more.export._template import Prompting, trained_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The largest allowed mean KL divergence, in nats a token, from the model in memory, by storage type.
FARTHEST = {"f32": 1e-4, "f16": 1e-3, "bf16": 1e-2, "q8_0": 2e-2}
LEAST_AGREEMENT = 0.9  # lowest share of tokens where the export's likeliest is the model's
_COMPUTED_IN_16 = 1e-2  # a model that computes in 16 bits differs this much from its own weights
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
        found, farthest = [], FARTHEST[self.stored]
        if self.computed != "float32":
            farthest = max(farthest, _COMPUTED_IN_16)
        if self.prompts_same < self.questions:
            found.append(f"{self.questions - self.prompts_same} of {self.questions} prompts are others")
        if not self.kl <= farthest:
            found.append(f"it is {self.kl:.2g} nats a token from the trained model, above {farthest:g}")
        if not self.agreement >= LEAST_AGREEMENT:
            found.append(
                f"its likeliest token is the trained model's in {self.agreement:.0%} of {self.positions}"
            )
        if self.comparison is not None:
            c = self.comparison
            p = c.p.get("strict")
            if p is None:  # nothing is right or wrong
                if c.difference["reward"].high < 0:
                    found.append(f"its mean reward on held-out rows is lower: {c.sentence}")
            elif c.broken > c.fixed and p < _BROKEN:
                found.append(f"{c.broken} held-out rows broke and {c.fixed} were fixed, p = {p:.2g}")
        return found

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
        made = {name: value for name, value in self.__dict__.items() if name != "comparison"}
        if self.comparison is not None:
            c = self.comparison
            name = c.leads
            made["held_out"] = {
                "n": c.base.n,
                "measure": name,
                "trained": asdict((c.base.rates | c.base.rewards)[name]),
                "exported": asdict((c.tuned.rates | c.tuned.rewards)[name]),
                "difference": asdict(c.difference[name]),
                "fixed": c.fixed,
                "broken": c.broken,
                "p": c.p[name],
            }
        return made | {"objections": self.objections}


def prove(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    format: str,
    stored: str,
    file: str | None,
    prompting: Prompting,
    questions: Sequence[str],
    tokens: int,
    task: Any = None,
    rows: Sequence[dict] = (),
) -> Proof:
    """Read the folder in a fresh process and compare. rows: of a Task, evaluated with both.

    Raises ProofError with the process's output if it could not read the folder.
    """
    prompts = [prompting.prompt(tokenizer, question) for question in questions]
    written = complete(model, tokenizer, prompts, max_completion_tokens=tokens)
    scored, positions = [], 0
    for prompt, made in zip(prompts, written, strict=True):
        if ids := list(made.ids)[: _POSITIONS - positions]:
            scored.append((trained_ids(tokenizer, prompt), ids))
            positions += len(ids)
    with tempfile.TemporaryDirectory(prefix="grpo_kit-proof-") as held:
        out, answer = Path(held) / "scores.pt", Path(held) / "answer.json"
        request = {
            "folder": str(folder.absolute()), "format": format, "file": file, "device": _device(model),
            "questions": list(questions), "tokens": tokens, "scored": scored, "out": str(out), "answer": str(answer),
            "rows": token_rows(model),
        }  # fmt: skip
        _ask(request, Path(held) / "request.json")
        found = json.loads(answer.read_text(encoding="utf-8"))
        theirs = torch.load(out)
    ours = [_scores(model, *pair) for pair in scored]
    apart = _apart(ours, theirs, scored)
    comparison, n = None, len(rows)
    if task is not None:
        read = [
            Completion(text, len(ids), not ended, tuple(ids))
            for text, ids, ended in zip(found["texts"], found["answers"], found["ended"], strict=True)
        ]
        how = {"max_completion_tokens": tokens}
        both = (Answers(task, list(rows), prompts[:n], made[:n], 1, how) for made in (written, read))
        comparison = compare(*map(evaluation_of, both))
    expected = [trained_ids(tokenizer, prompt) for prompt in prompts]
    return Proof(
        questions=len(questions),
        prompts_same=sum(one == other for one, other in zip(found["prompts"], expected, strict=True)),
        positions=positions,
        **apart,
        same_answers=sum(a == list(w.ids) for a, w in zip(found["answers"], written, strict=True))
        / len(written),
        stored=stored,
        computed=str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix(
            "torch."
        ),
        comparison=comparison,
    )


def _ask(request: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(request), encoding="utf-8")
    script = Path(__file__).with_name("_reader.py")
    done = subprocess.run([sys.executable, "-P", str(script), str(path)], capture_output=True, text=True)
    if done.returncode < 0:
        raise ProofError(
            f"the process that read it was killed (signal {-done.returncode}), as happens where memory runs out; free "
            "some, or take fewer rows, and export again"
        )
    if done.returncode:
        raise ProofError(f"a fresh process could not read it:\n{done.stderr[-2000:].strip()}")


def _device(model: PreTrainedModel) -> str:
    """The card if the weights in float32 fit beside the model; else the CPU."""
    device = next(model.parameters()).device
    needed = 5 * sum(p.numel() for p in model.parameters())
    return "cuda" if device.type == "cuda" and free_bytes(device) > needed else "cpu"


def _scores(model: PreTrainedModel, prompt: list[int], made: list[int]) -> torch.Tensor:
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *made]], device=next(model.parameters()).device)
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1, : token_rows(model)]
            return logits.float().log_softmax(-1).cpu()
    finally:
        model.train(was)


def _apart(ours: list, theirs: list, scored: list) -> dict[str, float]:
    """A Proof's kl, largest, mean, widest and agreement."""
    if not ours:
        return {"kl": 0.0, "largest": 0.0, "mean": 0.0, "widest": 0.0, "agreement": 1.0}
    one, other = torch.cat(ours), torch.cat(theirs)
    written = torch.tensor([token for _, made in scored for token in made])[:, None]
    apart = (one - other).abs()
    return {
        "kl": max(0.0, float((one.exp() * (one - other)).sum(-1).mean())),
        "largest": float(apart.gather(1, written).max()),
        "mean": float(apart.mean()),
        "widest": float(apart.max()),
        "agreement": float((one.argmax(-1) == other.argmax(-1)).float().mean()),
    }
