"""Which architectures train here, and by which ways? Tiny random models of transformers' own classes.

    python -m benchmarks.architectures                # all, three minutes
    python -m benchmarks.architectures --only gemma2  # one
    python -m benchmarks.architectures --step gemma3 mistral qwen3-moe  # a step's seconds, plain and fast
    python -m benchmarks.architectures --gguf  # the files read by llama.cpp; needs llama-cpp-python

Each has its family's structure at a small size: sliding windows of 8 tokens, soft caps, sinks, experts, rotary
positions of several kinds, norms, scaled heads. Rows are longer than the windows. Every number stands beside the
model's own forward pass of one row without padding. "plain": padded log-probabilities, and two steps of the loop, full
and LoRA. "engine": its log-probabilities. "packed update": its gradient's difference by the gradient's norm. What is
refused says why.
Saves benchmarks/results/architectures.json.
"""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig

import grpo_kit as kit
from benchmarks.result import (
    RESULTS,
    as_text,
    command_line,
    origin,
    read_result,
    save,
    write_result,
)
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.packed_update import PackedUpdate, why_not_packed
from grpo_kit.loop.batch import Batch, generate
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.policy_loss import PolicyLoss
from grpo_kit.models.token_lists import left_pad
from grpo_kit.more.export import ExportError
from grpo_kit.more.export._gguf_writer import write_gguf

