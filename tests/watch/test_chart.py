"""The whole chart of a run: what was measured, where things changed, and words that do not cover each other."""

import json
import math
import time

import numpy as np
import pandas as pd
import pytest

from grpo_kit.record.files import RunFolderError
from grpo_kit.watch.chart import draw, plot_run
from grpo_kit.watch.curves import moving_mean, window_of
from grpo_kit.watch.flags import Flag
from tests.made_metrics import Recorded, rescaled, rows, run_folder


def test_flags_are_marked_where_they_began_and_told_under_the_panels():
    table = pd.DataFrame(rows(20))
    flags = [
        Flag("cut off", 3, "90 %", "w", "f"),
        Flag("KL spike", 3, "2.9", "w", "f"),
        Flag("x", 9, "y" * 300, "w", "f"),
    ]
    bare, marked = draw({"run": table}), draw({"run": table}, flags={"run": flags})
    steps = {
        line.get_xdata()[0] for axes in marked.axes for line in axes.lines if len(set(line.get_xdata())) == 1
    }
    assert steps == {3, 9}
    assert [text.get_text().strip() for text in marked.axes[0].texts] == ["1,2", "3"]
    words = [text.get_text() for text in marked.texts]
    assert words[:2] == ["1  cut off since step 3: 90 %", "2  KL spike since step 3: 2.9"]
    assert words[2].endswith("…") and len(words[2]) <= 170
    grown = marked.get_figheight() - bare.get_figheight()
    assert grown == pytest.approx(0.6)
    panels = [
        axes.get_position().height * figure.get_figheight()
        for figure in (bare, marked)
        for axes in figure.axes[:1]
    ]
    assert panels[0] == pytest.approx(panels[1]), "the panels keep their size"
    assert not draw({"run": table}, flags={"run": flags}, words=False).texts


@pytest.mark.parametrize("scale", [dict(times=2, plus=-1), dict(times=64, plus=0), dict(times=4, plus=-4)])
def test_a_reward_of_another_scale_fills_the_panel_as_one_in_0_and_1_does(scale):
    made = rows(30, accuracy_every=4)
    figures = [draw({"run": pd.DataFrame(some)}) for some in (made, rescaled(made, **scale))]
    heights = []
    for axes in (figure.axes[number] for figure in figures for number in (0, 1)):
        place = axes.transData + axes.transAxes.inverted()
        bands = [path.vertices for collection in axes.collections for path in collection.get_paths()]
        drawn = [line.get_xydata() for line in axes.lines] + [one for one in bands if len(one) > 30]
        heights.append([place.transform(one)[:, 1] for one in drawn])
    for before, after in zip(heights[:2], heights[2:], strict=True):
        assert len(before) >= 2
        for one, other in zip(before, after, strict=True):
            assert one == pytest.approx(other, abs=1e-6)
    low, high = scale["plus"], scale["plus"] + scale["times"]
    assert figures[1].axes[0].get_ylim() == pytest.approx(
        (low - 0.03 * (high - low), high + 0.03 * (high - low))
    )
    key = figures[1].axes[0].get_legend().get_texts()[0].get_text()
    assert key == f"accuracy, 0–100 %: {low:g} to {high:g}"


def panels(figure) -> dict[str, object]:
    found = {}
    for axes in figure.axes:
        legend = axes.get_legend()
        words = [text.get_text() for text in legend.get_texts()] if legend else []
        found[axes.get_title(loc="left") or ", ".join(words)] = axes
    return found


def test_plot_run_draws_what_was_measured(tmp_path):
    few = panels(plot_run(run_folder(tmp_path / "few", 7)))
    assert list(few) == [
        "reward (band: ± reward_std)",
        "reward parts",
        "completion length, tokens",
        "share cut off, groups without a signal",
        "entropy, nats a token",
        "gradient norm",
        "temperature",
        "learning rate",
    ]
    drawn = few["reward (band: ± reward_std)"].lines[0]
    assert drawn.get_ydata().tolist() == [row["reward"] for row in rows(7)]
    assert len(few["reward parts"].lines) == 2

    many = panels(plot_run(run_folder(tmp_path / "many", 60, kl=True)))
    assert "KL to the reference" in many and len(many) == 10
    points, mean = many["gradient norm"].lines
    norms = [row["grad_norm"] for row in rows(60, kl=True)]
    assert points.get_ydata().tolist() == norms
    assert mean.get_ydata()[30] == pytest.approx(np.mean(norms[28:33]))


