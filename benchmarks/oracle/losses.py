"""Losses and gradients on the forced batch: what is on record, and the comparison of another implementation with it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from benchmarks.oracle.cases import FOLDER, Case, all_cases
from benchmarks.oracle.compare import Difference, number_error, summary, tensor_errors
from benchmarks.result import as_text

PATH = FOLDER / "losses.json"
LIMIT = 1e-5  # relative, of the loss and of each tensor of the gradient
# its weights are powers and exponentials of a sequence's summed log-ratios
LIMITS = {"vespo": 3e-5}
Compute = Callable[[Case], tuple[float, dict[str, torch.Tensor]]]
"""Case -> its loss, summed over micro-batches, and the gradient of each trained parameter by the parameter's name.

Raises ValueError where the implementation refuses the loss.
"""


def record_case(compute: Compute, case: Case) -> dict[str, Any]:
    """{"loss", "gradients"} of the case, or {"refused": the ValueError's text}."""
    try:
        loss, gradients = compute(case)
    except ValueError as error:
        return {"refused": str(error)}
    return {"loss": loss, "gradients": summary(gradients)}


def save_losses(records: dict[str, dict[str, dict[str, Any]]], facts: dict[str, Any]) -> None:
    """Write the facts and records[implementation][case] to losses.json, the gradients' summaries to losses.npz."""
    arrays, tensors = {}, {}
    for case in all_cases():
        for implementation, by_case in records.items():
            record = by_case[case.name]
            if "gradients" in record:
                names = tensors.setdefault(case.tuning, sorted(record["gradients"]))
                if sorted(record["gradients"]) != names:
                    raise ValueError(
                        f"{case.name}: its gradients are not those of the other cases"
                    )
                numbers = [record["gradients"][name] for name in names]
                arrays[f"{implementation}/{case.name}"] = np.array(numbers, np.float32)
    short = {
        implementation: {
            name: {key: value for key, value in record.items() if key != "gradients"}
            for name, record in by_case.items()
        }
        for implementation, by_case in records.items()
    }
    PATH.write_text(as_text(facts | {"tensors": tensors, "cases": short}))
    np.savez_compressed(PATH.with_suffix(".npz"), **arrays)


@functools.cache
def recorded() -> dict[str, dict[str, Any]]:
    """TRL's record by the case's name: {"loss", "gradients"} or {"refused"}."""
    saved = json.loads(PATH.read_text())
    with np.load(PATH.with_suffix(".npz")) as file:
        arrays = dict(file)
    made = {}
    for case in all_cases():
        made[case.name] = dict(saved["cases"]["trl"][case.name])
        if "refused" not in made[case.name]:
            numbers = arrays[f"trl/{case.name}"]
            made[case.name]["gradients"] = dict(
                zip(saved["tensors"][case.tuning], numbers, strict=True)
            )
    return made


def compare_losses(
    compute: Compute, *, cases: Iterable[Case] | None = None
) -> list[Difference]:
    """How far `compute` is from TRL's record, case by case: the loss, and the gradient of each tensor.

    cases: all of them unless given. A loss that is refused on one side alone differs by infinity.

    >>> all(d.passes for d in compare_losses(loop_loss))  # doctest: +SKIP
    True
    """
    wanted = recorded()
    differences = []
    for case in all_cases() if cases is None else cases:
        differences += case_differences(
            case.name, record_case(compute, case), wanted[case.name]
        )
    return differences


def case_differences(name: str, got: dict, wanted: dict) -> list[Difference]:
    """The differences of one case's two records."""
    limit = LIMITS.get(name.split(",")[0], LIMIT)
    if "refused" in got or "refused" in wanted:
        error = 0.0 if ("refused" in got) == ("refused" in wanted) else float("inf")
        return [Difference(name, "refusal", error, 0.0)]
    # Terms of a loss cancel: the rounding error is a share of the terms, which are of the order of 0.1.
    made = [Difference(name, "loss", number_error(got["loss"], wanted["loss"], 0.1), limit)]
    errors = tensor_errors(got["gradients"], wanted["gradients"])
    return made + [
        Difference(name, f"gradient of {tensor}", e, limit) for tensor, e in errors.items()
    ]