VOCABULARY = 500  # no multiple of 64
WINDOW = 8
_SIZES = dict(
    hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2,
    max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
_EXPERTS = dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
)
_LINEAR = dict(
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    head_dim=16,
)
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128,
    "short_factor": [1.0 + i / 8 for i in range(4)], "long_factor": [2.0 + i for i in range(4)],
}  # fmt: skip
# Family: (prefix of transformers' Config and ForCausalLM, what makes it this family, TRL's chat template of it)
FAMILIES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "qwen2": ("Qwen2", {}, "qwen2_5"),
    "qwen3": ("Qwen3", {"head_dim": 128}, "qwen3"),  # transformers reads GGUF files of no other
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 16, **_EXPERTS}, "qwen3_instruct_2507"),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3}, "llama3_2"),
    "mistral": ("Mistral", {"sliding_window": WINDOW}, None),
    "ministral": ("Ministral", {"sliding_window": WINDOW, "head_dim": 16, "layer_types": "alternating"}, None),
    "gemma2": (
        "Gemma2",
        {"sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": 5.0},
        "gemma",
    ),
    "gemma3": (
        "Gemma3",
        {"sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16, "layer_types": "alternating"},
        "gemma3",
    ),
    "phi3": ("Phi3", {"sliding_window": WINDOW}, "phi3"),
    "phi4-mini": ("Phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 128}, "phi3_5"),
    "smollm3": ("SmolLM3", {}, None),
    "granite": (
        "Granite",
        {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
        None,
    ),
    "olmo2": ("Olmo2", {}, None),
    "olmo3": ("Olmo3", {"sliding_window": WINDOW, "layer_types": "alternating"}, None),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "lfm2"),
    "qwen3-next": (
        "Qwen3Next",
        {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 32,
         "layer_types": ["linear_attention", "full_attention"] * 2},
        None,
    ),
    "qwen3.5": ("Qwen3_5", {**_LINEAR, "layer_types": ["linear_attention", "full_attention"] * 2}, "qwen3_5_nothink"),
    "gpt-oss": (
        "GptOss",
        {"sliding_window": WINDOW, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
        "gptoss",
    ),
    "gpt2": ("GPT2", {}, None),
}  # fmt: skip


# For llama.cpp: heads of 32, since it knows none of 8; where it knows no windows, one that is longer than the text.
_HEADS: dict[str, Any] = {"hidden_size": 192}
_HEAD = _HEADS | {"head_dim": 32}
_FACTORS = {
    "short_factor": [1.0 + i / 8 for i in range(12)],
    "long_factor": [2.0 + i for i in range(12)],
}
GGUF_SIZES: dict[str, dict[str, Any]] = {
    "qwen2": _HEADS, "qwen3": _HEAD, "qwen3-moe": _HEAD, "llama3": _HEAD, "smollm3": _HEADS, "granite": _HEADS,
    "olmo2": _HEADS, "olmo3": _HEADS, "mistral": _HEAD | {"sliding_window": 100},
    "ministral": _HEAD | {"sliding_window": 100}, "phi3": _HEADS | {"sliding_window": 100},
    "gemma2": _HEAD | {"query_pre_attn_scalar": 32}, "gemma3": _HEAD | {"query_pre_attn_scalar": 32},
    "phi4-mini": _HEADS
    | {"max_position_embeddings": 1024, "original_max_position_embeddings": 256,
       "rope_parameters": _LONG | _FACTORS | {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 256}},
}  # fmt: skip


def tiny(family: str, *, vocabulary: int = VOCABULARY, seed: int = 0, **more: Any) -> Any:
    """A model of the family in float32, its weights large enough that every part of it shows in the numbers."""
    prefix, structure, _ = FAMILIES[family]
    settings = {**_SIZES, "vocab_size": vocabulary, **structure, **more}
    if settings.get("layer_types") == "alternating":
        settings["layer_types"] = ["sliding_attention", "full_attention"] * (
            settings["num_hidden_layers"] // 2
        )
    if prefix == "GPT2":
        settings = {
            k: v
            for k, v in settings.items()
            if not k.startswith(("hidden", "inter", "num", "max"))
        }
        settings |= dict(n_embd=48, n_layer=4, n_head=6, n_positions=256)
    text = "Text" if prefix in ("Gemma3", "Qwen3_5") else ""
    config = getattr(transformers, f"{prefix}{text}Config")(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        capped = (
            {"attn_implementation": "eager"}
            if getattr(config, "attn_logit_softcapping", None)
            else {}
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **capped)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "router" in name or name.endswith("mlp.gate.weight"):
                    parameter.normal_()  # far from a tie between experts
                elif parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
                else:
                    parameter.mul_(5)
    return model.eval()


def with_lora(model: Any) -> Any:
    """The model under adapters on all linear layers that do something."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(1)
        warnings.simplefilter("ignore")  # of GPT-2's transposed layers
        lora = LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
        )
        return get_peft_model(model, lora).eval()


def batch_of(prompts: list[list[int]], completions: list[list[int]]) -> Batch:
    """Groups of two completions with opposite advantages."""
    count = len(prompts)
    return Batch(
        rows=[{}] * count, groups=[i // 2 for i in range(count)], prompt_ids=prompts, completion_ids=completions,
        completions=[""] * count, cut_off=[True] * count, advantages=[1.0, -1.0] * (count // 2),
    )  # fmt: skip


def random_batch(
    lengths: tuple[int, ...] = (3 * WINDOW, WINDOW + 3, 5), tokens: int = 12
) -> Batch:
    """Two completions for each prompt; two of the prompts are longer than the window, and begin alike."""
    draw = torch.Generator().manual_seed(2)
    ids = lambda n: torch.randint(3, VOCABULARY, (n,), generator=draw).tolist()  # noqa: E731
    longest = ids(max(lengths))
    prompts = [longest[: n - 2] + ids(2) for n in lengths for _ in range(2)]
    return batch_of(prompts, [ids(tokens) for _ in prompts])


def alone(model: Any, batch: Batch, temperature: float) -> list[torch.Tensor]:
    """(T,) of each completion, by the model's forward pass of this one row."""
    found = []
    for prompt, completion in zip(batch.prompt_ids, batch.completion_ids, strict=True):
        logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
        scores = (logits[len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
        found.append(scores.gather(1, torch.tensor(completion)[:, None])[:, 0])
    return found


def off(found: Any, wanted: list[torch.Tensor]) -> float:
    """The largest difference of a log-probability, in nats."""
    return max(
        (torch.as_tensor(a)[: len(b)] - b).abs().max().item()
        for a, b in zip(found, wanted, strict=True)
    )


def gradient(model: Any, batch: Batch, update: Any) -> torch.Tensor:
    """The gradient of all trained weights in one row."""
    model.zero_grad(set_to_none=True)
    numbers = StepNumbers(0, 0.0, 0.7, 0.0, 0.0)
    loss = PolicyLoss(
        batch, Config(max_completion_tokens=12), numbers, device=next(model.parameters()).device
    )
    update.gradients(model, batch, loss, 0.7, lambda share: share.backward())
    found = [
        p.new_zeros(p.shape) if p.grad is None else p.grad
        for p in model.parameters()
        if p.requires_grad
    ]
    model.zero_grad(set_to_none=True)
    return torch.cat([g.flatten() for g in found])


# ---- the columns ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def plain_logprobs(model: Any, batch: Batch) -> str:
    """Padded rows beside each row alone."""
    return _judged(
        off(PaddedUpdate(Config()).logprobs(model, batch, 0.7), alone(model, batch, 0.7))
    )


def engine(model: Any, batch: Batch) -> str:
    """The engine's log-probabilities of what it sampled."""
    how = GenerationConfig(
        max_new_tokens=12,
        do_sample=True,
        temperature=0.7,
        top_k=0,
        eos_token_id=[],
        pad_token_id=0,
    )
    if why := RolloutEngine.unsupported(model, how):
        return f"plain way: {why}"
    made = RolloutEngine(model).generate(batch.prompt_ids, how, seed=0)
    with torch.no_grad():
        return _judged(
            off(
                made.policy_logprobs,
                alone(model, batch_of(batch.prompt_ids, made.completion_ids), 0.7),
            )
        )


def packed(model: Any, batch: Batch) -> str:
    """The packed update's gradient beside the padded one's."""
    if why := why_not_packed(model):
        return f"plain way: {why}"
    config = Config(max_completion_tokens=12)
    wanted = gradient(model, batch, PaddedUpdate(config))
    found = gradient(model, batch, PackedUpdate(model, config))
    return _judged(((found - wanted).norm() / wanted.norm()).item())


def _judged(apart: float, most: float = 1e-3) -> str:
    return f"{'equal' if apart < most else 'DIFFERS'}, off by {apart:.1g}"


def trains(family: str, tokenizer: Any, lora: bool) -> str:
    """Two steps of the plain loop on the main task; the weights move."""
    model = tiny(family, vocabulary=len(tokenizer))
    model = with_lora(model) if lora else model
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    task = kit.tasks.largest(n_train=8, n_held_out=2, max_completion_tokens=6)
    config = Config(
        steps=2,
        prompts_per_step=2,
        group_size=4,
        learning_rate=1e-3,
        warmup=0,
        seed=1,
        dynamic_sampling=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        task = paying_letters(task)
        trainer = kit.GRPOTrainer(
            model, task, config, tokenizer=tokenizer, folder=Path(folder) / "run", sample=generate,
            update=PaddedUpdate(config), hooks=[],
        )  # fmt: skip
        trainer.train()
    after = [p for p in model.parameters() if p.requires_grad]
    moved = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    finite = all(bool(p.isfinite().all()) for p in after)
    return f"{'yes' if moved and finite else 'NO'}, {moved} of {len(after)} tensors moved"


def paying_letters(task: Any) -> Any:
    """The task with a reward that differs within groups of a random model: the share of letters."""

    def letters(completions: list[str], **columns: Any) -> list[float]:
        return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]

    return replace(task, rewards=[letters], reward_weights=[1.0])


def targets(family: str) -> str:
    """What LoRA on all linear layers finds."""
    model = with_lora(tiny(family))
    names = Counter(n.split(".")[-1] for n, m in model.named_modules() if hasattr(m, "lora_A"))
    return ", ".join(f"{name} x{count}" for name, count in sorted(names.items()))


def exported(family: str, tokenizer: Any) -> str:
    """A merged LoRA model read back by transformers."""
    model = with_lora(tiny(family, vocabulary=len(tokenizer)))
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]])
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = kit.export(model, tokenizer, Path(folder) / "it", quant="f32", proof=False)
        again = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32).eval()
        return _judged((again(ids).logits - model(ids).logits).abs().max().item())


@torch.no_grad()
def in_llama_cpp(family: str, tokenizer: Any) -> str:
    """A GGUF in float32 read by llama.cpp: log-probabilities of 48 drawn tokens and of 16 written greedily."""
    model = tiny(family, vocabulary=len(tokenizer), **GGUF_SIZES.get(family, {}))
    ids = torch.randint(
        3, len(tokenizer), (48,), generator=torch.Generator().manual_seed(3)
    ).tolist()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "it.gguf"
        try:
            write_gguf(path, model, tokenizer, "f32", name="it")
        except ExportError as error:
            return f"refused: {error}"
        import llama_cpp

        theirs = llama_cpp.Llama(
            str(path), n_ctx=0, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0
        )
        theirs.eval(ids)
        for _ in range(16):
            ids.append(int(theirs.scores[theirs.n_tokens - 1].argmax()))
            theirs.eval(ids[-1:])
        found = torch.tensor(theirs.scores[: len(ids)]).log_softmax(-1)
        theirs.close()
    wanted = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    if wanted[47:-1].argmax(-1).tolist() != ids[48:]:
        return "DIFFERS in the greedy text"
    # its GELU is a table in float16
    return _judged((found - wanted).abs().max().item(), most=1e-2)


def template(family: str, tokenizer: Any) -> str:
    """The family's chat template, as TRL has it, with a prefill."""
    name = FAMILIES[family][2]
    if name is None:
        return "no template at hand"
    import trl

    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"bos_token": "<bos>"})  # SmolLM2's own also begins each turn
    own.chat_template = (
        Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    ).read_text()
    why = ""
    for opening in ("", "<think>\n\n</think>\n\n", "<|channel|>final<|message|>"):
        try:
            prompt = kit.build_prompt(own, "2 + 2?", prefill=f"{opening}<answer>")
        except ValueError as error:
            why = why or str(error)
            continue
        after = f", the prefill begins {opening!r}" if opening else ""
        return f"yes{after}" if prompt.endswith(f"{opening}<answer>") else "NO"
    return f"refused: {why}"


