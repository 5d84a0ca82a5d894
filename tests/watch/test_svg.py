"""The live drawing: what it shows, how long it is, and that its words stay apart and can be read."""

import re
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from grpo_kit.display import COLOURS, GREY, RED
from grpo_kit.watch.flags import Flag
from grpo_kit.watch.svg import HEIGHT, WIDTH, draw_svg
from tests.made_metrics import rescaled, rows
from tests.test_display import contrast

FLAGS = [Flag("cut off", 3, "w", "w", "f"), Flag("KL spike", 3, "w", "w", "f"), Flag("x", 12, "w", "w", "f")]
LONG = (
    "language_consistency_of_thoughts",
    "soft <overlong> punishment",
    "tool use",
    "a_name_of_more_than_30_letters",
)
NS = "{http://www.w3.org/2000/svg}"


def tree(*args, **options):
    return ET.fromstring(draw_svg(*args, **options))


def words(page):
    return [text.text for text in page.iter(NS + "text")]


def points(path):
    """Corners of a path of relative moves, as draw_svg writes them."""
    numbers = [int(n) for n in re.findall(r"-?\d+", path.get("d").replace("h0", ""))]
    return np.cumsum(np.array(numbers).reshape(-1, 2), axis=0)


def line(page, colour, *, width="4"):
    """The lines of a colour that are drawn, keys of a legend left out."""
    found = [
        p for p in page.iter(NS + "path") if p.get("stroke") == colour and p.get("stroke-width") == width
    ]
    return [p for p in found if p.get("d") != "M0-7h36"]


def test_a_line_goes_through_what_was_measured():
    table = rows(9)
    reward, exact = line(tree(table, last_step=9), COLOURS[0])
    for path, name in ((reward, "reward"), (exact, "reward/exact")):
        x, y = points(path).T
        values = np.array([row[name] for row in table])
        assert np.allclose(np.diff(x), np.diff(x).mean(), atol=1)  # a step is a step
        # Heights are a straight function of the values, to half a pixel; up is less.
        slope, start = np.polyfit(values, y, 1)
        assert slope < 0 and np.abs(slope * values + start - y).max() <= 1


def test_from_21_steps_on_the_line_is_the_moving_mean():
    few, many = rows(20), rows(21)
    assert len(line(tree(few), COLOURS[0], width="10")) == 2  # dots of its own colour on the line
    page = tree(many)
    y = points(line(page, COLOURS[0])[0])[:, 1]
    values = np.array([row["reward"] for row in many])
    smooth = np.array([values[max(0, i - 2) : i + 3].mean() for i in range(21)])
    assert abs(np.corrcoef(y, smooth)[0, 1]) > 0.9999 > abs(np.corrcoef(y, values)[0, 1])
    assert line(page, COLOURS[0], width="7")[0].get("stroke-opacity") == ".4"


def test_markers_stand_at_their_steps_and_change_is_not_flag():
    changes = [(6, "learning_rate 2e-05 → 1e-05"), (9, "beta 0 → <b>")]
    page = tree(rows(20), last_step=20, flags=FLAGS, changes=changes)
    assert [t for t in words(page) if t in ("1,2", "3")] == ["1,2", "3"]
    assert [t for t in words(page) if t in ("a", "b")] == ["a", "b"]
    told = "a from step 6: learning_rate 2e-05 → 1e-05 · b from step 9: beta 0 → <b>"
    assert words(page)[-1] == told
    at = points(line(page, COLOURS[0])[0])[:, 0]  # of steps 1, 2, ...
    for colour, steps in ((RED, [3, 12]), ("#777", [6, 9])):
        marks = [p for p in page.iter(NS + "path") if p.get("stroke") == colour]
        assert len(marks) == 2, "in both panels"
        found = [int(x) for x in re.findall(r"M(\d+)", marks[0].get("d"))]
        assert sorted(found) == [at[step - 1] for step in steps]


def test_held_out_accuracy_is_points_with_whiskers():
    table = rows(10, accuracy_every=5)
    page = tree(table, last_step=10)
    bars, dots = [p for p in page.iter(NS + "path") if p.get("stroke") == "#000"]
    at = points(line(page, COLOURS[0])[0])[:, 0]
    middles = points(dots)
    assert middles[:, 0].tolist() == [at[4], at[9]] and "held-out accuracy" in words(page)
    for middle, (low, high) in zip(middles, re.findall(r"M\d+ (\d+)V(\d+)", bars.get("d")), strict=True):
        assert int(high) < middle[1] < int(low)
    assert "held-out accuracy" not in words(tree(rows(10)))


