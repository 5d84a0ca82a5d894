"""Kernels and bytes of a decoded token and of the update, by operator, before and after: counted on the pretend card.

    python -m benchmarks.card.operators --before REVISION [--out benchmarks/results/card_operators.json]

No card and no clock: tests/pretend_card counts what torch is asked for, in Qwen2.5-1.5B's shapes, random bfloat16
weights. "layer" is what a decoded token of 64 rows (8 prompts of 64 tokens) costs in one layer: a model of two less one
of one. "token" is a decoded token of a model of one layer, 256 wide, and 151,936 tokens: the sampling. "update" is a
packed token's share of a forward and backward pass in one layer, of 224 tokens, for which products read all weights.
Each is [launches, megabytes] by operator. A product with 4-bit weights counts as bitsandbytes' kernels. REVISION is
checked out in a temporary worktree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
CARD = ROOT / "tests" / "pretend_card"
KINDS = ("full", "lora", "qlora")
SAMPLERS = {
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "top-p 0.95": {"top_p": 0.95},
}
PROMPTS, GROUP, LENGTH, TOKENS = 8, 8, 64, (2, 3)
# of "token"; what a layer costs does not depend on it, and 512 are counted sooner
VOCABULARY = 151_936
UPDATE_LENGTH = 24  # tokens of each completion of the update's two groups of four


def _model(kind: str, layers: int, vocabulary: int = 512, hidden: int = 1536) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 35 // 6, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, num_key_value_heads=2, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(shape).to(torch.bfloat16).eval()
    # logits that differ as a trained model's do: top-p keeps few tokens
    model.model.norm.weight.data.fill_(20)
    if kind == "qlora":
        _to_four_bits(model)
    if kind != "full":
        from grpo_kit.models._adapters import add_adapters

        model = add_adapters(model, "lora", {}, 0)
    return model


def _to_four_bits(model: Any) -> None:
    """As a loaded QLoRA base: every linear layer but the head."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, module in list(model.named_modules()):
        if type(module) is not torch.nn.Linear or name == "lm_head":
            continue
        made = Linear4bit(
            module.in_features, module.out_features, bias=module.bias is not None,
            compute_dtype=torch.bfloat16, quant_type="nf4",
        )  # fmt: skip
        made.weight = Params4bit(
            module.weight.data.cpu(), requires_grad=False, quant_type="nf4"
        )
        made.bias = module.bias
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], made.to("cuda"))
    model.is_loaded_in_4bit = True


