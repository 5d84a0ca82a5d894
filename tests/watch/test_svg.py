"""The drawing of runs: what it shows, how long it is, and that its words stay apart and can be read."""

import math
import re
import time
import xml.etree.ElementTree as ET
from io import BytesIO
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from PIL import Image, ImageFont

from grpo_kit._support.display import COLOURS, GREY, RED
from grpo_kit.watch._flags import Flag
from grpo_kit.watch._run_state import RunState
from grpo_kit.watch._svg import HEIGHT, WIDTH, draw_svg
from grpo_kit.watch._svg_axes import INK, moving_mean, window_of
from grpo_kit.watch.chart import svg_to_png
from tests.made_metrics import rescaled, rows
from tests.support.test_display import contrast

FLAGS = [
    Flag("cut off", 3, "w", "w", "f"),
    Flag("KL spike", 3, "w", "w", "f"),
    Flag("x", 12, "w", "w", "f"),
]
CHANGES = [(6, "learning_rate 2e-05 → 1e-05"), (9, "beta 0 → <b>")]
LONG = (
    "language_consistency_of_thoughts",
    "soft <overlong> punishment",
    "tool use",
    "a_name_of_more_than_30_letters",
)
NS = "{http://www.w3.org/2000/svg}"


def state(table, flags=(), changes=()) -> RunState:
    run = RunState({}, list(flags), list(changes))
    run.add(table)
    return run


def tree(table, *, flags=(), changes=(), **options):
    return ET.fromstring(draw_svg({"": state(table, flags, changes)}, **options))


def words(page):
    return [text.text for text in page.iter(NS + "text")]


def panels(page) -> dict[str, ET.Element]:
    """The panels by their titles; by their legends where they have none."""
    found = {}
    for panel in (g for g in page if g.tag == NS + "g" and g.get("transform") is None):
        title = [text.text for text in panel if text.get("font-size") == "33"]
        found[", ".join(title or words(panel.find(NS + "g")))] = panel
    return found


def points(path):
    """Corners of a path of relative moves, as draw_svg writes them."""
    numbers = [int(n) for n in re.findall(r"-?\d+", path.get("d").replace("h0", ""))]
    return np.cumsum(np.array(numbers).reshape(-1, 2), axis=0)


def line(page, colour=COLOURS[0], *, width="4"):
    """The lines of a colour that are drawn, keys of a legend left out."""
    found = [
        p
        for p in page.iter(NS + "path")
        if p.get("stroke") == colour and p.get("stroke-width") == width
    ]
    return [p for p in found if p.get("d") != "M0-7h36"]


def marked(panel, colour) -> list[int]:
    return [
        int(x)
        for path in panel.iter(NS + "path")
        if path.get("stroke") == colour
        for x in re.findall(r"M(\d+)", path.get("d"))
    ]


TITLES = [
    "reward",
    "reward parts",
    "completion length, tokens",
    "cut off, groups without a signal",
    "entropy, nats a token",
    "gradient norm",
    "temperature",
    "learning rate",
]


def test_every_measure_has_its_panel_and_a_line_goes_through_its_values():
    table = rows(9)
    found = panels(tree(table, last_step=9))
    assert list(found) == TITLES
    reward = "reward", "reward", 0
    others = [("reward parts", "reward/exact", 0), ("gradient norm", "grad_norm", 0)]
    more = [("entropy, nats a token", "entropy", 0), ("temperature", "temperature", 0)]
    for title, name, n in (reward, *others, *more):
        x, y = points(line(found[title])[n]).T
        values = np.array([row[name] for row in table])
        assert np.allclose(np.diff(x), np.diff(x).mean(), atol=1)  # a step is a step
        # Heights are a straight function of the values, to half a pixel; up is less.
        slope, start = np.polyfit(values, y, 1)
        assert slope < 0 and np.abs(slope * values + start - y).max() <= 1
    with_kl = list(panels(tree(rows(60, kl=True))))
    assert len(with_kl) == 10 and {"KL to the reference", "cut off"} < set(with_kl)


