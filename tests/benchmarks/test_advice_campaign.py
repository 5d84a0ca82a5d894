"""The plan's runs: what is missing is run, what was killed is run again, results of other settings are never used."""

import importlib
import json
import sys
from dataclasses import replace

import pytest
from plan_runs import forget, write

from benchmarks.advice import __main__ as command
from benchmarks.advice.plan import arms, campaign, cost, runs, tuned
from benchmarks.advice.row import of_asked, say

# the module; lab.compare_arms is the function
COMPARE_ARMS = importlib.import_module("grpo_kit.more.lab.compare_arms")


def called(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["advice", *options])
    command.main()


def test_a_claim_runs_what_is_missing_and_goes_on(small, monkeypatch, capsys, tmp_path):
    called(monkeypatch, "--claim", "cold", "--seeds", "1")
    said = capsys.readouterr().out
    assert (
        "cold, seed 0: done" in said
        and "control, seed 0: done" in said
        and "cannot tell (one seed" in said
    )
    path = runs.path_of("cold", 0)
    saved, written = json.loads(path.read_text()), path.stat().st_mtime_ns
    assert (
        saved["outcomes"]["steps"] == 2
        and saved["key"] in path.name
        and len(saved["right"]) == 8
    )
    assert len(saved["curve"]["reward"]) == 2 and str(tmp_path) not in path.read_text()
    called(monkeypatch, "--claim", "cold", "--seeds", "1")
    assert "done" not in capsys.readouterr().out and path.stat().st_mtime_ns == written, (
        "nothing is run twice"
    )
    path.unlink()  # killed before it was written: the run folder is whole
    monkeypatch.setattr(
        COMPARE_ARMS, "run", lambda *given, **named: pytest.fail("trained again")
    )
    called(monkeypatch, "--claim", "cold", "--seeds", "1")
    assert json.loads(path.read_text())["outcomes"] == saved["outcomes"]


def test_the_rule_goes_on_to_the_largest_number(small, monkeypatch):
    """Without --seeds: the first seed, and since one seed's interval is infinite, the second, which is the last."""
    called(monkeypatch, "--claim", "cold")
    assert (
        runs.done("cold") == runs.done("control") == [0, 1]
        and campaign.wanted(campaign.ASKED[0]) == []
    )


def test_a_killed_run_is_made_again(small, monkeypatch):
    real = COMPARE_ARMS.run

    def killed(*given, **named):
        real(*given, **named)
        (given[2] / "result.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(COMPARE_ARMS, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        called(monkeypatch, "--claim", "cold", "--seeds", "1")
    assert runs.done("cold") == runs.done("control") == []
    monkeypatch.setattr(COMPARE_ARMS, "run", real)
    called(monkeypatch, "--claim", "cold", "--seeds", "1")
    assert runs.done("cold") == runs.done("control") == [0]


def test_half_a_result_is_none(small, monkeypatch):
    """Written whole or not at all: what fails on the way leaves no file that would count as done."""
    monkeypatch.setattr(
        runs, "write_whole", lambda path, data: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        called(monkeypatch, "--claim", "cold", "--seeds", "1")
    assert runs.done("cold") == []


def test_results_of_other_settings_are_never_mixed_in(small, monkeypatch):
    write("cold", 0)
    old = runs.path_of("cold", 0)
    assert runs.done("cold") == [0]
    small["cold"] = small["cold"] | {"temperature": 0.6}
    forget()
    assert runs.done("cold") == [] and runs.path_of("cold", 0) != old
    key = runs.key_of("cold")
    monkeypatch.setattr(runs, "REVISION", arms.REVISION + 1)
    forget()
    assert runs.key_of("cold") != key, "a change of code that no setting shows"


def test_the_best_of_a_sweep_is_chosen_on_seeds_of_its_own(small):
    rates = {"slow": 1e-4, "quick": 1e-3}
    small |= {name: small["control"] | {"learning_rate": rate} for name, rate in rates.items()}
    names = {
        "arm": "best",
        "against": "best control",
        "tuned": (("slow", "quick"), ("control",)),
    }
    entry = replace(campaign.ASKED[0], **names, first=2)
    assert campaign.wanted(entry) == [
        (arm, s) for arm in ("slow", "quick", "control") for s in tuned.SEEDS
    ]
    for arm, reward in (("slow", 0.1), ("quick", 0.3), ("control", 0.2)):
        for seed in tuned.SEEDS:
            write(arm, seed, reward_mean=reward)
    write("slow", 0, reward_mean=0.9)  # of the comparison: not to be chosen by
    assert tuned.settled(entry).arm == "quick"
    assert campaign.wanted(entry) == [
        ("quick", 0),
        ("control", 0),
        ("quick", 1),
        ("control", 1),
    ]
    assert "not run yet" in say(of_asked(entry)), "the seeds that it was chosen on do not count"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--claim", "nobody"], "not in the plan; use one of cold"),
        (["--claim", "mock-as-good"], "python -m benchmarks.agents"),
        (["--claim", "no-kl"], "answered from benchmarks/results/advice"),
        (["--claim", "cold", "--seeds", "0"], "give how many seeds"),
    ],
)
def test_what_cannot_be_run_is_refused(small, monkeypatch, options, message):
    with pytest.raises(SystemExit, match=message):
        called(monkeypatch, *options)


