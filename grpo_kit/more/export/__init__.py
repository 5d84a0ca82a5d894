"""Exports a trained model: weights, prompt and temperature in one folder, verified against the model.

export.py checks what it is given and writes the folder. _template.py puts the training's prompt into the chat template,
and into Ollama's Modelfile; _write.py merges adapters and writes all files, _gguf_writer.py and _gguf_tokens.py the one
for llama.cpp and Ollama; verify.py reads the folder back in a fresh process, _export_folder.py renames the complete
folder, model_card.py describes it and uploads it to the hub.
"""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.more.export._template import ExportError
    from grpo_kit.more.export.export import Exported, export
    from grpo_kit.more.export.model_card import push_to_hub
    from grpo_kit.more.export.verify import Proof

__all__ = lazy(__name__)
