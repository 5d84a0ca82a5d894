"""A decoding step in C: the numbers of torch's layers, and to the bit a row's own; and without C."""

import functools
import os
import platform
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from rollout_models import config, generate, ragged_prompts, tiny_model

from grpo_kit.engine import RolloutEngine
from grpo_kit.engine._kv_cache import CacheSize, KVCache
from grpo_kit.engine.cpu import _decode_step, _layers, _matmul
from grpo_kit.engine.cpu._decode_step import CompiledStep
from grpo_kit.engine.cpu._layers import (
    PlainLayers,
    plain_layers,
    read_parts,
    why_not_here,
)
from grpo_kit.engine.cpu._matmul import Projection, compiled, product, projection
from grpo_kit.models._model_facts import base_model

# As this processor is, as one without AVX-512, as one without AVX; and where nothing can be compiled.
COMPILERS = {"here": "cc", "avx2": "cc -mno-avx512f", "sse": "cc -mno-avx", "none": "false"}
PROMPTS = ragged_prompts()


@functools.cache
def compiled_by(compiler):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", compiler)
        return compiled.__wrapped__()


@pytest.fixture(params=COMPILERS)
def library(request, monkeypatch):
    """compiled() for one of COMPILERS, in use."""
    found = compiled_by(COMPILERS[request.param])
    if found is None and request.param != "none":
        pytest.skip(f"{COMPILERS[request.param]} makes nothing here")
    for module in (_matmul, _decode_step, _layers):
        monkeypatch.setattr(module, "compiled", lambda: found)
    return found


@pytest.fixture
def here():
    if compiled() is None:
        pytest.skip("no C compiler with OpenMP here")


