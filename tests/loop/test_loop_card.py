"""A card that nobody has tried: the fast ways are compared once, and one that is off or fails gives way."""

import json

import pytest
import torch
from loop_runs import make, record

from grpo_kit._support import cuda
from grpo_kit.engine import RolloutEngine, packed_update
from grpo_kit.engine import fast as fast_module
from grpo_kit.engine._first_use import FILE
from grpo_kit.engine.card.checks import check_card, checked
from grpo_kit.engine.fast import fast
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Config
from grpo_kit.loop.batch import generate
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.models import load_policy
from grpo_kit.models._precision import Finding, judged


@pytest.fixture
def untried(monkeypatch, tmp_path):
    """This machine, as if it were a card that nobody has tried."""
    monkeypatch.setattr(cuda, "may_fail", lambda device: True)
    # Only what is found is kept apart: in a cache of its own, the tiny model's tokenizer would be converted anew.
    monkeypatch.setattr("grpo_kit.engine._first_use.cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / FILE


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_the_fast_ways_are_equal_here_and_the_model_stays_as_it_was(tuning):
    model, _ = load_policy("tiny-random", tuning=tuning, quiet=True)
    model.train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    found = check_card(model)
    assert [(one.part, one.outcome) for one in found] == [
        ("engine", "equal"),
        ("packed update", "equal"),
    ]
    assert all(one.apart < 1e-5 for one in found)
    assert model.training and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def wrong_temperature(patch):
    inner = RolloutEngine.generate

    def generate(self, prompts, how, **kwargs):
        how.temperature = 1.2
        made = inner(self, prompts, how, **kwargs)
        return made

    patch.setattr(RolloutEngine, "generate", generate)


def wrong_mask(patch):
    """Every token sees all that stand before it in the row, those of other completions too."""
    inner = packed_update.TreePlan

    def flat(tree):
        from grpo_kit.engine.tree import build_tree

        return build_tree([(tuple(tree.input_ids[:-1].tolist()), [int(tree.input_ids[-1])])])

    patch.setattr(packed_update, "TreePlan", lambda tree: inner(flat(tree)))


@pytest.mark.parametrize(
    "wrong, part", [(wrong_temperature, "engine"), (wrong_mask, "packed update")]
)
def test_a_wrong_one_is_seen_and_left_out(untried, tmp_path, monkeypatch, wrong, part):
    model, _ = load_policy("tiny-random", quiet=True)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10)
    with monkeypatch.context() as patch:
        wrong(patch)
        found = {one.part: one.outcome for one in checked(model, Config())}
    assert found[part] in ("differs", "failed")
    seams = fast(model, Config())
    assert part.split()[-1] in seams.why_not
    assert (seams.sample is generate) == (part == "engine")
    assert isinstance(seams.update, PaddedUpdate) == (part == "packed update")


def test_what_was_found_is_kept_for_this_card_versions_and_model_type(untried, monkeypatch):
    model, _ = load_policy("tiny-random", quiet=True)
    calls = []
    inner = check_card
    monkeypatch.setattr(
        "grpo_kit.engine.card.checks.check_card", lambda *a: calls.append(1) or inner(*a)
    )
    first, again = checked(model, Config()), checked(model, Config())
    assert first == again and len(calls) == 1 and len(json.loads(untried.read_text())) == 1
    checked(model, Config(autocast="bfloat16"))
    assert len(calls) == 2 and len(json.loads(untried.read_text())) == 2
    untried.write_text("rubbish")
    assert checked(model, Config()) == first and len(calls) == 3


def test_rounding_that_hides_an_error_is_never_called_equal():
    assert judged("engine", 0.3, 0.05, narrow=False).outcome == "differs"
    assert judged("engine", 0.1, 0.05, narrow=False).outcome == "equal"
    hidden = judged("engine", 0.5, 0.3, narrow=False)
    assert hidden.outcome == "cannot tell" and "rounding alone is 0.3" in str(hidden)
    assert judged("engine", float("inf"), 0.3, narrow=False).outcome == "differs"
    assert (
        str(Finding("engine", "failed", why="RuntimeError: no kernel"))
        == "engine: failed (RuntimeError: no kernel)"
    )


@pytest.mark.parametrize("part", ["engine", "packed update"])
def test_one_that_fails_in_a_run_gives_way_and_the_run_is_that_of_the_plain_way(
    untried, tmp_path, monkeypatch, capsys, part
):
    plain = make(tmp_path / "plain", seams="fast")
    calls = []

    def breaks(inner):
        def broken(self, *args, **kwargs):
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("CUDA error: an illegal instruction")
            return inner(self, *args, **kwargs)

        return broken

    owner, name = (
        (RolloutEngine, "generate") if part == "engine" else (PackedUpdate, "gradients")
    )
    plain.train()
    monkeypatch.setattr(owner, name, breaks(getattr(owner, name)))
    trainer = make(tmp_path / "run", seams="fast")
    trainer.train()
    said = capsys.readouterr().out
    assert (
        said.count(f"The {part} failed on this machine (RuntimeError: CUDA error") == 1
        and len(calls) == 2
    )
    rows, wanted = record(trainer.folder)[0], record(plain.folder)[0]
    assert len(rows) == 4 and rows[0]["loss"] == wanted[0]["loss"]
    if part == "packed update":
        assert rows[1]["grad_norm"] == pytest.approx(wanted[1]["grad_norm"], rel=1e-4)


def test_on_a_cpu_an_error_is_raised_and_nothing_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(fast_module, "checked", lambda *a: pytest.fail("checked on a CPU"))
    monkeypatch.setattr(
        PackedUpdate, "gradients", lambda *a: (_ for _ in ()).throw(RuntimeError("a bug"))
    )
    with pytest.raises(RuntimeError, match="a bug"):
        make(tmp_path / "run", seams="fast").train()
