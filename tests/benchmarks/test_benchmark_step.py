"""The benchmark of one step measures what it says, on the same work, or stops."""

import json
import shutil

import pytest
import torch
from answered_here import answered_here
from transformers.models.llama.modeling_llama import LlamaMLP

from benchmarks.result import ROOT, result_path
from benchmarks.step.__main__ import main
from benchmarks.step.arms import ARMS, kit, measure
from benchmarks.step.processes import in_a_child
from benchmarks.step.run import check_same_work
from benchmarks.step.setup import Setup
from benchmarks.step.sizes import SIZES
from benchmarks.step.trl_arms import trl_hf
from benchmarks.step.workload import make_workload
from grpo_kit.models import load_policy

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


@pytest.fixture(scope="module")
def setup():
    model, tokenizer = load_policy("tiny-random", quiet=True)
    work = make_workload(tokenizer, SIZES["smoke"].realistic, seed=0)
    return Setup(
        model.cpu(), tokenizer, work, cuda=False, bf16=False, warmup=0, tuned=(8, False)
    )


@pytest.fixture(scope="module")
def plain(setup):
    return measure("trl-hf", setup)


# ---- a real run ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """Another state of the kit, whose engine says something else of itself."""
    folder = tmp_path_factory.mktemp("before")
    shutil.copytree(
        ROOT / "grpo_kit", folder / "grpo_kit", ignore=shutil.ignore_patterns("__pycache__")
    )
    with open(folder / "grpo_kit" / "engine" / "rollout.py", "a") as file:
        file.write('\nCOUNTED = {"prefill": 1000, "decode": 2000}\n')
        file.write(
            "Rollouts.tokens = property(lambda self: COUNTED, lambda self, counted: None)\n"
        )
    return folder