def row(family: str, tokenizer: Any) -> dict[str, Any]:
    """All columns of one family."""
    begin = time.perf_counter()
    model, adapted, batch = tiny(family), with_lora(tiny(family)), random_batch()
    columns: dict[str, Callable[[], str]] = {
        "class": lambda: type(model).__name__,
        "padded log-probabilities": lambda: plain_logprobs(model, batch),
        "trains, full": lambda: trains(family, tokenizer, False),
        "trains, LoRA": lambda: trains(family, tokenizer, True),
        "engine": lambda: engine(model, batch),
        "engine, LoRA": lambda: engine(adapted, batch),
        "packed update": lambda: packed(model, batch),
        "packed update, LoRA": lambda: packed(adapted, batch),
        "LoRA targets": lambda: targets(family),
        "export": lambda: exported(family, tokenizer),
        "template with prefill": lambda: template(family, tokenizer),
    }
    found = {}
    for name, ask in columns.items():
        try:
            found[name] = ask()
        except Exception as error:  # a column of the table, not the end of it
            found[name] = f"FAILED: {type(error).__name__}: {str(error)[:200]}"
    return found | {"seconds": time.perf_counter() - begin}


_STEP = dict(
    hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
    head_dim=32, sliding_window=64, max_position_embeddings=1024,
)  # fmt: skip
_ROUNDS = 3