def _four_bit_as_kernels(card: Any) -> Any:
    """A mode in which an operator of bitsandbytes counts once, as on a card; here it runs by many of torch's."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Mode(TorchDispatchMode):
        extra: Counter

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace != "bitsandbytes":
                return func(*args, **(kwargs or {}))
            before = _counted(card)
            out = func(*args, **(kwargs or {}))
            self.extra.subtract(_less(_counted(card), before))
            tensors = [
                x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)
            ]
            name = f"bitsandbytes::{func._schema.name.split('::')[1]}"
            self.extra.update(
                {(name, 0): 1, (name, 1): sum(t.numel() * t.element_size() for t in tensors)}
            )
            return out

    return Mode()


def _token(card: Any, model: Any, options: dict[str, Any]) -> Counter:
    """(launches, bytes) by operator of one decoded token."""
    import torch
    from transformers import GenerationConfig

    from grpo_kit.engine import RolloutEngine
    from grpo_kit.engine.card._graphs import DecodeGraphs

    engine = RolloutEngine(model)
    engine._decoder.graphs = DecodeGraphs(None)  # a graph's replay would count as one
    draw, found = torch.Generator().manual_seed(0), []
    prompts = torch.randint(20, 500, (PROMPTS, LENGTH), generator=draw).tolist()
    for tokens in (TOKENS[0], *TOKENS):  # the first makes what is kept
        how = GenerationConfig(
            max_new_tokens=tokens,
            do_sample=True,
            top_k=0,
            eos_token_id=[],
            pad_token_id=0,
            **options,
        )
        card.reset()
        with _four_bit_as_kernels(card) as mode:
            mode.extra = Counter()
            engine.generate([p for p in prompts for _ in range(GROUP)], how, seed=1)
        found.append(_counted(card))
        found[-1].update(mode.extra)
    return _less(found[2], found[1])


def _update(card: Any, model: Any) -> Counter:
    """(launches, bytes) by operator of one forward and backward pass, a packed token."""
    import torch

    from grpo_kit.engine.packed_update import PackedUpdate
    from grpo_kit.loop.batch import Batch
    from grpo_kit.loop.config import Config, StepNumbers
    from grpo_kit.loop.policy_loss import PolicyLoss

    draw = torch.Generator().manual_seed(0)
    tokens = lambda count: torch.randint(20, 500, (count,), generator=draw).tolist()  # noqa: E731
    prompts = [prompt for prompt in (tokens(16), tokens(16)) for _ in range(4)]
    batch = Batch(
        rows=[{}] * 8, groups=[0] * 4 + [1] * 4, prompt_ids=prompts, completions=[""] * 8, cut_off=[True] * 8,
        completion_ids=[tokens(UPDATE_LENGTH) for _ in prompts], advantages=[1.0, -1.0] * 4,
    )  # fmt: skip
    config = Config(autocast="none", max_completion_tokens=UPDATE_LENGTH)
    update = PackedUpdate(model, config)
    loss = PolicyLoss(
        batch, config, StepNumbers(0, 0.0, 1.0, 0.0, 0.0), device=update.memory.device
    )
    card.reset()
    update.gradients(model, batch, loss, 1.0, lambda share: share.backward())
    found = _counted(card)
    model.zero_grad(set_to_none=True)
    return _scaled(found, 8 * UPDATE_LENGTH + 2 * 16)


def _counted(card: Any) -> Counter:
    return Counter(
        {(name, i): n for name, both in card.traffic().items() for i, n in enumerate(both)}
    )


def _less(one: Counter, other: Counter) -> Counter:
    return Counter(
        {key: one[key] - other[key] for key in one | other if one[key] != other[key]}
    )


def _scaled(one: Counter, by: float) -> Counter:
    return Counter({key: n / by for key, n in one.items()})


def _table(one: Counter) -> dict[str, Any]:
    """{"launches": .., "MB": .., "operators": {name: [launches, MB]}}, the most bytes first."""
    names = sorted({name for name, _ in one}, key=lambda name: -one[name, 1])
    rows = {name.removeprefix("aten::"): [one[name, 0], one[name, 1] / 1e6] for name in names}
    total = [sum(row[i] for row in rows.values()) for i in (0, 1)]
    return {"launches": total[0], "MB": total[1], "operators": rows}


def measure() -> dict[str, Any]:
    """All kinds, in this process, which has no torch yet."""
    sys.path.insert(0, str(CARD))
    import card

    card.install("rtx4090")
    found: dict[str, Any] = {}
    for kind in KINDS:
        one, two = _model(kind, 1), _model(kind, 2)
        layer = _less(_token(card, two, {}), _token(card, one, {}))
        found[kind] = {"layer": _table(layer)}
        if kind != "qlora":
            found[kind]["update"] = _table(_less(_update(card, two), _update(card, one)))
        if kind == "full":
            none = _model(kind, 1, VOCABULARY, 256)
            found["token"] = {
                name: _table(_token(card, none, options)) for name, options in SAMPLERS.items()
            }
    return found


def _child(tree: Path) -> dict[str, Any]:
    """measure() with the library of this tree."""
    import subprocess

    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-P", str(HERE), "--measure"], env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE, text=True, check=True, cwd=tree,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure the revision given, then this tree; save both."""
    from benchmarks.result import RESULTS, command_line, origin, six_digits

    parser = command_line(__doc__)
    parser.add_argument("--before", required=True, help="a git revision")
    parser.add_argument("--out", type=Path, default=RESULTS / "card_operators.json")
    given = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    revision = subprocess.check_output([*git, "rev-parse", given.before], text=True).strip()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        subprocess.run(
            [*git, "worktree", "add", "--quiet", "--detach", str(tree), revision], check=True
        )
        try:
            before = _child(tree)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)
    command = f"python -m benchmarks.card.operators --before {given.before}"
    result = origin(command, "torch", "transformers", "peft", "bitsandbytes")
    result |= {"before": {"revision": revision, **before}, "after": _child(ROOT)}
    given.out.write_text(json.dumps(six_digits(result), indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measure()))
    else:
        main()
