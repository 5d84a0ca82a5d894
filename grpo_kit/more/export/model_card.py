"""The README.md of an export, and its upload to the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from grpo_kit.models._adapters import BASE
from grpo_kit.models._gguf_reader import EMBEDDED
from grpo_kit.more.export._export_folder import CARD, files_of, read_report
from grpo_kit.more.export._template import ExportError
from grpo_kit.record._run_folder import path_of
from grpo_kit.record.files import RunFolderError, steps_done
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


def write_card(
    folder: Path,
    exported: Any,
    *,
    base: str,
    question: str,
    run: Path | None = None,
    comparison: object | None = None,
    license: str | None = None,
) -> None:
    """Write the card: the training, from the run folder if there is one; the files, the proof's result, and their use.

    exported: an Exported, whose files lie in `folder` and later under its own name.
    """
    library = _LIBRARY[exported.format]
    card = card_text(
        run or exported.folder, comparison, base=base, license=license, library=library
    )
    parts = [card.rstrip()]
    if run is not None and _has_steps(run):
        plot_run(run).save(folder / CURVE)
        parts.append(
            f"![Reward, completions and what else was measured, step by step]({CURVE})"
        )
    parts += [
        "## What lies here",
        f"{exported.format}, weights as {exported.stored}, {exported.bytes / 1e6:,.0f} MB. The chat template holds "
        "the training's system text, worked examples and prefill: send the question alone.",
    ]
    notes = [f"- {note}" for note in exported.notes]
    if not license:
        notes.append(
            f"- licence: that of {base}, which the kit does not know; look there before you pass it on"
        )
    if notes:
        parts.append("\n".join(notes))
    if exported.proof:
        parts.append(f"Read back from disk in a fresh process:\n\n```\n{exported.proof}\n```")
    else:
        parts.append("Not read back.")
    name = exported.folder.name
    if (folder / BASE).is_dir():  # of an adapter
        base = f"{name}/{BASE}"
    use = _USE[exported.format].format(
        folder=name, question=question, file=exported.file, base=base
    )
    parts += ["## Use it", use]
    (folder / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _has_steps(run: Path) -> bool:
    """False too where its metrics cannot be read: an export does not fail for its chart."""
    try:
        return steps_done(run) > 0
    except RunFolderError:
        return False


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
    # 8: a text, its length in front
    _, key, after_key = head.partition(b"general.license\x08\x00\x00\x00")
    length = int.from_bytes(after_key[:8], "little")
    if not key or not 0 < length < 200:
        return None
    return after_key[8 : 8 + length].decode(errors="replace")


def push_to_hub(
    folder: str | os.PathLike, repo: str, *, private: bool = True, dry_run: bool = False
) -> str:
    """Upload an export's folder to the hub as repo, "owner/name"; returns the files. dry_run: nothing is sent.

    Raises ExportError for a folder that is no export, one that was not proved or was changed since, and if the hub
    rejects it.

    >>> push_to_hub("exports/largest", "me/largest", dry_run=True)  # doctest: +SKIP
    """
    path = path_of(folder)
    report = read_report(path)
    if report is None:
        raise ExportError(
            f"folder={str(folder)!r} is no export; give a folder that kit.export wrote"
        )
    if report["objections"]:
        raise ExportError(
            f"{path} was refused: {'; '.join(report['objections'])}; export the model again"
        )
    if report["proof"] is None:
        raise ExportError(
            f"{path} was not proved; export it with proof=True before others rely on it"
        )
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ExportError(f"repo={repo!r} must be owner/name")
    lines = [f"{file.stat().st_size:>13,} {file.relative_to(path)}" for file in files_of(path)]
    visibility = "private" if private else "PUBLIC"
    listing = "\n".join([f"{repo}, {visibility}:", *lines])
    if dry_run:
        return f"would go to {listing}"
    from huggingface_hub import HfApi

    api: Any = HfApi()
    message = f"Exported as {report['stored']}"
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(folder_path=path, repo_id=repo, commit_message=message)
    except Exception as error:
        # the hub's, its client's and the network's errors share no base class
        raise ExportError(
            f"repo={repo!r}: the hub did not take it ({error}); run `hf auth login`, check the name, and call "
            f"it again: {path} is untouched"
        ) from error
    return f"went to {listing}"
