"""Reads an export like an outside user, in its own process: `python _reader.py REQUEST.json`.

Models and GGUF files are read by transformers alone, adapters by peft, without grpo_kit, so the results are what
anybody gets. Computation is in float32.
"""

import inspect
import json
import os
import sys
import threading
import time
from functools import cache
from pathlib import Path


def read(request):
    """The export's results: each question's prompt tokens and greedy completion, and log-probabilities of given tokens.

    request: folder, format, file (of a GGUF), device, questions, tokens (the most of a completion), scored (pairs of
    prompt and completion tokens), out (file for the log-probabilities).
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, how = Path(request["folder"]), {"dtype": torch.float32}
    if request["format"] == "adapter":
        from peft import PeftConfig, PeftModel

        base = folder / "base"  # the one that it names, once the folder has its own name
        base = base if base.is_dir() else PeftConfig.from_pretrained(folder).base_model_name_or_path
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **how), folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    else:
        file = {"gguf_file": request["file"]} if request["file"] else {}
        if file:  # transformers parses it for each of its parts: the same, once, is three times as fast
            import gguf

            gguf.GGUFReader, gguf.get_tensor_name_map = map(
                cache, (gguf.GGUFReader, gguf.get_tensor_name_map)
            )
        model = AutoModelForCausalLM.from_pretrained(folder, **file, **how)
        tokenizer = AutoTokenizer.from_pretrained(folder, **file)
    model.to(request["device"]).eval()
    with torch.no_grad():
        prompts = [_prompt(tokenizer, question) for question in request["questions"]]
        ends = _ends(model, folder, request["file"])
        answers = [_greedy(model, ids, request["tokens"], ends) for ids in prompts]
        scores = [
            model(torch.tensor([[*prompt, *made]], device=model.device)).logits[
                0, len(prompt) - 1 : -1, : request["rows"]
            ]
            for prompt, made in request["scored"]
        ]
        torch.save([one.float().log_softmax(-1).cpu() for one in scores], request["out"])
    return {
        "prompts": prompts,
        "answers": answers,
        "texts": [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers],
        "ended": [bool(ids) and ids[-1] in ends for ids in answers],
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
    }


def _ends(model, folder, file):
    """The tokens that end a completion: those of the GGUF file, which transformers reads one of; else the model's."""
    if file:
        import gguf

        fields = gguf.GGUFReader(str(folder / file)).fields
        ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return [int(end.contents()) for end in ends if end]
    path = folder / "generation_config.json"  # of an adapter it lies beside the adapter, not in its base
    ends = json.loads(path.read_text(encoding="utf-8"))["eos_token_id"]
    return ends if isinstance(ends, list) else [ends]


def _prompt(tokenizer, question):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _greedy(model, ids, tokens, ends):
    """A plain loop over transformers' own cache, without the kit and without a generation_config."""
    import torch

    made, past, given = [], None, torch.tensor([ids], device=model.device)
    name = (
        "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    )  # transformers 5.24; older below
    while len(made) < tokens and not (made and made[-1] in ends):
        out = model(given, use_cache=True, logits_to_keep=1, **{name: past})
        past, given = out[name], out.logits[:, -1:].argmax(-1)
        made.append(int(given))
    return made


def _end_with(parent):
    """If the parent was killed, nobody reads the answer: end."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(asked["answer"]).write_text(json.dumps(read(asked)), encoding="utf-8")