def test_plot_run_beside_others_and_while_it_is_written(tmp_path):
    one, two = run_folder(tmp_path / "one", 5), run_folder(tmp_path / "two", 30)
    with open(two / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 31, "rew')
    figure = plot_run(one, compare=two)
    reward = figure.axes[0]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two"]
    assert len({line.get_color() for line in reward.lines}) == 2
    assert max(reward.lines[-1].get_xdata()) == 30
    assert figure._repr_png_()[:4] == b"\x89PNG"


def test_plot_run_of_a_run_without_rows_and_of_none(tmp_path):
    Recorded(tmp_path / "new")
    assert plot_run(tmp_path / "new")._repr_png_()
    with pytest.raises(RunFolderError, match="does not exist"):
        plot_run(tmp_path / "nowhere")


def test_one_picture_takes_less_than_two_seconds(tmp_path):
    figure = plot_run(run_folder(tmp_path / "run", 300))
    begun = time.process_time()
    figure._repr_png_()
    assert time.process_time() - begun < 2


def test_a_moving_mean_is_the_one_of_pandas():
    values = np.random.default_rng(0).normal(size=75)
    for window in (1, 5, 7, 25):
        theirs = pd.Series(values).rolling(window, center=True, min_periods=1).mean()
        assert moving_mean(values, window) == pytest.approx(theirs.to_numpy())
    assert [window_of(values[:n]) for n in (20, 21, 75)] == [1, 5, 7]
    assert window_of(np.ones(75)) == 1  # a level line needs none


LONG = (
    "language_consistency_of_thoughts",
    "soft overlong punishment",
    "tool use",
    "a_name_of_more_than_thirty_letters",
)


@pytest.mark.parametrize("parts", [(), LONG[:2], LONG, (*LONG, "e", "f", "g")])
@pytest.mark.parametrize("several", [False, True])
def test_no_word_above_the_panels_covers_another(parts, several):
    table = pd.DataFrame(rows(30, parts=parts, accuracy_every=5))
    figure = draw({"full": table, "lora": table} if several else {"full": table})
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    legends = [child for axes in figure.axes for child in axes.get_children() if hasattr(child, "get_texts")]
    words = [text for legend in [*legends, *figure.legends] for text in legend.get_texts()]
    titles = [axes._left_title for axes in figure.axes if axes.get_title(loc="left")]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in [*words, *titles]]
    assert len(boxes) >= 2 + len(parts) + several + len(titles)
    page = figure.bbox
    for n, (name, box) in enumerate(boxes):
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and box.y1 <= page.y1, name
        for other, another in boxes[:n]:
            assert not box.overlaps(another), (name, other)
    for axes in figure.axes[:2]:
        inside = axes.get_window_extent(renderer)
        assert not [name for name, box in boxes if box.overlaps(inside)]


def test_steps_on_the_axis_are_whole():
    for n in (1, 2, 3, 7, 40):
        figure = draw({"": pd.DataFrame(rows(n))})
        for axes in figure.axes:
            assert all(tick == round(tick) for tick in axes.get_xticks())


def test_a_run_is_named_above_its_panels():
    table = pd.DataFrame(rows(3))
    named = {n: draw(dict.fromkeys(n, table)).legends for n in ((), ("",), ("full",), ("full", "lora"))}
    assert [[t.get_text() for t in legend.get_texts()] for (legend,) in list(named.values())[2:]] == [
        ["full"],
        ["full", "lora"],
    ]
    assert not named[("",)]  # the live chart's


def test_changes_are_dotted_lines_with_their_words_under_the_panels(tmp_path):
    folder = run_folder(tmp_path / "run", 20)
    lines = [
        {"step": 6, "changes": {"learning_rate": [2e-05, 1e-05]}},
        {"step": 9, "refused": {"change": {"beta": -1}, "why": "no"}},
        {"step": 12, "changes": {"beta": [0.0, 0.04], "temperature": [1.0, 0.8]}},
    ]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1')
    figure = plot_run(folder)
    assert [text.get_text() for text in figure.texts] == [
        "a  from step 6: learning_rate 2e-05 → 1e-05",
        "b  from step 12: beta 0.0 → 0.04, temperature 1.0 → 0.8",
    ]
    upright = [line for line in figure.axes[0].lines if len(set(line.get_xdata())) == 1]
    assert sorted(line.get_xdata()[0] for line in upright) == [6, 12]
    assert {line.get_color() for line in upright} == {"#777777"}  # no flag's red
    assert [text.get_text().strip() for text in figure.axes[0].texts] == ["a", "b"]


def test_held_out_accuracy_is_points_with_their_interval():
    table = pd.DataFrame(rows(10, accuracy_every=5))
    (points,) = draw({"": table}).axes[0].containers
    assert points.lines[0].get_xdata().tolist() == [5, 10]
    assert points.lines[0].get_ydata() == pytest.approx([0.4, 0.7])
    spans = [segment[:, 1].tolist() for segment in points.lines[2][0].get_segments()]
    assert spans == [pytest.approx([0.33, 0.47]), pytest.approx([0.63, 0.77])]
    bare = table.drop(columns=["eval/accuracy_low", "eval/accuracy_high"])
    (points,) = draw({"": bare}).axes[0].containers
    assert points.lines[0].get_ydata() == pytest.approx([0.4, 0.7])
    assert not draw({"": pd.DataFrame(rows(10))}).axes[0].containers


def test_rewards_below_zero_and_above_one_are_in_the_picture():
    table = pd.DataFrame(rows(5)).assign(reward=[-0.5, 0.0, 1.0, 1.5, 2.0])
    low, high = draw({"": table}).axes[0].get_ylim()
    assert low < -0.5 and high > 2


def test_a_gradient_that_is_infinite_leaves_the_rest_of_its_line():
    table = pd.DataFrame(rows(30))
    table.loc[4, "grad_norm"] = math.inf
    axes = next(a for a in draw({"": table}).axes if a.get_title(loc="left") == "gradient norm")
    assert np.isfinite(axes.lines[-1].get_ydata()).all() and len(axes.lines[-1].get_ydata()) == 29