@pytest.fixture(scope="module")
def result(before, tmp_path_factory):
    """trl-hf and the other checkout's kit in processes of their own; the rest here, as starting one takes seconds."""
    out = tmp_path_factory.mktemp("results")
    arms = ["--arms", "trl-hf,trl-hf-tuned,kit", "--before", str(before)]

    def here_or_there(request, kit=ROOT, **how):
        own = request.get("arm") == "trl-hf" or kit != ROOT
        return in_a_child(request, kit, **how) if own else answered_here(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.step.run.in_a_child", here_or_there)
        patch.setattr("benchmarks.step.__main__.in_a_child", here_or_there)
        path = main(["--size", "smoke", *arms, "--out", str(out)])
    assert [p.name for p in out.iterdir()] == ["step_smoke_realistic.json"], (
        "nothing unfinished is left"
    )
    return json.loads(path.read_text())


def test_result_is_complete(result):
    assert list(result["arms"]) == ["trl-hf", "trl-hf-tuned", "kit-before", "kit"]
    assert not result["not run"]
    expected = {
        "command",
        "hardware",
        "weights",
        "n",
        "seed",
        "date",
        "versions",
        "work",
        "floor",
        "rounds",
    }
    assert expected <= result.keys()
    assert "--size smoke" in result["command"] and "--before <a checkout>" in result["command"]
    assert result["work"]["completion tokens"] == 40 and result["work"]["prompt tokens"] == [
        12,
        20,
    ]
    assert result["arms"]["trl-hf"]["rollouts by"] == "transformers.generate"
    assert result["arms"]["kit"]["rollouts by"] == "RolloutEngine"
    for arm in result["arms"].values():
        assert arm["peak bytes"]["above start"] > 0
        seconds, held = arm["timeline"]["seconds"], arm["timeline"]["GiB"]
        assert (
            len(seconds) == len(held) <= 200
            and list(seconds) == sorted(seconds)
            and max(held) * 2**30 > 0
        )
        assert max(held) * 2**30 == pytest.approx(
            arm["peak bytes"]["above start"], rel=0.01, abs=2**21
        )
        assert arm["tokens/s decode"] == pytest.approx(
            40 / arm["phases"]["decode"]["median"], rel=1e-4
        )


def test_the_other_checkouts_kit_was_measured(result):
    """Its engine's own count of tokens is larger than any other, so that it stands in the result."""
    before, now = (result["arms"][arm] for arm in ("kit-before", "kit"))
    assert (before["tokens"]["prefill"], before["tokens"]["decode"]) == (1000, 2000)
    assert (now["tokens"]["prefill"], now["tokens"]["decode"]) == (32, 32)
    assert (
        before["code"]["files"]
        != now["code"]["files"]
        == result["arms"]["trl-hf"]["code"]["files"]
    )


def test_each_ratio_is_fewer_tokens_times_faster_tokens(result):
    one, other = (result["rounds"][0][arm] for arm in ("kit", "trl-hf-tuned"))
    found = result["arms"]["kit"]["against"]["trl-hf-tuned"]
    kinds = {"prefill": "prefill", "decode": "decode", "forward-backward": "update"}
    assert list(found) == [*kinds, "step"]
    for phase, kind in kinds.items():
        ratio = other["phases"][phase] / one["phases"][phase]
        tokens = other["tokens computed"][kind] / one["tokens computed"][kind]
        assert found[phase]["ratio"] == pytest.approx(ratio, rel=1e-4)
        assert found[phase]["fewer tokens"] == pytest.approx(tokens, rel=1e-4)
        assert found[phase]["faster tokens"] == pytest.approx(ratio / tokens, rel=1e-4)
    passes = [
        t["prefill"] + t["decode"] + 3 * t["update"]
        for t in (s["tokens computed"] for s in (other, one))
    ]
    assert found["step"]["fewer tokens"] == pytest.approx(passes[0] / passes[1], rel=1e-4)
    assert found["step"]["ratio"] == pytest.approx(other["seconds"] / one["seconds"], rel=1e-4)


def test_times_the_floor(result):
    """The kit leaves groups without a signal out of its update, and so does its floor."""
    least, arm = result["floor"]["seconds with skipping"], result["arms"]["kit"]
    assert arm["times the floor"]["step"] == pytest.approx(
        arm["seconds"]["median"] / least["step"], rel=1e-4
    )
    assert arm["times the floor"]["decode"] == pytest.approx(
        arm["phases"]["decode"]["median"] / least["decode"], rel=1e-4
    )


def test_phases_add_up_to_the_step_and_are_filled(result):
    for arm, step in result["rounds"][0].items():
        assert sum(step["phases"].values()) == pytest.approx(step["seconds"], rel=1e-4), arm
        for phase in ("prefill", "decode", "reward", "forward-backward", "optimizer", "other"):
            assert step["phases"][phase] > 0, (arm, phase)
        # on-policy, beta 0: nothing to score
        assert step["phases"]["log-probs"] < 0.01 * step["seconds"], arm


def test_ratio_is_the_reference_over_the_arm(result):
    steps = result["rounds"][0]
    for reference in ("trl-hf", "trl-hf-tuned"):
        ratio = steps[reference]["seconds"] / steps["kit"]["seconds"]
        assert result["arms"]["kit"][f"{reference} / this"] == pytest.approx(ratio, rel=1e-4)


def test_all_arms_did_the_same_work(result):
    one, *others = result["rounds"][0].values()
    for other in others:
        assert (
            other["tokens crc32"] == one["tokens crc32"]
            and other["mean reward"] == one["mean reward"]
        )
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_only_plain_trl_checkpoints(setup, monkeypatch):
    """Checkpointed layers run once more in the backward pass: 2 layers, 1 micro-batch."""
    runs = []
    inner = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: runs.append(1) or inner(self, x))
    counts, tokens = {}, {}
    for arm in ("trl-hf", "trl-hf-tuned"):
        runs.clear()
        tokens[arm] = measure(arm, setup).tokens["update"]
        counts[arm] = len(runs)
    assert counts["trl-hf"] == counts["trl-hf-tuned"] + 2
    assert tokens["trl-hf"] == 2 * tokens["trl-hf-tuned"] == 2 * 8 * (20 + 8)


def learning(setup):
    """Tokens of the one group with a signal: of its prompt but the last and of its completions; of these alone."""
    prompts, completions = zip(*[(12, 5 + 3 + 6 + 4), (20, 2 + 4 + 8 + 8)], strict=True)
    group = setup.workload.flat.index(False)
    return prompts[group] - 1 + completions[group], completions[group]


def test_tokens_of_each_arm_by_hand(setup, plain):
    """Prompts of 12 and 20 tokens, 4 completions each, [5, 3, 6, 4] and [2, 4, 8, 8] tokens long."""
    # Padded rows; every row goes on until the longest ends, whose last token nobody reads. trl's head scores it all.
    assert plain.tokens == {
        "prefill": 8 * 20,
        "decode": 8 * 7,
        "update": 2 * 8 * 28,
        "head": 8 * 27,
    }
    # Each prompt once, live rows only: 8, 7, 6, 4, 3, 2 and 2 of them. The update has
    # the prompt's last token before every completion, whose own last token nobody reads; the head sees those alone.
    # The other group has no signal and is left out.
    update, head = learning(setup)
    least = {
        "prefill": 12 + 20,
        "decode": 8 + 7 + 6 + 4 + 3 + 2 + 2,
        "update": update,
        "head": head,
    }
    assert measure("kit", setup).tokens == least


