"""Launches, bytes and FLOPs of Qwen2.5-1.5B's step, counted by operator on the pretend card (tests/pretend_card).

    python -m benchmarks.card.counts

Real widths, but for a short vocabulary: what a second layer adds is "layer", what a longer vocabulary adds is, brought
to the real one, "vocabulary" (embedding, head, sampling), what is left is "rest". The update is counted at two lengths.
Products (mm and its kin) are kept apart from what is bound by memory. Nothing is timed. Saves results/card_counts.json.

Simplifications: the update's attention is SDPA's, of which launches count alone; an operator is one kernel, but for
bitsandbytes', which are counted as its CUDA code has them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.result import RESULTS, ROOT, command_line, origin, read_result, write_result

ROWS, PROMPTS, PROMPT_TOKENS = 64, 8, 256
WIDTHS = (64, 512)  # columns that a decode step attends
LENGTHS = (256, 512)  # tokens of an update
VOCABULARY, SHORT, SHORTER = 151936, 8192, 4096
SIZES = {"one": (1, SHORTER), "two": (2, SHORTER), "longer": (1, SHORT)}  # layers, vocabulary
# bytes a weight; up to some such number of rows it is not widened
NF4, MOST_FEW_ROWS = 0.5 + 1 / 64, 128
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear")
# float32: without autocast, as on a T4
KINDS = ("full", "LoRA", "QLoRA", "LoRA float32", "QLoRA float32")


_instead: dict[str, float] = {}  # what one_kernel() puts in the place of what was counted


def reset(card: Any) -> None:
    """Count from zero."""
    card.reset()
    _instead.clear()


def counted(card: Any) -> dict[str, float]:
    """What was counted since the last reset, by what bounds it."""
    found = {
        name: _instead.get(name, 0.0)
        for name in ("launches", "flops", "product bytes", "other bytes")
    }
    for line in card.lib.card_operators().decode().splitlines():
        name, launches, moved, flops = line.split("\t")
        found["launches"] += int(launches)
        if "attention" in name:
            continue
        kind = "product bytes" if name.split(".")[0].rstrip("_") in PRODUCTS else "other bytes"
        found[kind] += float(moved)
        found["flops"] += float(flops)
    return found


def one_kernel(
    card: Any, work: Callable[..., Any], cost: Callable[..., dict[str, float]]
) -> Callable[..., Any]:
    """work, counted as cost(its arguments): bitsandbytes is many operators on a CPU, few kernels on a card."""

    def call(*args: Any, **options: Any) -> Any:
        before = counted(card)
        made = work(*args, **options)
        after = counted(card)
        for name, value in cost(*args).items():
            _instead[name] = _instead.get(name, 0.0) + value - (after[name] - before[name])
        return made

    return call


def _four_bit_product(x: Any, packed: Any, shape: Any, *rest: Any) -> dict[str, float]:
    """One kernel for few rows, which reads the 4 bits; for many the weights are widened first (its CUDA code)."""
    weights, rows = shape[0] * shape[1], x.numel() // x.size(-1)
    product = {"launches": 1.0, "flops": 2.0 * rows * weights, "other bytes": 0.0}
    ends = 2.0 * rows * sum(shape)
    if rows <= MOST_FEW_ROWS:
        return product | {"product bytes": ends + NF4 * weights}
    widened = _widened(packed)
    product["launches"] += widened["launches"]
    return product | {
        "product bytes": ends + 2.0 * weights,
        "other bytes": widened["other bytes"],
    }


def _widened(packed: Any, *rest: Any) -> dict[str, float]:
    """The scales in two kernels, the weights in one, written in 16 bits."""
    return {
        "launches": 3.0,
        "flops": 0.0,
        "product bytes": 0.0,
        "other bytes": (NF4 + 2.0) * 2 * packed.numel(),
    }


def stand_in_for_bitsandbytes(card: Any) -> None:
    """From here on its functions count as its CUDA kernels would."""
    import bitsandbytes.functional as F
    import torch

    product = torch.ops.bitsandbytes.gemm_4bit
    product.default = one_kernel(card, product.default, _four_bit_product)
    F.dequantize_4bit = one_kernel(card, F.dequantize_4bit, _widened)


def less(more: dict[str, float], few: dict[str, float], by: float = 1.0) -> dict[str, float]:
    """(more - few) / by, entry by entry."""
    return {name: (more[name] - few[name]) / by for name in more}


def model_of(kind: str, layers: int, vocabulary: int) -> Any:
    """Random weights in Qwen2.5-1.5B's widths on the card, bfloat16; adapters in float32, as in a run."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.step.sizes import qwen_config
    from grpo_kit.models._adapters import add_adapters

    config = qwen_config()
    config.update({"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers})
    config.vocab_size = vocabulary
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if "float32" in kind else torch.bfloat16
        )
    if kind.startswith("QLoRA"):
        model = in_four_bits(model)
    model = model.cuda()
    if kind != "full":
        model = add_adapters(model, kind.split()[0].lower(), {}, 0)
    return model


def in_four_bits(model: Any) -> Any:
    """Linear layers but the head in nf4 with double quantisation, as load_policy's QLoRA has them."""
    import tempfile

    from transformers import AutoModelForCausalLM

    from grpo_kit.models.loading import _four_bit

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=_four_bit(True), device_map={"": 0}
        )