def test_from_21_steps_on_the_line_is_the_moving_mean_but_a_schedule_stays_as_it_is():
    few, many = rows(20), rows(21)
    found = panels(tree(few))
    assert line(found[TITLES[0]], width="10"), "dots of its own colour on the line"
    found = panels(tree(many))
    reward = found["reward"]
    assert {"band: ± reward_std", "lines: means of 5 steps"} < set(words(reward))
    y = points(line(reward)[0])[:, 1]
    values = np.array([row["reward"] for row in many])
    smooth = np.array([values[max(0, i - 2) : i + 3].mean() for i in range(21)])
    assert abs(np.corrcoef(y, smooth)[0, 1]) > 0.9999 > abs(np.corrcoef(y, values)[0, 1])
    assert line(reward, width="7")[0].get("stroke-opacity") == ".5"
    schedule = [row | {"temperature": 1.0 if row["step"] < 11 else 0.5} for row in many]
    drawn = points(line(panels(tree(schedule))["temperature"])[0])[:, 1]
    assert len(set(drawn.tolist())) == 2 and not line(
        panels(tree(schedule))["temperature"], width="7"
    )


def test_a_moving_mean_is_the_one_of_pandas():
    values = np.random.default_rng(0).normal(size=75)
    for window in (1, 5, 7, 25):
        theirs = pd.Series(values).rolling(window, center=True, min_periods=1).mean()
        assert moving_mean(values, window) == pytest.approx(theirs.to_numpy())
    assert [window_of(values[:n]) for n in (20, 21, 75)] == [1, 5, 7]
    assert window_of(np.ones(75)) == 1  # a level line needs none


def test_no_spike_of_a_long_run_is_lost():
    table = rows(3000)
    table[1234]["grad_norm"] = 40.0
    norms = panels(tree(table))["gradient norm"]
    dots = points(line(norms, width="7")[0])
    assert dots[:, 1].min() < dots[:, 1].mean() - 50 and len(dots) <= 60
    place = dots[dots[:, 1].argmin(), 0]
    frame = re.match(r"M(\d+) \d+V\d+H(\d+)", norms.findall(NS + "path")[1].get("d"))
    left, right = map(int, frame.groups())
    assert place == pytest.approx(left + (right - left) * 1235 / 3030, abs=1)


def test_markers_stand_at_their_steps_in_every_panel_and_change_is_not_flag():
    page = tree(rows(20), last_step=20, flags=FLAGS, changes=CHANGES)
    assert [t for t in words(page) if t in ("1,2", "3")] == ["1,2", "3"]
    assert [t for t in words(page) if t in ("a", "b")] == ["a", "b"]
    for panel in panels(page).values():
        at = points(line(panel)[0])[:, 0]  # of steps 1, 2, ...
        assert marked(panel, RED) == [at[2], at[11]]
        assert marked(panel, GREY) == [at[5], at[8]]


def test_flags_and_changes_are_told_in_a_line_each_and_the_panels_keep_their_size():
    flags = [*FLAGS[:2], Flag("x", 9, "completions are the same, " * 14, "w", "f")]
    bare, page = tree(rows(20)), tree(rows(20), flags=flags, changes=CHANGES)
    told = [text for text in page.findall(NS + "text")]
    assert [text.text for text in told[:2]] == [
        "1  cut off since step 3: w",
        "2  KL spike since step 3: w",
    ]
    assert told[2].text.startswith("3  x since step 9: completions are")
    assert told[4].text.endswith(" …")
    assert all(right <= WIDTH for _, _, _, right, _ in boxes(page))
    assert told[5].text == "a  from step 6: learning_rate 2e-05 → 1e-05"
    assert [text.get("fill") for text in told] == [RED] * 5 + [INK] * 2
    heights = [int(one.get("viewBox").split()[3]) for one in (bare, page)]
    assert heights[1] - heights[0] == 6 * 44, "one line is there already"
    corners = [
        [p.find(NS + "path").get("d") for p in panels(one).values()] for one in (bare, page)
    ]
    assert corners[0] == corners[1]
    two = {
        "full": state(rows(20), flags=flags[:1]),
        "lora": state(rows(20), changes=CHANGES[:1]),
    }
    assert words(ET.fromstring(draw_svg(two)))[-2:] == [
        "1  cut off (full) since step 3: w",
        "a  from step 6 (lora): learning_rate 2e-05 → 1e-05",
    ]


