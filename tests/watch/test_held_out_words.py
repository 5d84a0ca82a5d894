"""What held-out evaluations say, in words: in a line, at the end of a run, in its card and in another terminal."""

import json
import re

import pandas as pd
import pytest

from grpo_kit.watch._run_state import RunState, better_before, held_out_words
from grpo_kit.watch._svg import draw_svg
from grpo_kit.watch.run_card import card_text
from grpo_kit.watch.terminal import where_it_is
from tests.watch.test_monitor import RUNS


def table(values, name="accuracy", low=None):
    made = pd.DataFrame({"step": range(0, 8 * len(values), 8), f"eval/{name}": values})
    return made if low is None else made.assign(**{f"eval/{name}_low": low})


@pytest.mark.parametrize(
    ("metrics", "said", "why"),
    [
        (
            table([0.17, 0.63, 0.47]),
            "was 63 % after step 8 and is 47 % after the last, 16.",
            "thrown away",
        ),
        (
            table([0.17, 0.63, 0.47], low=[0.1, 0.5, 0.35]),
            "47 % after the last, 16.",
            "below its interval",
        ),
        (
            table([0.17, 0.63, 0.47], low=[0.1, 0.45, 0.35]),
            "16; the fall may be chance.",
            "inside it",
        ),
        (table([0.63, 0.17, 0.47]), "was 63 % before the first step", "training made it worse"),
        (table([0.17, 0.5, 0.47]), None, "as every run does"),
        (table([0.17, 0.47, 0.63]), None, "the last is the best"),
        (
            table([0.2, 0.9, 0.5], "reward"),
            "Held-out reward was 0.90 after step 8 and is 0.50",
            "a reward",
        ),
        (table([2.0, 9.0, 8.7], "reward"), None, "3 points of 900"),
        (pd.DataFrame({"step": [1], "reward": [0.5]}), None, "nothing was measured"),
    ],
)
def test_a_better_evaluation_before(metrics, said, why):
    found = better_before(metrics)
    assert (found is None) if said is None else (said in found), why


def test_a_constant_is_said_first_once_training_began():
    row = {"step": 8, "eval/accuracy": 0.5, "eval/accuracy_low": 0.38, "eval/constant": 0.45}
    assert (
        held_out_words(row)
        == "no better than a constant answer (45%): held-out accuracy 50% (step 8)"
    )
    assert held_out_words(row | {"eval/constant": 0.3}) == "held-out accuracy 50% (step 8)"
    assert held_out_words(row | {"step": 0}) == "held-out accuracy 50% (step 0)"
    assert (
        held_out_words(row | {"eval/constant": 0.0, "eval/accuracy_low": 0.0})
        == "held-out accuracy 50% (step 8)"
    )


def test_a_point_is_pale_by_its_own_interval_and_the_legend_says_so():
    def drawn(*lows, constant=0.45):
        """Points that are pale, points that are not, and is there a legend? Of held-out evaluations 8 steps apart."""
        run = RunState()
        run.add(
            {
                "step": 8 * n,
                "reward": 0.5,
                "eval/accuracy": 0.6,
                "eval/accuracy_low": low,
                "eval/accuracy_high": 0.7,
                "eval/constant": constant,
            }
            for n, low in enumerate(lows)
        )
        page = draw_svg({"": run})
        groups = {
            look: sum(
                path.count("h0") for path in re.findall(rf'<g opacity="{look}">(.+?)</g>', page)
            )
            for look in (".35", "1")
        }
        return groups[".35"], groups["1"], ">pale: no better<" in page

    assert drawn(0.1, 0.38) == (2, 0, True)
    assert drawn(0.1, 0.5, 0.6, 0.2) == (2, 2, True), (
        "rose, then fell: the rise stays to be seen"
    )
    assert drawn(0.1, 0.46) == (1, 1, True)
    assert drawn(0.46, 0.5) == (0, 2, False)
    assert drawn(0.45) == (1, 0, True), "a tie, as in words"
    assert drawn(0.0, 0.0, constant=0.0) == (0, 2, False), "a constant that is never right"


def test_the_card_of_a_run_leads_with_the_constant(tmp_path):
    config = json.loads((RUNS / "induced" / "events" / "config.json").read_text())
    args = {
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "temperature": 1.0,
        "beta": 0.0,
    }
    config |= {
        "best_constant": {"strategy": "always 'billing'", "parts": {}},
        "parameters": 2,
        "trainable_parameters": 2,
    }
    config |= {"versions": {"trl": "1"}, "optimizer": "adamw", "device": "cpu", "args": args}
    (tmp_path / "run.json").write_text(json.dumps(config))
    rows = "step,progress,seconds,reward,eval/accuracy,eval/accuracy_low,eval/accuracy_high,eval/constant\n"
    (tmp_path / "metrics.csv").write_text(
        rows + "0,0.0,1,,0.17,0.1,0.28,0.45\n16,1.0,9,0.5,0.467,0.35,0.59,0.45\n"
    )
    text = card_text(tmp_path)
    assert "No better than always 'billing' (45.0 %). Held-out accuracy, greedy" in text
    assert "step 0: 17.0 % [10.0, 28.0] -> step 16: 46.7 % [35.0, 59.0]." in text


def test_another_terminal_says_what_it_came_to(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"config": {"steps": 2}}))
    (tmp_path / "metrics.csv").write_text("step,seconds\n1,1\n2,2\n")
    (tmp_path / "results.json").write_text(
        json.dumps({"sentence": "16.7 % -> 46.7 %, n = 60."})
    )
    assert where_it_is(tmp_path) == ("Done after 2 steps: 16.7 % -> 46.7 %, n = 60.", True)
    (tmp_path / "results.json").write_text("{}")
    assert where_it_is(tmp_path) == ("Done after 2 steps.", True)
