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

    folder, file = Path(request["folder"]), request["file"]
    base = folder
    if request["format"] == "adapter":
        from peft import PeftConfig, PeftModel

        base = folder / "base"  # the one that it names, once the folder has its own name
        if not base.is_dir():
            base = PeftConfig.from_pretrained(folder).base_model_name_or_path
    # transformers parses it for each of its parts: the same, once, is three times as fast
    if file:
        import gguf

        gguf.GGUFReader = cache(gguf.GGUFReader)
        gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)
    model = AutoModelForCausalLM.from_pretrained(base, gguf_file=file, dtype=torch.float32)
    if request["format"] == "adapter":
        model = PeftModel.from_pretrained(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model.to(request["device"]).eval()
    with torch.no_grad():
        prompts = [_prompt(tokenizer, question) for question in request["questions"]]
        ends = _ends(model, folder, file)
        answers = [_greedy(model, ids, request["tokens"], ends) for ids in prompts]
        logprobs = [logprobs_of(model, *ids, request["rows"]) for ids in request["scored"]]
        torch.save(logprobs, request["out"])
    return {
        "prompts": prompts,
        "answers": answers,
        "texts": [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers],
        "ended": [ids[-1] in ends for ids in answers],
    }


def logprobs_of(model, prompt_ids, completion_ids, rows):
    """Log-probabilities of the first `rows` tokens at each place of the completion, on the CPU."""
    import torch

    ids = torch.tensor([[*prompt_ids, *completion_ids]], device=model.device)
    logits = model(ids).logits[0, len(prompt_ids) - 1 : -1, :rows]
    return logits.float().log_softmax(-1).cpu()


def _ends(model, folder, file):
    """The tokens that end a completion: those of the GGUF file, which transformers reads one of; else the model's."""
    if file:
        import gguf

        fields = gguf.GGUFReader(str(folder / file)).fields
        ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return [int(end.contents()) for end in ends if end]
    # of an adapter it lies beside the adapter, not in its base
    path = folder / "generation_config.json"
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

    completion, past, inputs = [], None, torch.tensor([ids], device=model.device)
    name = "past_key_values"
    if "cache" in inspect.signature(model.forward).parameters:  # of transformers 5.24 on
        name = "cache"
    while len(completion) < tokens and not (completion and completion[-1] in ends):
        outputs = model(inputs, use_cache=True, logits_to_keep=1, **{name: past})
        past = outputs[name]
        inputs = outputs.logits[:, -1:].argmax(-1)
        completion.append(int(inputs))
    return completion


def _end_with(parent):
    """If the parent was killed, nobody reads the answer: end."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(request["answer"]).write_text(json.dumps(read(request)), encoding="utf-8")