def test_the_plan_shows_what_is_done(small, monkeypatch, capsys):
    write("cold", 0, reward_mean=0.5)
    called(monkeypatch, "--plan")
    said = capsys.readouterr().out
    assert (
        "done: cold: seeds 0; control: none; missing 1 runs" in said
        and "; 3 to the largest number" in said
    )
    assert cost.MEASURED in said


# ---- the whole plan


@pytest.fixture
def counted(small, monkeypatch):
    """Claims of two priorities whose runs are written at once; the list of what was run, in order."""
    late = replace(campaign.ASKED[0], name="late", arm="late", priority=2, most=1)
    first = replace(campaign.ASKED[0], first=2)
    small |= {
        "late": small["control"] | {"temperature": 0.6},
        "hot": small["control"] | {"temperature": 1.5},
    }
    monkeypatch.setattr(campaign, "ASKED", [first, replace(first, name="hot", arm="hot"), late])
    order = []

    def run(arm, seed):
        order.append((arm, seed))
        write(arm, seed, reward_mean=0.5)
        return True

    monkeypatch.setattr(runs, "run", run)
    return order


def test_a_campaign_goes_by_priority_and_then_by_seed(counted, monkeypatch, capsys):
    called(monkeypatch, "--campaign", "--priority", "1")
    first = [(arm, seed) for seed in (0, 1) for arm in ("cold", "control", "hot")]
    assert counted == first and "hot, seed 1: done" in capsys.readouterr().out
    called(monkeypatch, "--campaign")
    assert counted == [*first, ("late", 0)], "what is done is not done again"


def test_a_campaign_chooses_rates_before_later_seeds(counted, monkeypatch):
    """Seeds 100 and 101 of a choice are no hundredth seeds: the claim waits for them."""
    names = {
        "name": "tuned",
        "arm": "best",
        "against": "best control",
        "tuned": (("hot",), ("late",)),
    }
    monkeypatch.setattr(
        campaign, "ASKED", [campaign.ASKED[0], replace(campaign.ASKED[0], most=2, **names)]
    )
    called(monkeypatch, "--campaign")
    assert counted.index(("hot", 100)) < counted.index(("cold", 1)) < counted.index(("hot", 0))


def test_a_campaign_leaves_to_others_what_they_are_at(counted, monkeypatch, capsys):
    """It asks again after each run of its own, and ends when they are at all that is left."""
    own, asked = runs.run, []

    def run(arm, seed):
        asked.append((arm, seed))
        return False if arm == "cold" else own(arm, seed)

    monkeypatch.setattr(runs, "run", run)
    called(monkeypatch, "--campaign")
    assert asked.count(("cold", 0)) > 1 and runs.done("cold") == []
    assert runs.done("control") == runs.done("hot") == [0, 1] and runs.done("late") == [0]
    assert "cold, seed 0: another process is at it" in capsys.readouterr().out


def test_a_campaign_goes_on_after_a_run_that_fails_and_says_so(counted, monkeypatch):
    own = runs.run

    def run(arm, seed):
        if (arm, seed) == ("hot", 0):
            raise RuntimeError("loss is NaN")
        return own(arm, seed)

    monkeypatch.setattr(runs, "run", run)
    with pytest.raises(
        SystemExit, match="1 runs failed:\nhot, seed 0: failed: RuntimeError: loss is NaN"
    ):
        called(monkeypatch, "--campaign")
    assert runs.done("hot") == [1] and runs.done("cold") == [0, 1]
    assert counted.count(("hot", 1)) == 1
