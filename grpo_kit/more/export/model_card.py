"""The README.md of an export, and its upload to the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from grpo_kit.models._gguf_reader import EMBEDDED
from grpo_kit.models._saved_adapters import BASE
from grpo_kit.more.export._export_folder import files_of, read_report
from grpo_kit.more.export._template import ExportError
from grpo_kit.record.files import RunFolderError, read_metrics
from grpo_kit.record.run_path import path_of
from grpo_kit.watch.chart import plot_run
from grpo_kit.watch.run_card import card_text

CURVE = "curve.png"
# Licenses of the bases that the kit ships or its presets name, from their own cards.
LICENSES = {
    EMBEDDED: "apache-2.0",
    "Qwen/Qwen2.5-0.5B-Instruct": "apache-2.0",
    "Qwen/Qwen2.5-1.5B-Instruct": "apache-2.0",
}
_LIBRARY = {"merged": "transformers", "adapter": "peft", "gguf": "gguf"}
_USE = {
    "merged": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
model = AutoModelForCausalLM.from_pretrained("{folder}")
asked = tokenizer.apply_chat_template(
    [{{"role": "user", "content": {question!r}}}], add_generation_prompt=True, return_tensors="pt"
)
print(tokenizer.decode(model.generate(**asked)[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))
```""",
    "gguf": """```sh
ollama create {folder} -f Modelfile && ollama run {folder}
llama-cli -m {file} --jinja -p {question!r}
```""",
    "adapter": """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}), "{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```

To go on training: `kit.load_policy("{folder}", tuning="lora")`.""",
}


def export_card(
    made: Any,
    *,
    base: str,
    beside: bool,
    question: str,
    run: Path | None = None,
    comparison: object | None = None,
    drawn: bool = False,
    license: str | None = None,
) -> str:
    """The card: the training, from the run folder if there is one; the files, the proof's result, and how to use them.

    made: an Exported. beside: an adapter's base lies in the folder. drawn: CURVE does.
    """
    of_run = made.folder if run is None else run
    text = card_text(of_run, comparison, base=base, license=license, library=_LIBRARY[made.format])
    opened = f"{made.folder.name}/{BASE}" if beside else base
    use = _USE[made.format].format(folder=made.folder.name, question=question, file=made.file, base=opened)
    notes = [f"- {note}" for note in made.notes]
    if not license:
        notes.append(
            f"- licence: that of {base}, which the kit does not know; look there before you pass it on"
        )
    proof = (
        f"Read back from disk in a fresh process:\n\n```\n{made.proof}\n```"
        if made.proof
        else "Not read back."
    )
    parts = [
        text.rstrip(),
        *([f"![Reward, completions and what else was measured, step by step]({CURVE})"] if drawn else []),
        "## What lies here",
        f"{made.format}, weights as {made.stored}, {made.bytes / 1e6:,.0f} MB. The chat template holds the training's "
        "system text, worked examples and prefill: send the question alone.",
        *(["\n".join(notes)] if notes else []),
        proof,
        "## Use it",
        use,
    ]
    return "\n\n".join(parts) + "\n"


def curve(run: Path, folder: Path) -> bool:
    """Draw the run's chart into the folder; False if the run has no step."""
    try:
        done = len(read_metrics(run))
    except RunFolderError:
        return False
    if not done:
        return False
    plot_run(run).save(folder / CURVE)
    return True


def license_of(base: str) -> str | None:
    """The license in the base's own files, or one that the kit knows; None if unknown."""
    if base in LICENSES:
        return LICENSES[base]
    path = path_of(base, "base")
    if path.suffix == ".gguf" and path.is_file():
        return _license_in(path)
    if (path / "README.md").is_file():
        from huggingface_hub import metadata_load

        return (metadata_load(path / "README.md") or {}).get("license")
    return None


def _license_in(gguf: Path) -> str | None:
    """A GGUF's general.license, which stands before its vocabulary: reading that takes half a minute."""
    with gguf.open("rb") as file:
        head = file.read(2**16)
    _, key, rest = head.partition(b"general.license\x08\x00\x00\x00")  # 8: a text, its length in front
    length = int.from_bytes(rest[:8], "little")
    return rest[8 : 8 + length].decode(errors="replace") if key and 0 < length < 200 else None


def push_to_hub(folder: str | os.PathLike, repo: str, *, private: bool = True, dry_run: bool = False) -> str:
    """Upload an export's folder to the hub as repo, "owner/name"; returns the files. dry_run: nothing is sent.

    Raises ExportError for a folder that is no export, one that was not proved or was changed since, and if the hub
    rejects it.

    >>> push_to_hub("exports/largest", "me/largest", dry_run=True)  # doctest: +SKIP
    """
    path = path_of(folder)
    report = read_report(path)
    if report is None:
        raise ExportError(f"folder={str(folder)!r} is no export; give a folder that kit.export wrote")
    if report["objections"]:
        raise ExportError(f"{path} was refused: {'; '.join(report['objections'])}; export the model again")
    if report["proof"] is None:
        raise ExportError(f"{path} was not proved; export it with proof=True before others rely on it")
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ExportError(f"repo={repo!r} must be owner/name")
    lines = [f"{file.stat().st_size:>13,} {file.relative_to(path)}" for file in files_of(path)]
    said = "\n".join([f"{repo}{', private' if private else ', PUBLIC'}:", *lines])
    if dry_run:
        return f"would go to {said}"
    from huggingface_hub import HfApi

    api: Any = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            folder_path=os.fspath(path), repo_id=repo, commit_message=f"Exported as {report['stored']}"
        )
    except Exception as error:  # the hub's, its client's and the network's errors share no base class
        raise ExportError(
            f"repo={repo!r}: the hub did not take it ({error}); run `hf auth login`, check the name, and call "
            f"it again: {path} is untouched"
        ) from error
    return f"went to {said}"