def step_seconds(family: str) -> dict[str, list[float]]:
    """Seconds of the plain way and the fast one, in turns: 4 prompts of 160 tokens x 8 completions of 32, in float32.

    Half of a prompt is shared by all.
    """
    model = tiny(family, vocabulary=8192, **_STEP)
    draw = torch.Generator().manual_seed(0)
    ids = lambda n: torch.randint(3, 8192, (n,), generator=draw).tolist()  # noqa: E731
    begin = ids(80)
    prompts = [prompt for prompt in ([*begin, *ids(80)] for _ in range(4)) for _ in range(8)]
    how = GenerationConfig(
        max_new_tokens=32,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        eos_token_id=[],
        pad_token_id=0,
    )
    if (why := RolloutEngine.unsupported(model, how)) or (why := why_not_packed(model)):
        raise ValueError(f"family={family!r} has no fast way: {why}")
    config, engine, device = (
        Config(max_completion_tokens=32),
        RolloutEngine(model),
        torch.device("cpu"),
    )
    table, mask = left_pad(prompts, 0, device)
    batch = batch_of(prompts, [ids(32) for _ in prompts])
    ways = {
        "sample, plain": lambda: model.generate(
            input_ids=table, attention_mask=mask, generation_config=how
        ),
        "sample, engine": lambda: engine.generate(prompts, how, seed=0),
        "update, padded": lambda: gradient(model, batch, PaddedUpdate(config)),
        "update, packed": lambda: gradient(model, batch, PackedUpdate(model, config)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_ROUNDS + 1):  # the first warms up
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    return {name: found[1:] for name, found in seconds.items()}


# columns of the table in docs/models.md: those of the full result that each is made of
_SHORT = {
    "trains": ("padded log-probabilities", "trains, full", "trains, LoRA"),
    "engine": ("engine", "engine, LoRA"),
    "packed update": ("packed update", "packed update, LoRA"),
    "export": ("export",),
    "GGUF": ("GGUF",),
    "prefill": ("template with prefill",),
}


def table(result: dict[str, Any]) -> str:
    """The result in Markdown: "yes" where all that a column is made of is equal, else what was said, shortened."""
    lines = [
        "| family | " + " | ".join(_SHORT) + " | LoRA on |",
        "|---" * (len(_SHORT) + 2) + "|",
    ]
    for family, found in result["families"].items():
        cells = []
        for names in _SHORT.values():
            said = [found[name] for name in names]
            good = all(one.startswith(("equal", "yes")) for one in said)
            bad = next((one for one in said if not one.startswith(("equal", "yes"))), "")
            bad = (
                "not written"
                if "format='gguf' knows" in bad
                else bad.removeprefix("plain way: ")
            )
            cells.append("yes" if good else bad.split("; ")[0].replace("|", "\\|"))
        targets = ", ".join(name.split()[0] for name in found["LoRA targets"].split(", "))
        lines.append(f"| {family} | " + " | ".join(cells) + f" | {targets} |")
    return "\n".join(lines)


def main() -> None:
    """All families, a line each."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--only",
        nargs="*",
        choices=list(FAMILIES),
        help="these families, printed and not saved",
    )
    parser.add_argument(
        "--gguf", action="store_true", help="have llama.cpp read the files, added to the result"
    )
    parser.add_argument(
        "--step",
        nargs="*",
        choices=list(FAMILIES),
        help="a step's seconds of these, added to the result",
    )
    asked = parser.parse_args()
    only = asked.only
    tokenizer = kit.load_policy("tiny-random", quiet=True)[1]
    command = f"python -m benchmarks.architectures{' --step ' if asked.step else ''}{' '.join(asked.step or [])}"
    result = origin(command, "torch", "transformers", "peft", "grpo-kit")
    path = RESULTS / "architectures.json"
    kept = read_result(path)
    if asked.step:
        result = kept | {
            "step seconds": result | {family: step_seconds(family) for family in asked.step}
        }
        write_result(path, result)
        print(as_text(result["step seconds"]))
        return
    if asked.gguf:
        kept["GGUF"] = origin(
            f"{command} --gguf", "torch", "transformers", "gguf", "llama_cpp_python"
        )
        for family, found in kept["families"].items():
            found["GGUF"] = in_llama_cpp(family, tokenizer)
            print(f"{family}: {found['GGUF']}", flush=True)
        write_result(path, kept)
        return
    result |= {"families": {}, "GGUF": kept["GGUF"]}
    for family in only or FAMILIES:
        found = row(family, tokenizer) | {"GGUF": kept["families"][family]["GGUF"]}
        result["families"][family] = found
        print(
            f"{family}: "
            + "; ".join(f"{name}: {str(value)[:150]}" for name, value in found.items()),
            flush=True,
        )
    if not only:
        print(table(result))
        print(save(RESULTS, "architectures", result))


if __name__ == "__main__":
    main()
