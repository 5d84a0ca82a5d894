"""The README.md of an export, and its way onto the hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from grpo_kit.exports.template import ExportError
from grpo_kit.models import EMBEDDED
from grpo_kit.record.files import CONFIG
from grpo_kit.watch.card import card_text

LICENSES = {EMBEDDED: "apache-2.0"}  # of bases that the kit brings
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
import grpo_kit as kit

model, tokenizer = kit.load_policy("{folder}", tuning="lora")  # onto {base!r}, to go on training or to be asked
```""",
}


def export_card(
    made: Any,
    *,
    base: str,
    question: str,
    file: str | None = None,
    run: Path | None = None,
    comparison: object | None = None,
    license: str | None = None,
) -> str:
    """What was trained, of its run folder where there is one; what lies here, what the proof found, how to use it.

    made: an Exported.
    """
    license = license or LICENSES.get(base)
    if run is not None and (run / CONFIG).exists():
        text = card_text(run, comparison, license=license)
    else:
        head = [f"license: {license}"] if license else []
        head = ["---", *head, f"base_model: {json.dumps(base)}", "tags: [grpo, grpo_kit]", "---"]
        text = "\n".join(
            [*head, "", f"# {made.folder.name}", *([f"\n```\n{comparison}\n```"] if comparison else [])]
        )
    use = _USE[made.format].format(folder=made.folder.name, question=question, file=file, base=base)
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
        "## What lies here",
        f"{made.format}, weights as {made.stored}, {made.bytes / 1e6:,.0f} MB. The chat template holds the training's "
        "system text, worked examples and prefill: send the question alone.",
        *(["\n".join(notes)] if notes else []),
        proof,
        "## Use it",
        use,
    ]
    return "\n\n".join(parts) + "\n"


def push(made: Any, repo: str, *, private: bool, dry_run: bool) -> str:
    """What goes up, one line a file. Raises ExportError for an export without a proof, and where the hub refuses."""
    if made.proof is None:
        raise ExportError(f"{made.folder} was not proved; export it again with proof=True")
    if repo.count("/") != 1:
        raise ExportError(f"repo={repo!r} must be owner/name")
    files = sorted(path for path in made.folder.rglob("*") if path.is_file())
    lines = [f"{path.stat().st_size:>13,} {path.relative_to(made.folder)}" for path in files]
    said = "\n".join([f"{repo}{', private' if private else ', PUBLIC'}:", *lines])
    if dry_run:
        return f"would go to {said}"
    from huggingface_hub import HfApi

    api: Any = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            folder_path=os.fspath(made.folder), repo_id=repo, commit_message=f"Exported as {made.stored}"
        )
    except Exception as error:  # the hub's, its client's and the network's have no base in common
        raise ExportError(
            f"repo={repo!r}: the hub did not take it ({error}); run `hf auth login`, check the name, and call "
            f"it again: {made.folder} is untouched"
        ) from error
    return f"went to {said}"
