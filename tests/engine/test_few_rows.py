"""Products and attention of a decoding step in C: torch's numbers, and to the bit a row's own; and without C."""

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
from torch.nn.functional import scaled_dot_product_attention

from grpo_kit.engine import RolloutEngine, _attention
from grpo_kit.engine._attention import attend_compiled
from grpo_kit.engine.cpu import _matmul
from grpo_kit.engine.cpu._matmul import compiled, product, projection

# As this processor is, as one without AVX-512, as one without AVX; and where nothing can be compiled.
COMPILERS = {"here": "cc", "avx2": "cc -mno-avx512f", "sse": "cc -mno-avx", "none": "false"}
PROMPTS = ragged_prompts()


@pytest.fixture(params=COMPILERS)
def library(request, monkeypatch):
    """compiled() for one of COMPILERS, in use."""
    monkeypatch.setenv("CC", COMPILERS[request.param])
    found = compiled.__wrapped__()
    if found is None and request.param != "none":
        pytest.skip(f"{COMPILERS[request.param]} makes nothing here")
    for module in (_matmul, _attention):
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
    weight, x = torch.randn(203, 192), torch.randn(40, 192)
    alone = torch.cat([product(weight, row[None]) for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (2, 3, 5, 6, 7, 12, 23, 40):
            assert torch.equal(product(weight, x[:rows]), alone[:rows])
            assert torch.equal(product(weight, x[-rows:]), alone[-rows:])
    finally:
        torch.set_num_threads(before)


# ---- attention ------------------------------------------------------------------------------------------------------


def attended(heads, groups, dim, lengths, prompt, width, scale=0.3, larger=1.0):
    """What C makes of random rows, and what torch makes of each in float64, (R, H, G, D) both."""
    rows = len(prompt)
    prefix = torch.randn(2, len(lengths), heads, max(lengths) + 2, dim)
    suffix = torch.randn(2, rows + 1, heads, width + 3, dim)
    # as the layers have it: a key behind its queries
    query = larger * torch.randn(rows, heads, groups + 1, dim)[:, :, :-1]
    places = torch.tensor(prompt), torch.tensor(lengths)
    found = attend_compiled(query, prefix, suffix, *places, width, scale)
    wanted = []
    for row, at in enumerate(prompt):
        key, value = (
            torch.cat([prefix[part, at, :, : lengths[at]], suffix[part, row, :, :width]], 1)
            for part in (0, 1)
        )
        wanted.append(
            scaled_dot_product_attention(
                query[row].double(), key.double(), value.double(), scale=scale
            )
        )
    return None if found is None else found.view(query.shape), torch.stack(wanted)


@pytest.mark.parametrize(
    "heads, groups, dim",
    [(3, 3, 64), (2, 7, 16), (1, 1, 128), (2, 6, 48), (1, 13, 32), (2, 2, 80)],
)
def test_rows_attend_their_prompt_and_themselves(heads, groups, dim, library):
    """Groups of unequal size in mixed order, prompts of unequal length, with sharp weights and flat ones."""
    torch.manual_seed(0)
    for larger in (0.01, 1, 100):
        for width in (1, 4, 19):
            found, wanted = attended(
                heads, groups, dim, [7, 1, 90], [1, 0, 2, 2, 0, 2, 0], width, larger=larger
            )
            if library is None:
                assert found is None
                return
            assert torch.allclose(found.double(), wanted, atol=2e-5 * max(1, larger / 10))


@pytest.mark.usefixtures("here")
def test_a_head_that_fills_no_register_is_left_to_torch():
    assert attended(2, 3, 20, [4], [0, 0], 2)[0] is None


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("where", ["query", "prefix", "suffix", "values"])
@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_not_lost(where, what):
    """A NaN in one row is seen in that row, and in no other; so the engine can say that weights hold one."""
    torch.manual_seed(0)
    query, prefix, suffix = (
        torch.randn(3, 2, 2, 16),
        torch.randn(2, 2, 2, 9, 16),
        torch.randn(2, 3, 2, 4, 16),
    )
    if where == "query":
        query[1, 0, 0, 3] = what
    elif where == "prefix":
        prefix[0, 1, 0, 5, 2] = what
    elif where == "suffix":
        suffix[0, 1, 0, 2, 2] = what
    else:
        suffix[1, 1, 0, 2, 2] = what
    found = attend_compiled(
        query, prefix, suffix, torch.tensor([0, 1, 0]), torch.tensor([9, 8]), 4, 1.0
    ).view(query.shape)
    assert not found[1, 0].isfinite().all()
    assert found[[0, 2]].isfinite().all() and found[1, 1].isfinite().all()


@pytest.mark.usefixtures("here")
def test_a_rows_attention_is_its_own_to_the_bit():
    torch.manual_seed(0)
    prefix, suffix = torch.randn(2, 3, 2, 30, 32), torch.randn(2, 9, 2, 8, 32)
    query, prompt = torch.randn(9, 2, 3, 32), torch.tensor([0, 1, 2] * 3)
    lengths = torch.tensor([30, 11, 1])
    together = attend_compiled(query, prefix, suffix, prompt, lengths, 8, 0.2)
    for row in range(9):
        alone = attend_compiled(
            query[row : row + 1],
            prefix,
            suffix[:, row : row + 1],
            prompt[row : row + 1],
            lengths,
            8,
            0.2,
        )
        assert torch.equal(alone[0], together[row])


# ---- in the engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True])
def test_completions_are_those_of_generate_with_and_without_a_compiler(lora, library):
    """Heads of 16 numbers and adapters of rank 4, whose products are left to torch."""
    model, settings = tiny_model("qwen3", lora=lora), config(eos_token_id=499)
    made = RolloutEngine(model).generate(PROMPTS, settings)
    assert made.completion_ids == generate(model, PROMPTS, settings)


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