def test_letters_have_9_pixels_where_it_is_560_wide():
    """What JupyterLab leaves it on a page of 1,024; tests/browser measures them there."""
    page = tree(rows(30, accuracy_every=5, kl=True), flags=FLAGS, changes=CHANGES)
    sizes = [float(e.get("font-size")) for e in page.iter() if e.get("font-size")]
    assert min(sizes) * 560 / WIDTH >= 9


def test_it_is_as_wide_as_what_it_stands_in():
    """JupyterLab's <img> takes a width in pixels for its own, and cuts it off on a narrower page."""
    page = tree(rows(3))
    assert page.get("width") == "100%" and page.get("height") is None
    assert f"max-width:{WIDTH // 2}px" in page.get("style")


def test_while_it_trains_the_last_changes_have_one_line_and_the_height_stays():
    page = tree(rows(20), flags=FLAGS, changes=CHANGES, full=False)
    assert (
        words(page)[-1]
        == "a from step 6: learning_rate 2e-05 → 1e-05 · b from step 9: beta 0 → <b>"
    )
    assert page.get("viewBox") == tree([], full=False).get("viewBox") == f"0 0 {WIDTH} {HEIGHT}"
    many = [(n, f"learning_rate {n}e-05 → {n + 1}e-05") for n in range(1, 30)]
    page = tree(rows(30), changes=many, full=False)
    assert words(page)[-1].endswith("29e-05 → 30e-05") and len(words(page)[-1]) < 160


@pytest.mark.parametrize("interval", [True, False])
def test_held_out_accuracy_is_points_with_whiskers(interval):
    table = rows(10, accuracy_every=5)
    if not interval:
        table = [
            {k: v for k, v in row.items() if k[-4:] not in ("_low", "high")} for row in table
        ]
    page = tree(table, last_step=10)
    bars, dots = [
        p
        for p in page.iter(NS + "path")
        if p.get("stroke") == INK and p.get("stroke-opacity") is None
    ]
    middles = points(dots)
    assert "held-out accuracy" in words(page) and np.diff(middles[:, 0])[0] > 0
    spans = re.findall(r"M\d+ (\d+)V(\d+)", bars.get("d"))
    assert len(spans) == 2 * interval
    for middle, (low, high) in zip(middles, spans, strict=False):
        assert int(high) < middle[1] < int(low)
    frame = panels(page)["held-out accuracy"].findall(NS + "path")[1].get("d")
    top, bottom = map(int, re.match(r"M\d+ (\d+)V(\d+)", frame).groups())
    room = 0.03 / 1.06 * (bottom - top)
    of_axis = (bottom - room - middles[:, 1]) / (bottom - top - 2 * room)
    assert of_axis == pytest.approx([0.4, 0.7], abs=0.01), "on an axis of its own, from 0 to 1"
    assert "held-out accuracy" not in words(tree(rows(10)))


@pytest.mark.parametrize(
    "scale", [dict(times=2, plus=-1), dict(times=64, plus=0), dict(times=4, plus=-4)]
)
@pytest.mark.parametrize("n", [12, 60])
def test_a_reward_of_another_scale_fills_the_panel_as_one_in_0_and_1_does(scale, n):
    """Lines, bands and held-out accuracy lie where they lay; the numbers on the axis are the reward's own."""
    made = rows(n, accuracy_every=4)
    before, after = tree(made, last_step=n), tree(rescaled(made, **scale), last_step=n)
    drawn = [
        [
            p.get("d")
            for p in page.iter(NS + "path")
            if p.get("stroke-opacity") != ".25" and p.get("d") != "M0-7h36"
        ]
        for page in (before, after)
    ]
    assert len(drawn[0]) > 12 and drawn[0] == drawn[1]
    high = scale["plus"] + scale["times"]
    assert "held-out accuracy" in words(after)
    assert {"20" if high > 20 else f"{high - 1:g}"} <= set(words(after))