def test_decoded_tokens_are_counted_where_no_module_is_called(setup, monkeypatch):
    """As by an engine that has the layers' weights only and says nothing: its sampler is asked for as many rows."""
    for name in ("_see", "report"):
        monkeypatch.setattr(f"benchmarks.step.tokens.TokenCount.{name}", lambda *args: None)
    head = learning(setup)[1]
    assert measure("kit", setup).tokens == {
        "prefill": None,
        "decode": 32,
        "update": None,
        "head": head,
    }


# ---- what is not the same work stops it ------------------------------------------------------------------------


def other_rewards(setup, model, folder):
    trainer = kit(setup, model, folder)
    (reward,) = trainer.task.rewards

    def seeded_reward(*args, **columns):
        return [1 - score for score in reward(*args, **columns)]

    trainer.task.rewards = [seeded_reward]
    return trainer


def other_loss(setup, model, folder):
    trainer = kit(setup, model, folder)
    inner = trainer.update.gradients
    trainer.update.gradients = lambda *args: 1.01 * inner(*args)
    return trainer


def other_gradient(setup, model, folder):
    with torch.no_grad():
        # on-policy, the loss does not depend on the weights
        model.get_input_embeddings().weight.mul_(1.05)
    return kit(setup, model, folder)


def other_tokens(setup, model, folder):
    trainer = trl_hf(setup, model, folder)
    inner = trainer._generate_single_turn

    def one_token_short(*args):
        ids, _ = inner(*args)
        return [*ids[:-1], ids[-1][:-1]], None

    trainer._generate_single_turn = one_token_short
    return trainer


@pytest.mark.parametrize(
    "tampered, message",
    [
        (other_rewards, "rewards differ"),
        (other_loss, "loss differs"),
        (other_gradient, "grad_norm differs"),
        (other_tokens, "kit trained on other completions"),
    ],
)
def test_a_tampered_arm_stops_the_run(tampered, message, setup, plain, monkeypatch):
    monkeypatch.setitem(ARMS, "kit", tampered)
    step = measure("kit", setup)
    with pytest.raises(SystemExit, match=message):
        check_same_work({"kit": step, "trl-hf": plain}, setup.workload, 1e-3)


@pytest.mark.parametrize(
    "arm, rollouts", [("kit", "kit"), ("kit-rollout", "kit"), ("kit-update", "trl")]
)
def test_an_honest_arm_passes(arm, rollouts, setup, plain):
    """Those with one half of the kit too: whose rollouts they are is seen by the tokens that were computed."""
    measured, longest = (
        measure(arm, setup),
        setup.workload.prompt_ids[setup.workload.flat.index(False)],
    )
    padded = 4 * (len(longest) + 8)  # the group with a signal, to the step's longest completion
    check_same_work({arm: measured, "trl-hf": plain}, setup.workload, 1e-3)
    assert (
        measured.tokens["prefill"] == {"kit": 12 + 20, "trl": plain.tokens["prefill"]}[rollouts]
    )
    assert measured.tokens["update"] == (padded if arm == "kit-rollout" else learning(setup)[0])


def test_the_second_step_is_measured_after_a_warmup(setup, plain):
    """The rate is so small that the weights stay where they were."""
    warm = measure("trl-hf", Setup(**{**vars(setup), "warmup": 1}))
    check_same_work({"warm": warm, "trl-hf": plain}, setup.workload, 1e-3)
    assert sum(warm.phases.values()) == pytest.approx(warm.seconds)


# ---- files and arguments ---------------------------------------------------------------------------------------


def test_results_of_other_hardware_are_kept(tmp_path):
    (tmp_path / "a.json").write_text('{"hardware": "one"}')
    assert result_path(tmp_path, "a", "one").name == "a.json"
    assert result_path(tmp_path, "a", "two").name == "a_2.json"
    (tmp_path / "a_2.json").write_text('{"hardware": "two"}')
    assert result_path(tmp_path, "a", "two").name == "a_2.json"
    assert result_path(tmp_path, "a", "three").name == "a_3.json"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--arms", "kit,nonsense"], "nonsense not known; use trl-hf"),
        (
            ["--arms", "kit-before"],
            "none of these can run here: .*give the checkout with --before",
        ),
    ],
)
def test_arms_that_cannot_run(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(["--size", "smoke", *arguments])