def test_this_machine_has_a_compiler_if_it_has_one():
    """So that the tests of C do not pass by being skipped where they ought to run."""
    if shutil.which("gcc") and platform.machine() == "x86_64":
        assert compiled() is not None


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 31, 96, 255, 256])
def test_products_are_products(rows, library):
    torch.manual_seed(0)
    for outputs, width in ((70, 48), (3, 16), (64, 1600), (50, 20)):
        weight, x = torch.randn(outputs, width), torch.randn(rows, width)
        wanted = x.double() @ weight.double().t()
        for given in (x, x.t().contiguous().t()):  # either layout
            assert torch.allclose(product(weight, given).double(), wanted, atol=1e-4)
        assert torch.allclose(
            product(weight.t().contiguous().t(), x).double(), wanted, atol=1e-4
        )
    linear = torch.nn.Linear(48, 70)
    x = torch.randn(rows, 48)
    assert torch.allclose(projection(linear)(x), linear(x), atol=1e-5)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_rows_product_is_its_own_to_the_bit(threads):
    """Whatever rows stand beside it, and on however many threads. torch's linear layer does not promise that."""
    torch.manual_seed(0)
    weight, x = torch.randn(203, 320), torch.randn(40, 320)  # few rows in line, more in tiles
    alone = torch.cat([product(weight, row[None]) for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (2, 3, 5, 6, 7, 12, 23, 40):
            assert torch.equal(product(weight, x[:rows]), alone[:rows])
            assert torch.equal(product(weight, x[-rows:]), alone[-rows:])
    finally:
        torch.set_num_threads(before)


# ---- the step -------------------------------------------------------------------------------------------------------


class Steps:
    """Steps of `prompt` rows (their prompts, of these lengths) over random keys and values; `written` tokens before."""

    def __init__(self, model, lengths, prompt, written=4, bits=32, larger=1.0):
        base = base_model(model)
        self.layers, self.rows = plain_layers(base, bits), len(prompt)
        shape = (
            base.config.num_hidden_layers,
            base.config.num_key_value_heads,
            base.config.head_dim,
        )
        size = CacheSize(len(lengths), self.rows + 1, max(lengths) + 2, self.rows, written + 3)
        generator = torch.Generator().manual_seed(0)
        self.slots = KVCache(
            shape, size, dtype=torch.float32, device=torch.device("cpu"), bucketed=False
        )
        for kept in (self.slots.prefix, self.slots.suffix):
            kept.normal_(generator=generator)
        self.slots.prefix[0] *= larger
        self.slots.set_prompts(lengths)
        self.slots.arrange(prompt, self.rows)
        self.tokens = torch.randint(3, 400, (self.rows,), generator=generator)
        self.positions = torch.tensor([lengths[at] for at in prompt]) + written
        self.slots.set_step(self.tokens, self.positions, written, written + 1)

    @torch.no_grad()
    def by_torch(self):
        """Logits, keys and values by the same layers' plain functions, whose attention is torch's fused one."""
        hidden = self.layers.hidden(self.tokens, self.positions, self.slots.attend_rows)
        return self.layers.head(hidden), self.slots.suffix.clone()

    @torch.no_grad()
    def in_c(self):
        step = CompiledStep.of(self.layers)
        return step(self.tokens, self.positions, self.slots), self.slots.suffix.clone()


def filled(family="qwen3", heads=(4, 2), dim=16, lora=False, **overrides):
    """A model whose numbers fill registers; heads: of queries, of keys."""
    return tiny_model(
        family,
        lora=lora,
        hidden_size=64,
        intermediate_size=96,
        head_dim=dim,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        **overrides,
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_step_is_that_of_torchs_layers(family, lora, library):
    """Biases, norms of queries and keys, adapters; prompts of unequal length, rows of them in mixed order."""
    if library is None:
        pytest.skip("there is nothing to compare")
    model = filled(family, lora=lora)
    for rows in ([0], [1, 0, 2, 2, 0, 2, 0], [0, 1, 2] * 11):
        steps = Steps(model, [7, 1, 90], rows)
        (wanted, wanted_kept), (made, kept) = steps.by_torch(), steps.in_c()
        assert torch.allclose(made, wanted, atol=2e-4, rtol=1e-4)
        assert torch.allclose(kept, wanted_kept, atol=1e-4)


@pytest.mark.parametrize(
    "heads, dim", [((9, 3), 64), ((14, 2), 16), ((1, 1), 128), ((12, 2), 48), ((13, 1), 32)]
)
def test_attention_of_every_shape(heads, dim, library):
    """With sharp weights and flat ones; more queries to a key head than registers, heads of three registers."""
    if library is None:
        pytest.skip("there is nothing to compare")
    model = filled(heads=heads, dim=dim)
    for larger in (0.01, 1, 100):
        for written in (0, 4, 19):
            steps = Steps(model, [7, 1, 90], [1, 0, 2, 2, 0], written, larger=larger)
            wanted, made = steps.by_torch()[0], steps.in_c()[0]
            assert torch.allclose(made, wanted, atol=3e-4 * max(1, larger / 10), rtol=1e-3)


@pytest.mark.usefixtures("here")
def test_numbers_that_fill_no_register_are_left_to_torch():
    assert CompiledStep.of(plain_layers(filled(dim=20))) is None
    model = filled()
    assert CompiledStep.of(plain_layers(model)) is not None
    up = model.model.layers[1].mlp.up_proj
    up.weight.data = up.weight.data.t().contiguous().t()
    assert CompiledStep.of(plain_layers(model)) is None


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "where, what",
    [
        ("prefix", "nan"),
        ("suffix", "nan"),
        ("values", "inf"),
        ("values", "nan"),
        ("state", "inf"),
        ("state", "nan"),
    ],
)
def test_a_number_that_is_none_is_not_lost(where, what):
    """A NaN in one row is seen in that row, and in no other; so the engine can say that weights hold one."""
    model, what = filled(), float(what)
    steps = Steps(model, [9, 8], [0, 1, 0])
    if where == "prefix":
        steps.slots.prefix[0, 1, 1, 0, 5, 2] = what
    elif where == "suffix":
        steps.slots.suffix[0, 0, 1, 0, 2, 2] = what
    elif where == "values":
        steps.slots.suffix[1, 0, 1, 1, 2, 2] = what
    else:
        steps.tokens = torch.tensor([4, 5, 6])
        model.get_input_embeddings().weight.data[5, 3] = what
    made = steps.in_c()[0]
    assert not made[1].isfinite().any()
    assert made[[0, 2]].isfinite().all()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("bits", [32, 16])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_rows_step_is_its_own_to_the_bit(threads, bits):
    """Whatever rows stand beside it, and on however many threads."""
    if bits == 16 and not compiled().has_bfloat16:
        pytest.skip("no products of bfloat16 here")
    model, rows = filled(), [0, 1, 2] * 5
    together = Steps(model, [30, 11, 1], rows, bits=bits)
    wanted = together.in_c()[0]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(together.in_c()[0], wanted)
        for row, at in enumerate(rows):
            alone = Steps(model, [30, 11, 1], [at], bits=bits)
            alone.slots.suffix[:, :, 0] = together.slots.suffix[:, :, row]
            alone.slots.set_step(together.tokens[row : row + 1], alone.positions, 4, 5)
            alone.tokens = together.tokens[row : row + 1]
            assert torch.equal(alone.in_c()[0][0], wanted[row])
    finally:
        torch.set_num_threads(before)


class ExactlyRounded(Projection):
    """Weights and inputs rounded to bfloat16, sums in float64."""

    def product(self, x):
        weight = self.weight.bfloat16().double()
        return (x.bfloat16().double() @ weight.t()).float()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_bfloat16_weights_are_read_as_they_are(family, library, monkeypatch):
    """Rounded weights, rounded inputs, sums in float32; adapters and biases in float32."""
    if library is None or not library.has_bfloat16:
        pytest.skip("no products of bfloat16 here")
    model = filled(family, lora=family == "llama")
    steps = Steps(model, [7, 1], [0, 1, 1], bits=16)
    made = steps.in_c()[0]
    monkeypatch.setattr(
        _layers,
        "_rounded",
        lambda **linears: {
            name: ExactlyRounded(layer.weight, layer.bias, layer.adapters)
            for name, layer in linears.items()
        },
    )
    parts = read_parts(base_model(model), torch.float32)
    steps.layers = PlainLayers(base_model(model), _layers.rounded(parts))
    wanted, exact = steps.by_torch()[0], steps.in_c()[0]
    apart = (made - wanted).abs().mean()
    assert apart < (exact - wanted).abs().mean() / 5, "a sum falls to the other side at times"
    assert (exact - wanted).abs().mean() > 1e-3


# ---- in the engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True])
def test_completions_are_those_of_generate_with_and_without_a_compiler(lora, library):
    """Heads of one register, adapters of a rank that fills none."""
    model, settings = tiny_model("qwen3", lora=lora), config(eos_token_id=499)
    made = RolloutEngine(model).generate(PROMPTS, settings)
    assert made.completion_ids == generate(model, PROMPTS, settings)


@pytest.mark.parametrize("amx", [False, True])
def test_16_bits_are_sampled_with_every_compiler(amx, library, monkeypatch):
    """In C, or by torch where it multiplies no bfloat16, or where oneDNN has tiles (here: only said to have)."""
    if why_not_here():
        pytest.skip("no products of bfloat16 here")
    monkeypatch.setattr(_layers, "_has", lambda feature: amx or feature != "amx_bf16")
    model, settings = filled(), config(do_sample=True, max_new_tokens=6)
    engine = RolloutEngine(model, bits=16)
    made = engine.generate(PROMPTS, settings, seed=1)
    exact = RolloutEngine(model).generate(PROMPTS, settings, seed=1)
    apart = [
        abs(a - b)
        for one, other in zip(made.policy_logprobs, exact.policy_logprobs, strict=True)
        for a, b in zip(one[:1], other[:1], strict=True)
    ]
    assert 0 < max(apart) < 0.5
    in_c = CompiledStep.of(plain_layers(model, 16)) is not None
    assert in_c == bool(library and library.has_bfloat16 and not amx)


@pytest.mark.usefixtures("here")
def test_a_completions_numbers_do_not_depend_on_how_many_stand_beside_it():
    """To the bit: tokens, log-probabilities and entropies of rows 0 and 1 beside none and beside fifteen others."""
    model, settings = tiny_model("qwen3"), config(do_sample=True, max_new_tokens=20)
    two, many = (
        RolloutEngine(model).generate([PROMPTS[0]] * rows, settings, seed=5) for rows in (2, 17)
    )
    assert two.completion_ids == many.completion_ids[:2]
    assert two.policy_logprobs == many.policy_logprobs[:2]
    assert two.entropies == many.entropies[:2]


@pytest.mark.parametrize(
    "compiler",
    ["/no/such/compiler", "false", "echo", "python3 -c 1", "cc -fno-such-option", "", "gcc '"],
)
def test_a_compiler_that_is_none_is_done_without(compiler, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    assert compiled.__wrapped__() is None


@pytest.mark.usefixtures("here")
def test_ctrl_c_in_a_terminal_is_not_the_compilers(tmp_path, monkeypatch):
    """It goes to every process of the terminal's group; without a compiler the run would go on by other products."""
    slow = tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\necho begun >> {tmp_path}/begun\nsleep 1\nexec cc "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    code = "from grpo_kit.engine.cpu._matmul import compiled; import signal; "
    code += "signal.signal(signal.SIGINT, lambda *_: None); print(bool(compiled()))"
    run = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    while not (tmp_path / "begun").exists() and run.poll() is None:
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    assert run.communicate(timeout=60)[0] == "True\n"


def test_no_room_for_what_is_compiled_is_done_without(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert compiled.__wrapped__() is None


@pytest.mark.usefixtures("here")
def test_the_compiler_may_have_words_of_its_own(monkeypatch):
    monkeypatch.setenv("CC", "env LC_ALL=C cc")
    assert compiled.__wrapped__() is not None