@pytest.mark.parametrize(
    "scale",
    [
        dict(times=2, plus=-1),
        dict(times=64, plus=0),
        dict(times=4, plus=-4),
        dict(times=0.1, plus=0),
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_accuracy_is_on_no_axis_of_a_reward(scale, several):
    """Whatever rewards lie between, and whoever is beside it: its panel reads 0 to 1, the reward's has no points."""
    made = rescaled(rows(12, accuracy_every=3), **scale)
    runs = (
        {"a": state(made), "b": state(rows(12, accuracy_every=4))}
        if several
        else {"": state(made)}
    )
    found = panels(ET.fromstring(draw_svg(runs)))
    accuracy = found["held-out accuracy"]
    ticks = [text.text for text in accuracy.findall(NS + "g")[0].iter(NS + "text")]
    assert ticks[0] == "0" and ticks[-2:] == ["1", "step"]
    dots = [p for p in accuracy.iter(NS + "path") if p.get("stroke-width") == "12"]
    assert len(dots) == len(runs)
    others = [
        p
        for title, panel in found.items()
        if title != "held-out accuracy"
        for p in panel.iter(NS + "path")
    ]
    assert not [p for p in others if p.get("stroke-width") == "12"]


def test_rewards_below_zero_and_above_one_are_in_the_picture():
    table = [
        row | {"reward": reward}
        for row, reward in zip(rows(5), (-0.5, 0, 1, 1.5, 2), strict=True)
    ]
    panel = next(iter(panels(tree(table)).values()))
    top, bottom = map(
        int, re.match(r"M\d+ (\d+)V(\d+)", panel.findall(NS + "path")[1].get("d")).groups()
    )
    y = points(line(panel)[0])[:, 1]
    assert top < y.min() and y.max() < bottom


@pytest.mark.parametrize("n, parts", [(3, 0), (300, 3), (5000, 3), (5000, 8)])
def test_it_is_short_and_quick_however_long_the_run_is(n, parts):
    table = rows(
        n,
        parts=tuple(f"part {i}" for i in range(parts)),
        accuracy_every=max(1, n // 50),
        kl=True,
    )
    changes = [(10 * i, "learning_rate 2e-05 → 1e-05") for i in range(n // 100)]
    run = state(table, FLAGS, changes)
    begun = time.process_time()
    drawing = draw_svg({"": run}, last_step=n, full=False)
    assert time.process_time() - begun < 0.2
    assert len(drawing) < 25_000
    x = points(line(ET.fromstring(drawing))[0])[:, 0]
    assert x[-1] > 0.4 * WIDTH, "the last step is in it"


FONT = {
    size: ImageFont.truetype(
        Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size
    )
    for size in (31, 33)
}


def boxes(page) -> list[tuple[str, float, float, float, float]]:
    """(text, left, top, right, bottom) of all words, in the widest font that a page may choose."""
    found = []

    def walk(element, x, y, anchor):
        moved = re.match(r"translate\((-?\d+) (-?\d+)\)", element.get("transform") or "")
        x, y = (x + int(moved[1]), y + int(moved[2])) if moved else (x, y)
        anchor = element.get("text-anchor", anchor)
        if element.tag == NS + "text":
            size = int(element.get("font-size", 31))
            wide = FONT[size].getlength(element.text)
            left = (
                x
                + float(element.get("x", 0))
                - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
            )
            bottom = y + float(element.get("y", 0))
            found.append(
                (element.text, left, bottom - 0.75 * size, left + wide, bottom + 0.2 * size)
            )
        for inside in element:
            walk(inside, x, y, anchor)

    walk(page, 0, 0, "start")
    return found


MANY = tuple(f"{name} {n}" for n in range(4) for name in LONG)


@pytest.mark.parametrize(
    "parts", [(), LONG[:2], LONG, (*LONG, "e", "f", "g"), MANY[:8], MANY[:9], MANY]
)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kl", [False, True])
def test_no_word_covers_another_or_a_panel(parts, several, kl):
    run = state(rows(30, parts=parts, accuracy_every=5, kl=kl), [*FLAGS], CHANGES)
    page = ET.fromstring(
        draw_svg({"full": run, "lora": run} if several else {"": run}, last_step=30)
    )
    height = int(page.get("viewBox").split()[3])
    found = boxes(page)
    names = [
        "exact",
        "format",
        *(name if len(name) <= 30 else name[:29] + "…" for name in parts),
    ]
    shown = [text for text, *_ in found if text in names]
    left_out = [text for text, *_ in found if re.fullmatch(r"and \d+ more", text)]
    assert len(shown) == len(names) or left_out == [f"and {len(names) - len(shown)} more"]
    assert several == any(text == "lora" for text, *_ in found)
    for n, (text, left, top, right, bottom) in enumerate(found):
        assert 0 <= left and right <= WIDTH and 0 <= top and bottom <= height, text
        for other, *box in found[:n]:
            apart = right <= box[0] or box[2] <= left or bottom <= box[1] or box[3] <= top
            assert apart, (text, other)
    for corner in [p.get("d") for p in page.iter(NS + "path") if p.get("stroke") == "#999"]:
        x, y, low, end = map(int, re.match(r"M(\d+) (\d+)V(\d+)H(\d+)", corner).groups())
        inside = {text for text, a, b, c, d in found if a < end and c > x and b < low and d > y}
        assert inside <= {"a,b", "a", "b", "a,c", "b,d"}, (
            "letters of changes stand at the foot of their lines"
        )


def test_steps_on_the_axis_are_whole_numbers():
    for last in (1, 2, 3, 7, 60, 3000):
        middle = [
            g
            for g in tree(rows(1), last_step=last).iter(NS + "g")
            if g.get("text-anchor") == "middle"
        ]
        assert len(middle) == 8
        for group in middle:
            steps = [text.text for text in group]
            assert 2 <= len(steps) <= 9 and len(set(steps)) == len(steps)
            assert all(re.fullmatch(r"\d+", step) for step in steps)


def test_runs_are_named_above_their_panels_with_their_colours():
    run = state(rows(3))
    for names in (("full",), ("full", "lora")):
        page = ET.fromstring(draw_svg(dict.fromkeys(names, run)))
        legend = next(g for g in page if g.get("transform"))
        assert words(legend) == list(names)
        keys = [path.get("stroke") for path in legend.iter(NS + "path")]
        assert keys == ([] if len(names) == 1 else list(COLOURS[:2]))
    assert not [g for g in tree(rows(3)) if g.get("transform")], "the live chart's"


@pytest.mark.parametrize("full", [True, False])
def test_it_has_no_ground_and_its_words_can_be_read_on_white_and_on_dark(full):
    """In a page the page's colour; in a file a grey. Nothing is black or white."""
    page = tree(rows(30, accuracy_every=5), flags=FLAGS, changes=[(3, "x")], full=full)
    assert page.find(NS + "rect") is None and page.get("fill") == INK == "currentColor"
    assert page.get("color") == (GREY if full else None)
    inks = {each.get(what) for each in page.iter() for what in ("fill", "stroke", "color")}
    assert RED in inks and not inks & {"#000", "#111", "#fff", "#000000"}
    for ink in {text.get("fill") for text in page.iter(NS + "text")} - {None, INK} | {GREY}:
        assert contrast(ink, "#ffffff") >= 4.5 and contrast(ink, "#111111") >= 4.1, ink


def test_a_png_of_it_has_no_ground_and_grey_words():
    made = Image.open(BytesIO(svg_to_png(draw_svg({"": state(rows(5))})))).convert("RGBA")
    pixels = np.asarray(made).reshape(-1, 4)
    assert (pixels[:, 3] == 0).mean() > 0.7
    whole = {tuple(pixel[:3]) for pixel in pixels[pixels[:, 3] > 250]}
    assert not {pixel for pixel in whole if max(pixel) < 60}, "no black"


def test_rows_with_holes():
    holes = [
        {"step": 1, "reward": None, "reward_std": None, "reward/late": float("nan")},
        {"step": 2, "reward": 0.5, "reward_std": None, "reward/late": -0.5},
        {"step": 3, "reward": float("inf")},
    ]
    page = tree(holes, last_step=3)
    assert "late" in words(page) and len(points(line(page)[0])) == 1
    assert len(panels(tree([]))) == len(TITLES)


def test_a_gradient_that_is_infinite_leaves_the_rest_of_its_line():
    table = rows(20)
    table[4]["grad_norm"] = math.inf
    assert len(points(line(panels(tree(table))["gradient norm"])[0])) == 19


def test_what_a_reward_or_a_run_is_called_cannot_break_the_page():
    made = draw_svg({"<b>&": state([{"step": 1, "reward": 1.0, "reward/<script>&": 1.0}])})
    assert {"<script>&", "<b>&"} <= set(words(ET.fromstring(made)))
