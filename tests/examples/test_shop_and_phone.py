"""The shop and the phone: solved by whoever reads, by nobody who does not; what cannot be read costs a turn only."""

import copy
import random

import pytest

from examples.phone import MENUS, Phone, phone
from examples.shop import Shop, shop
from grpo_kit.more.episodes import worked
from grpo_kit.more.episodes.environment import row_key

# with the fewest turns that are always enough
WORLDS = {"shop": (shop, Shop, 5), "phone": (phone, Phone, 3)}
# The most that a policy may score that reads no reply, on 64 rows: every place, and every way, is right equally often.
BLIND = {"shop": (1 / 4, 0.06), "phone": (1 / 64, 0.02)}

CUP = {
    "question": "Buy a small red cup.",
    "kind": "cup",
    "colour": "red",
    "size": "small",
    "shelves": {
        "cup": [["red", "large"], ["blue", "small"], ["red", "small"], ["blue", "large"]],
        "hat": [["red", "small"], ["blue", "small"], ["red", "large"], ["blue", "large"]],
    },
}
SHELF = "1 red cup, 2 blue cup, 3 red cup, 4 blue cup. You can: open N, search KIND."


@pytest.fixture(scope="module", params=WORLDS)
def world(request):
    make, environment, turns = WORLDS[request.param]
    return make(), environment, turns


def plain(screens):
    """A phone whose buttons stand as MENUS has them, but for some screens."""
    all_ = {"Home": list(MENUS)} | {app: list(menus) for app, menus in MENUS.items()}
    all_ |= {
        name: list(switches) for menus in MENUS.values() for name, switches in menus.items()
    }
    path = ["Settings", "Sound", "Mute"]
    return {
        "question": "In Settings, under Sound, turn on Mute.",
        "path": path,
        "screens": {**all_, **screens},
    }


def played(environment, row, texts):
    environment.reset(copy.deepcopy(row))
    return [environment.step(text) for text in texts]


# ---- by hand --------------------------------------------------------------------------------------------------------