@pytest.mark.parametrize("scale", [dict(times=2, plus=-1), dict(times=64, plus=0), dict(times=4, plus=-4)])
@pytest.mark.parametrize("n", [12, 60])
def test_a_reward_of_another_scale_fills_the_panel_as_one_in_0_and_1_does(scale, n):
    """Lines, bands and held-out accuracy lie where they lay; the numbers on the axis are the reward's own."""
    made = rows(n, accuracy_every=4)
    before, after = tree(made, last_step=n), tree(rescaled(made, **scale), last_step=n)
    drawn = [
        [
            p.get("d")
            for p in page.iter(NS + "path")
            if p.get("stroke") != "#e6e6e6" and p.get("d") != "M0-7h36"
        ]
        for page in (before, after)
    ]
    assert len(drawn[0]) > 6 and drawn[0] == drawn[1]
    low, high = scale["plus"], scale["plus"] + scale["times"]
    assert f"accuracy, 0–100 %: {low:g} to {high:g}" in words(after)
    assert {"20" if high > 20 else f"{high - 1:g}"} <= set(words(after))


@pytest.mark.parametrize("n, parts", [(3, 0), (300, 3), (5000, 3), (5000, 8)])
def test_it_is_short_and_quick_however_long_the_run_is(n, parts):
    table = rows(n, parts=tuple(f"part {i}" for i in range(parts)), accuracy_every=max(1, n // 50))
    changes = [(10 * i, "learning_rate 2e-05 → 1e-05") for i in range(n // 100)]
    begun = time.process_time()
    drawing = draw_svg(table, last_step=n, flags=FLAGS, changes=changes)
    assert time.process_time() - begun < 0.1
    assert len(drawing) < 10_000
    x = points(line(ET.fromstring(drawing), COLOURS[0])[0])[:, 0]
    assert x[-1] > 0.45 * WIDTH, "the last step is in it"


MANY = tuple(f"{name} {n}" for n in range(4) for name in LONG)


@pytest.mark.parametrize("parts", [(), LONG[:2], LONG, (*LONG, "e", "f", "g"), MANY[:8], MANY[:9], MANY])
def test_names_stay_out_of_titles_panels_and_each_other(parts):
    page = tree(rows(30, parts=parts, accuracy_every=5), last_step=30, flags=FLAGS)
    frames = [p.get("d") for p in page.iter(NS + "path") if p.get("stroke") == "#999"]
    tops = {int(re.match(r"M\d+ (\d+)V", d)[1]) for d in frames}
    assert len(tops) == 1  # both panels begin at one height
    boxes = []
    for legend in (g for g in page if (g.get("transform") or "").startswith("translate")):
        left, top = map(int, re.findall(r"\d+", legend.get("transform")))
        for entry in legend:
            x, y = map(int, re.findall(r"\d+", entry.get("transform")))
            end = left + x + 46 + 11 * len(entry.find(NS + "text").text)
            boxes.append((left + x + 46 * (len(entry) == 1), top + y, end))
    assert boxes
    names = [text for text in words(page) if text.endswith(" more")]
    assert len(boxes) == 3 + len(parts) or names == [f"and {len(parts) + 4 - len(boxes)} more"]
    for x, y, end in boxes:
        assert y - 22 >= 30 and y + 6 < tops.copy().pop() - 8, "under the title, over the panel"
        assert end <= WIDTH
        assert not [b for b in boxes if b[1] == y and b[0] < x < b[2]]
        assert end < 1010 or x > 900, "the reward's stays in its own half"


def test_steps_on_the_axis_are_whole_numbers():
    for last in (1, 2, 3, 7, 60, 3000):
        middle = [g for g in tree(rows(1), last_step=last).iter(NS + "g") if g.get("text-anchor") == "middle"]
        for group in middle:
            steps = [text.text for text in group]
            assert 2 <= len(steps) <= 9 and len(set(steps)) == len(steps)
            assert all(re.fullmatch(r"\d+", step) for step in steps)


def test_it_has_a_white_ground_on_which_every_word_can_be_read():
    page = tree(rows(30, accuracy_every=5), flags=FLAGS, changes=[(3, "x")])
    ground = page.find(NS + "rect")
    assert ground.get("fill") == "#fff" and (ground.get("width"), ground.get("height")) == (
        str(WIDTH),
        str(HEIGHT),
    )
    inks = {text.get("fill") for text in page.iter(NS + "text")} - {None} | {page.get("fill")}
    assert GREY in inks and RED in inks
    for ink in inks:
        whole = ink if len(ink) == 7 else "#" + "".join(2 * c for c in ink[1:])
        assert contrast(whole, "#ffffff") >= 4.4, ink


def test_rows_with_holes():
    holes = [
        {"step": 1, "reward": None, "reward_std": None, "reward/late": float("nan")},
        {"step": 2, "reward": 0.5, "reward_std": None, "reward/late": -0.5},
        {"step": 3, "reward": float("inf")},
    ]
    page = tree(holes, last_step=3)
    assert "late" in words(page) and len(points(line(page, COLOURS[0])[0])) == 1
    assert "waiting" not in draw_svg([]) and tree([]).find(NS + "rect") is not None


def test_what_a_reward_is_called_cannot_break_the_page():
    page = tree([{"step": 1, "reward": 1.0, "reward/<script>&": 1.0}])
    assert "<script>&" in words(page)
