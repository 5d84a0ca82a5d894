"""llama.cpp reads a GGUF export as transformers does: prompt, greedy text and logits. Where llama_cpp can be imported.

KIT_GGUF names folders of exports to read besides a tiny random model's, separated by colons.
"""

import copy
import json
import os
from pathlib import Path

import numpy as np
import pytest

llama_cpp = pytest.importorskip(
    "llama_cpp", reason="no llama-cpp-python, which is compiled here for ten minutes"
)
torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig  # noqa: E402

from grpo_kit import load_policy, tasks  # noqa: E402
from grpo_kit.more.export import export  # noqa: E402

FOLDERS = [Path(name) for name in os.environ.get("KIT_GGUF", "").split(":") if name]
TASK = tasks.largest(n_train=8, n_held_out=6 if FOLDERS else 24)
# llama.cpp multiplies in float16, and in 8 bits where weights are.
FARTHEST = {"f32": 0.05, "f16": 0.05, "bf16": 0.05, "q8_0": 0.3}


@pytest.fixture(scope="module", params=["f32", "f16", "q8_0", *FOLDERS], ids=str)
def made(request, tmp_path_factory):
    """An export's folder, its report, llama.cpp's reading of it and transformers'."""
    folder = request.param
    if isinstance(folder, str):
        _, tokenizer = load_policy("tiny-random", quiet=True)
        torch.manual_seed(0)  # heads of 32: it knows none of 8
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, eos_token_id=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
        folder = tmp_path_factory.mktemp("gguf") / "out"
        export(
            model, tokenizer, folder, task=TASK, format="gguf", quant=request.param, proof=False
        )
    report = json.loads((folder / "export.json").read_text())
    path = folder / report["file"]
    theirs = llama_cpp.Llama(str(path), n_ctx=1024, logits_all=True, verbose=False, n_threads=1)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=path.name, dtype=torch.float32
    ).eval()
    return report, theirs, model, AutoTokenizer.from_pretrained(folder, gguf_file=path.name)


def prompt_of(theirs, question):
    """By the chat template inside the file, put to Jinja by llama-cpp-python."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    data = theirs.metadata
    bos, eos = (
        theirs.detokenize([int(data[f"tokenizer.ggml.{name}_token_id"])], special=True).decode()
        for name in ("bos", "eos")
    )
    formatter = Jinja2ChatFormatter(
        data["tokenizer.chat_template"], bos_token=bos, eos_token=eos
    )
    return formatter(messages=[{"role": "user", "content": question}]).prompt


def test_a_question_alone_is_asked_as_in_training(made):
    report, theirs, _, tokenizer = made
    for row in TASK.held_out:
        text = prompt_of(theirs, row["question"])
        asked = [{"role": "user", "content": row["question"]}]
        assert text == tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True
        )
        assert text.endswith(report["prefill"]) and report["prefill"]
        ids = theirs.tokenize(text.encode(), add_bos=False, special=True)
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_log_probabilities_and_greedy_text(made):
    report, theirs, model, tokenizer = made
    apart, same, top, positions = [], 0, 0, 0
    end = tokenizer.eos_token_id
    for row in TASK.held_out:
        ids = theirs.tokenize(
            prompt_of(theirs, row["question"]).encode(), add_bos=False, special=True
        )
        theirs.reset()
        theirs.eval(ids)
        written = []
        while len(written) < 8 and end not in written:
            written.append(int(np.argmax(theirs.scores[theirs.n_tokens - 1])))
            theirs.eval(written[-1:])
        with torch.no_grad():
            scores = (
                model(torch.tensor([[*ids, *written]]))
                .logits[0, len(ids) - 1 : -1]
                .log_softmax(-1)
            )
        found = torch.tensor(
            copy.copy(theirs.scores[len(ids) - 1 : len(ids) + len(written) - 1])
        ).log_softmax(-1)
        kl = (scores.exp() * (scores - found)).sum(-1)
        apart.append(float(kl.mean()))
        agree = scores.argmax(-1) == torch.tensor(written)
        same += bool(agree.all())
        top, positions = top + int(agree.sum()), positions + len(written)
    n = len(TASK.held_out)
    print(
        f"\n{report['base']} {report['stored']}: KL {np.mean(apart):.2g} nats a token, the same likeliest token at "
        f"{top} of {positions}, the same greedy text in {same} of {n}"
    )
    assert np.mean(apart) < FARTHEST[report["stored"]]
    assert top / positions > 0.9