def test_a_visit_to_the_shop_by_hand():
    game = Shop()
    assert game.reset(CUP) == "The shop has: cup, hat. You can: search KIND."
    large = "The red cup is large. You can: buy, back, search KIND."
    small = "The red cup is small. You can: buy, back, search KIND."
    assert [game.step(text) for text in ("search cup", "open 1", " Back.", "open 3", "buy")] == [
        (SHELF, 0.0, False), (large, 0.0, False), (SHELF, 0.0, False), (small, 0.0, False), ("Right.", 1.0, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "texts, why",
    [
        (["search cup", "open 1", "buy"], "the wrong size"),
        (["search cup", "open 2", "buy"], "the wrong colour"),
        (["search hat", "open 1", "buy"], "the wrong kind"),
    ],
)
def test_a_wrong_thing_bought_ends_it_without_reward(texts, why):
    assert played(Shop(), CUP, texts)[-1] == ("Wrong.", 0.0, True), why


def test_taps_by_hand():
    row = plain(
        {
            "Home": ["Clock", "Settings", "Mail", "Camera"],
            "Sound": ["Chime", "Mute", "Vibrate", "Zoom"],
        }
    )
    game = Phone()
    home = "Home: 1 Clock, 2 Settings, 3 Mail, 4 Camera. You can: tap N."
    assert game.reset(row) == home
    assert (
        game.step("tap 1")[0]
        == "Clock: 1 Alarm, 2 Stopwatch, 3 World, 4 Look. You can: tap N, back."
    )
    assert game.step("back") == (home, 0.0, False)
    settings = game.step("Tap 2.")[0]
    assert (
        settings == "Settings: 1 Sound, 2 Screen, 3 Battery, 4 Network. You can: tap N, back."
    )
    assert (
        game.step("tap 1")[0]
        == "Sound: 1 Chime, 2 Mute, 3 Vibrate, 4 Zoom. You can: tap N, back."
    )
    assert game.step("back")[0] == settings
    assert [game.step(text) for text in ("tap 1", "tap 2")][1] == ("Mute is on.", 1.0, True)
    assert played(game, row, ["tap 2", "tap 1", "tap 3"])[-1] == ("Vibrate is on.", 0.0, True)


def test_names_on_the_phone_mean_one_button_each():
    names = [
        n
        for app, menus in MENUS.items()
        for n in (app, *menus, *(s for four in menus.values() for s in four))
    ]
    assert len(names) == len(set(names)) == 84


# ---- who scores what ------------------------------------------------------------------------------------------------


def test_the_optimum_is_right_on_every_row(world):
    task, _, turns = world
    assert task.score(task.optimum) == task.score(task.optimum, task.train) == 1.0
    short = WORLDS[task.name][0](64, 64, max_turns=turns, seed=3)
    assert short.score(short.optimum) == short.score(short.optimum, short.train) == 1.0


def test_whoever_reads_no_reply_scores_no_more_than_said(world):
    task, _, _ = world
    blind = task.blind()
    chance = blind.pop("random")
    (best,) = blind.values()
    most, most_by_chance = BLIND[task.name]
    assert 0 < best <= most and 0 < chance <= most_by_chance


def test_who_does_not_look_at_sizes_is_right_half_the_time():
    def first_of_the_colour(row, rng):
        def respond(seen):
            if " is " in seen:
                return "buy"
            named = [part.split(". ")[0] for part in seen.split(", ")]
            numbers = [
                part[0] for part in named if part[1:] == f" {row['colour']} {row['kind']}"
            ]
            return f"open {numbers[0]}" if numbers else f"search {row['kind']}"

        return respond

    task = shop()
    assert 0.4 <= task.score(first_of_the_colour, task.train) <= 0.6


def test_the_ways_on_the_phone_are_all_right_equally_often():
    for rows in (phone().held_out, phone().train):
        ways = [
            tuple(
                row["screens"][at].index(name)
                for at, name in zip(["Home", *row["path"]], row["path"], strict=False)
            )
            for row in rows
        ]
        assert len(set(ways)) == 64 and all(
            ways.count(way) == len(rows) // 64 for way in set(ways)
        )


# ---- rows -----------------------------------------------------------------------------------------------------------


def layout(row):
    """Goal and what is seen on the way to it."""
    if "path" in row:
        return row["question"], str(
            [row["screens"][name] for name in ("Home", *row["path"][:2])]
        )
    return row["question"], str(row["shelves"][row["kind"]])


def test_no_row_is_in_both_splits_nor_twice(world):
    task, _, _ = world
    rows = task.train + task.held_out
    assert (len(task.train), len(task.held_out)) == (256, 64)
    assert (
        len({row_key(row) for row in rows}) == len({layout(row) for row in rows}) == len(rows)
    )


def test_worked_episodes_are_of_no_row_and_end_well(world):
    task, environment, _ = world
    assert len(task.view.examples) == 3
    seen = {
        (row["question"], str(worked(environment(), task.optimum, row)))
        for row in task.train + task.held_out
    }
    for goal, turns in task.view.examples:
        assert (goal, str(turns)) not in seen
        assert goal.startswith("Buy" if task.name == "shop" else "In ")
    if task.name == "shop":
        said = [[response for _, response in turns] for _, turns in task.view.examples]
        assert ["back" in one for one in said] == [True, False, True]
        assert all(one[-1] == "buy" for one in said)


def test_everything_comes_out_of_the_seed_and_the_row(world):
    task, environment, _ = world
    make = WORLDS[task.name][0]
    again, other = make(), make(seed=1)
    assert (again.train, again.held_out, again.view) == (task.train, task.held_out, task.view)
    assert other.held_out != task.held_out
    row = task.held_out[5]
    before = copy.deepcopy(row)
    game = environment()
    texts = [random.Random(k).choice(environment.actions[1:]) for k in range(30)]
    first = played(game, row, texts[:2])
    assert played(game, row, texts[:2]) == first == played(environment(), row, texts[:2])
    game.reset(row)
    for text in texts:
        game.step(text)
    assert row == before


def test_every_observation_ends_in_what_can_be_done(world):
    task, environment, _ = world
    for row in task.held_out[:16]:
        turns = worked(environment(), task.optimum, row)
        assert all(". You can: " in seen and seen.endswith(".") for seen, _ in turns)


# ---- what cannot be read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, done, texts",
    [
        (
            "shop",
            [],
            [
                "",
                "search",
                "search sofa",
                "open 1",
                "back",
                "buy",
                "hello there",
                "search cup and hat",
            ],
        ),
        (
            "shop",
            ["search cup"],
            ["open", "open 0", "open 5", "open 1 2", "open one", "back", "buy", "buy 1"],
        ),
        ("shop", ["search cup", "open 3"], ["open 1", "buy it", "back 1", "I buy it"]),
        (
            "phone",
            [],
            ["", "back", "tap", "tap 0", "tap 5", "tap 1 2", "tap Mail", "1", "please tap 1"],
        ),
        ("phone", ["tap 1"], ["back back", "go back", "tap 12"]),
    ],
)
def test_what_cannot_be_done_is_invalid_and_loses_nothing(name, done, texts):
    _, environment, _ = WORLDS[name]
    row = CUP if name == "shop" else plain({})
    way = {"shop": ["search cup", "open 3", "buy"], "phone": ["tap 1", "tap 1", "tap 4"]}[name]
    for text in texts:
        game = environment()
        seen = game.reset(row)
        for one in done:
            seen, _, _ = game.step(one)
            assert not game.invalid
        told, reward, over = game.step(text)
        assert (reward, over, game.invalid) == (0.0, False, True), text
        assert told.startswith("That cannot be done here. ") and told.endswith(
            seen.partition("You can")[2]
        ), text
        game.invalid = False
        assert [game.step(one) for one in way[len(done) :]][-1][1:] == (
            1.0,
            True,
        ) and not game.invalid


@pytest.mark.parametrize(
    "make, options, said",
    [
        (
            shop,
            {"max_turns": 4},
            "max_turns=4 leaves no turns to go back and buy; give at least 5",
        ),
        (shop, {"max_turns": 5.0}, "max_turns=5.0 leaves"),
        (
            phone,
            {"max_turns": 2},
            "max_turns=2 leaves no turns for three taps; give at least 3",
        ),
        (shop, {"n_train": 0}, "task 'shop': train is empty; give at least one row"),
        (phone, {"n_held_out": 0}, "task 'phone': held_out is empty"),
    ],
)
def test_what_fits_no_task_is_refused_by_name(make, options, said):
    with pytest.raises(ValueError, match=said):
        make(**options)