class _Enough(BaseException):
    """The decode steps that are counted are over. No Exception: the engine would take that for a failure of its fused
    layers, and from then on call the model's modules instead."""


def decode(
    card: Any, model: Any, width: int, *, fused: bool, autocast: bool
) -> dict[str, float]:
    """One decoded token of all rows, sampling included, as a step that is captured runs it."""
    import torch
    from transformers import GenerationConfig

    import grpo_kit.engine._decode as decoding
    from grpo_kit.engine import RolloutEngine

    Decoder, kept = decoding.Decoder, (decoding.Decoder._step, decoding.Decoder._width)
    parts_of, seen = decoding.FusedLayers.parts_of, []

    def step(self: Any) -> Any:
        seen.append(counted(card))
        if len(seen) == 4:
            raise _Enough
        return kept[0](self)

    Decoder._step, Decoder._width = step, lambda self, step, limit: width
    if not fused:
        decoding.FusedLayers.parts_of = staticmethod(lambda base: None)
    how = GenerationConfig(
        max_new_tokens=max(WIDTHS), do_sample=True, pad_token_id=0, eos_token_id=[]
    )
    prompts = [
        [100 + p] * PROMPT_TOKENS for p in range(PROMPTS) for _ in range(ROWS // PROMPTS)
    ]
    engine = RolloutEngine(model.eval())
    engine._decoder.graphs._failed = True  # one by one, so that each operator is counted
    try:
        reset(card)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            engine.generate(prompts, how, seed=1)
    except _Enough:
        pass
    finally:
        Decoder._step, Decoder._width = kept
        decoding.FusedLayers.parts_of = parts_of
    if engine.in_few_kernels != fused:
        raise RuntimeError(
            f"{width=}: asked for {'fused layers' if fused else 'modules'}, the others decoded"
        )
    return less(seen[3], seen[1], 2)


def update(
    card: Any, model: Any, tokens: int, *, backward: bool, autocast: bool
) -> dict[str, float]:
    """One chunk of so many tokens, all scored, forward (and backward); its gradients are added to others."""
    import torch

    from grpo_kit.engine.packed_update import PackedUpdate
    from grpo_kit.loop import Batch, Config
    from grpo_kit.loop.config import StepNumbers
    from grpo_kit.loop.policy_loss import PolicyLoss

    config = Config(autocast="bfloat16" if autocast else "none", max_completion_tokens=tokens)
    batch = Batch(
        [{}] * 2,
        [0, 0],
        [[5]] * 2,
        [[7 + i] * (tokens // 2) for i in range(2)],
        [""] * 2,
        [False] * 2,
    )
    batch.advantages = [1.0, -1.0]
    packed = PackedUpdate(model, config)
    packed.memory.attention = "sdpa"
    loss = PolicyLoss(
        batch, config, StepNumbers(0, 0.0, 1.0, 0.0, 0.0), device=torch.device("cuda")
    )
    model.train()
    reset(card)
    if backward:
        packed.gradients(model, batch, loss, 1.0, lambda share: share.backward())
    else:
        packed.logprobs(model, batch, 1.0)
    return counted(card)


def optimizer(card: Any, model: Any, kind: str) -> dict[str, float]:
    """The optimizer's second step, when its states are there, and the gradients' norm before it."""
    import torch

    from grpo_kit.engine.optim.choose import make_optimizer

    name = "adamw-8bit-split" if kind == "full" else "adamw"
    made = make_optimizer(name, model, learning_rate=1e-6)
    made.step()
    reset(card)
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
    made.step()
    return counted(card)


def count(*kinds: str) -> None:
    """Count these kinds, save after each. The card is there."""
    import card

    card.put("poison", 0)
    stand_in_for_bitsandbytes(card)
    result = read_result(RESULTS / "card_counts.json")
    result["what"] = "launches, bytes and FLOPs of a layer, of the vocabulary and of the rest"
    result |= origin(
        "python -m benchmarks.card.counts", "torch", "transformers", "peft", "bitsandbytes"
    )
    result |= {"rows": ROWS, "prompts": PROMPTS, "prompt tokens": PROMPT_TOKENS}
    result |= {"widths": list(WIDTHS), "lengths": list(LENGTHS)}
    for kind in kinds:
        raw = {}
        for size, (layers, vocabulary) in SIZES.items():
            raw[size] = of_model(card, model_of(kind, layers, vocabulary), kind)
            print(
                kind,
                size,
                {name: values["launches"] for name, values in raw[size].items()},
                flush=True,
            )
        result[kind] = {
            name: parts({size: raw[size][name] for size in SIZES}) for name in raw["one"]
        }
        write_result(RESULTS / "card_counts.json", result)


def of_model(card: Any, model: Any, kind: str) -> dict[str, dict[str, float]]:
    """All that is counted of one model."""
    found, how = {}, {"autocast": "float32" not in kind}
    for way in ("fused", "modules") if not kind.startswith("QLoRA") else ("modules",):
        for width in WIDTHS:
            found[f"decode {way} {width}"] = decode(
                card, model, width, fused=way == "fused", **how
            )
    update(card, model, 8, backward=True, **how)  # gradients are there: later ones are added
    for tokens in LENGTHS:
        found[f"forward {tokens}"] = update(card, model, tokens, backward=False, **how)
        found[f"update {tokens}"] = update(card, model, tokens, backward=True, **how)
    return found | {"optimizer": optimizer(card, model, kind)}


def parts(of: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """One count of the three SIZES as layer, vocabulary (the real one's) and rest."""
    layer = less(of["two"], of["one"])
    vocabulary = less(of["longer"], of["one"], (SHORT - SHORTER) / VOCABULARY)
    short = less(of["longer"], of["one"], (SHORT - SHORTER) / SHORTER)
    return {
        "layer": layer,
        "vocabulary": vocabulary,
        "rest": less(less(of["one"], layer), short),
    }


def main() -> None:
    """Count in a process of its own: the pretend card is there before torch."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="the others stay as they are"
    )
    kinds = parser.parse_args().kinds
    rig = str(ROOT / "tests" / "pretend_card")
    there = os.pathsep.join([rig, str(ROOT), os.environ.get("PYTHONPATH", "")])
    code = "import sys, card; card.install(); from benchmarks.card.counts import count; count(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, *kinds], cwd=ROOT, env=os.environ | {"PYTHONPATH": there}
    )
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
