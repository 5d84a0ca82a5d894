"""Games of textarena: their own numbers whatever else is played, the caller's left alone; errors by name."""

import random
import sys
import types
from dataclasses import replace

import pytest

from examples.textarena_games import from_textarena, guess_the_number
from grpo_kit.more.episodes.environment import EpisodeError, VectorEnv

# ---- the real package -----------------------------------------------------------------------------------------------


@pytest.fixture
def real():
    pytest.importorskip("textarena")  # no extra of the kit's


MOVES = {
    "GuessTheNumber-v0": [str(n) for n in range(1, 21)],
    "Mastermind-v0": ["1 2 3 4", "2 1 5 6", "6 5 4 3", "3 4 1 2", "1 1 1 1"],
    "TowerOfHanoi-v0": ["A C", "A B", "C B", "B C", "B A"],
    "FrozenLake-v0-random": ["up", "down", "left", "right"],
    "Bandit-v0": ["red", "blue", "green", "yellow", "purple"],
    "Blackjack-v0": ["hit", "stand"],
    "2048-v0-3x3": ["Up", "Down", "Left", "Right"],
    "Secretary-v0": ["continue", "continue", "continue", "accept"],
}
DRAW_AS_THEY_GO = {"Bandit-v0", "Blackjack-v0", "2048-v0-3x3"}


def moves_of(name, seed):
    rng = random.Random(f"{name} {seed}")
    return lambda: rng.choice([*MOVES[name], "hm"]) if rng.random() < 0.9 else "hm"


def alone(game, name, seed, turns=12):
    """(observation, reward, done, invalid) of every move."""
    move, told = moves_of(name, seed), [game.reset({"seed": seed})]
    for _ in range(turns):
        told.append((*game.step(move()), game.invalid))
        if told[-1][2]:
            break
    return told


@pytest.mark.parametrize("name", MOVES)
def test_games_side_by_side_go_as_they_go_alone(name, real):
    make = from_textarena(name)
    wanted = [alone(make(), name, seed) for seed in range(6)]
    assert len({str(told) for told in wanted}) > 1
    game = make()
    # an object used again
    assert [alone(game, name, seed) for seed in reversed(range(6))][::-1] == wanted
    random.seed(11)
    games, moves = [make() for _ in range(6)], [moves_of(name, seed) for seed in range(6)]
    told = [[game.reset({"seed": seed})] for seed, game in enumerate(games)]
    living, mine = set(range(6)), []
    for _ in range(12):
        for i in sorted(living):
            mine.append(random.random())  # somebody else draws too
            told[i].append((*games[i].step(moves[i]()), games[i].invalid))
            if told[i][-1][2]:
                living.discard(i)
    assert told == wanted
    caller = random.Random(11)
    assert mine == [caller.random() for _ in mine]


def test_the_game_draws_from_the_generator_that_is_kept_for_it(real):
    """Else the test above shows nothing: by itself each of these draws from Python's own between two moves."""
    import textarena

    for name in DRAW_AS_THEY_GO:
        game = textarena.make(name)
        game.reset(num_players=1, seed=3)
        before = random.getstate()
        game.step(MOVES[name][0])
        assert random.getstate() != before, name


def test_threads_make_no_difference(real):
    rows = [{"seed": seed} for seed in range(8)]
    found = []
    for seconds in (None, 60.0):
        world = VectorEnv(from_textarena("2048-v0-3x3"), seconds=seconds)
        told = [world.reset(rows)]
        for turn in range(1, 4):
            told.append(
                [
                    tuple(o)
                    for o in world.step(
                        dict.fromkeys(range(8), MOVES["2048-v0-3x3"][turn]), turn
                    ).values()
                ]
            )
        found.append(told)
    assert found[0] == found[1]


def test_a_number_is_guessed_by_hand(real):
    """The number is the first that Python's generator draws from the seed; the rest is on its label."""
    number = random.Random(3).randint(1, 20)
    assert 2 < number < 20
    game = from_textarena("GuessTheNumber-v0")()
    first = game.reset({"question": "Guess.", "seed": 3})
    assert first.startswith(
        "You are Player 0. You are playing Guess The Number."
    ) and first.endswith("Enter your guess.")
    assert game.step("1") == ("The target number is higher.", 0.0, False) and not game.invalid
    assert game.step("[20]\n") == ("The target number is lower.", 0.0, False)
    told, reward, done = game.step("what?")
    assert "invalid move" in told and (reward, done, game.invalid) == (0.0, False, True)
    assert "Player 0" not in game.step(f"I say [{number - 1}]")[0] and not game.invalid
    told, reward, done = game.step(str(number))
    assert (reward, done) == (1.0, True) and "You guessed the correct number" in told


def test_raw_variants_put_no_brackets_around_moves(real):
    game = from_textarena("GuessTheNumber-v0-raw")()
    game.reset({"seed": 5})
    game.step("4")
    assert game.invalid
    game.step("[4]")
    assert not game.invalid


def test_the_tower_is_moved_by_hand(real):
    game = from_textarena("TowerOfHanoi-v0")()
    assert "A: [3, 2, 1]" in game.reset({"seed": 0})
    for move in ("A C", "A B", "C B", "A C", "B A", "B C"):
        told, reward, done = game.step(move)
        assert (reward, done, game.invalid) == (0.0, False, False) and told.count(
            "Current Board"
        ) == 1
    assert game.step("A C")[1:] == (1.0, True)


def test_rewards_lie_between_0_and_1(real):
    game = from_textarena("Bandit-v0")()  # pays -1 for a second invalid move
    game.reset({"seed": 0})
    assert game.step("mauve")[1:] == (0.0, False) and game.invalid
    told, reward, done = game.step("mauve")
    assert (reward, done, game.invalid) == (0.0, True, True) and "Invalid Move" in told
    for highest, wanted in ((1.0, 1.0), (20.0, 2 / 20)):
        game = from_textarena("Set-v0", highest=highest)()
        assert sets(game, seed=1, found=2) == wanted
    game = from_textarena("ThreeCardMonte-v0")()  # gives its reason in the reward's place
    game.reset({"seed": 0})
    assert [game.step("left")[1:] for _ in range(2)] == [(0.0, False), (0.0, True)]


def sets(game, seed, found):
    """The reward of twenty turns with so many sets, all others wasted."""
    seen = game.reset({"seed": seed})
    for turn in range(20):
        cards = board(seen)
        good = [
            (i, j, k)
            for i in range(len(cards)) for j in range(i) for k in range(j)
            if all(len({cards[n][trait] for n in (i, j, k)}) != 2 for trait in range(4))
        ]  # fmt: skip
        bad = next(
            t for t in ((0, 1, 2), (0, 1, 3)) if tuple(sorted(t, reverse=True)) not in good
        )
        chosen = good[0] if turn < found else bad
        told, reward, done = game.step("[" + ", ".join(str(n + 1) for n in chosen) + "]")
        seen = told if "BOARD" in told else seen
    assert done
    return reward


def board(seen):
    lines = seen.rpartition("BOARD")[2].splitlines()
    return [
        line.rsplit(None, 4)[-4:]
        for line in lines
        if line.strip() and line.strip()[0].isdigit()
    ]


def test_a_task_of_games_is_played_like_any_other(real):
    def halving(row, rng):
        low, high = 1, 20

        def respond(seen):
            nonlocal low, high
            if "higher" in seen.splitlines()[-1]:
                low = respond.said + 1
            elif "lower" in seen.splitlines()[-1]:
                high = respond.said - 1
            respond.said = (low + high) // 2
            return str(respond.said)

        return respond

    task = replace(guess_the_number(20, 20, max_turns=5), optimum=halving)
    assert task.score(task.optimum) == 1.0 and task.best_constant()[1] < 0.5


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("Nim-v0", {}, "name='Nim-v0' is no game for one player"),
        ("Golf-v0", {}, "name='Golf-v0' is no game for one player: Golf supports 2-4 players"),
        ("PublicGoodsGame-v0", {}, "name='PublicGoodsGame-v0' is no game for one player"),
        ("QuantumTicTacToe-v0", {}, "name='QuantumTicTacToe-v0' is no game for one player"),
        (
            "Wordel-v0",
            {},
            "name='Wordel-v0' is no game of textarena; the nearest are Wordle-v0",
        ),
        ("TowerOfHanoi-v0", {"disks": 4}, "options={'disks': 4} do not fit 'TowerOfHanoi-v0'"),
        ("TowerOfHanoi-v0", {"highest": 0}, "highest=0 must be a number above 0"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(name, options, said, real):
    before = random.getstate()
    with pytest.raises(ValueError, match=said):
        from_textarena(name, **options)
    assert random.getstate() == before


def test_options_reach_the_game(real):
    assert "with 4 disks" in from_textarena("TowerOfHanoi-v0", num_disks=4)().reset({"seed": 0})


# ---- without the package: a game that goes wrong, in textarena's shape -------------------------------------------


class Wrong:
    """Draws from Python's generator in everything it does, and breaks at the move "break"."""

    def __init__(self, size=1):
        self.size = size + random.random()

    def reset(self, num_players, seed=None):
        assert num_players == 1, "The number of players has to be 2"
        random.seed(seed)
        self.state = SinglePlayerState(f"Your number is {random.random()}.")

    def step(self, action):
        random.random()
        if action == "break":
            raise ZeroDivisionError("division by zero")
        return False, {}

    def get_observation(self):
        return 0, self.state.take()


class SinglePlayerState:
    def __init__(self, text):
        self.messages, self.error_count = [(-1, text, types.SimpleNamespace(name="PROMPT"))], 0
        self.game_info = {0: {"invalid_move": False}}

    def take(self):
        taken, self.messages = self.messages, []
        return taken


@pytest.fixture
def stand_in(monkeypatch):
    module = types.ModuleType("textarena")
    known = {"Wrong-v0": Wrong}
    module.envs = types.SimpleNamespace(registration=types.SimpleNamespace(ENV_REGISTRY=known))
    module.make = lambda name, **options: known[name](**options)
    module.SinglePlayerState = SinglePlayerState
    monkeypatch.setitem(sys.modules, "textarena", module)


def test_an_exception_leaves_the_callers_numbers_alone_and_the_others_can_move(stand_in):
    random.seed(2)
    before = random.getstate()
    world = VectorEnv(from_textarena("Wrong-v0"))
    world.reset([{"question": "one", "seed": 1}, {"question": "two", "seed": 2}])
    assert world.step({0: "go", 1: "go"}, 1)[0].observation == "Go on."
    with pytest.raises(EpisodeError, match="row 'two' .*, turn 2: ZeroDivisionError"):
        world.step({1: "break"}, 2)
    assert random.getstate() == before
    assert world.step({0: "go"}, 3)[0].reward == 0.0
    assert world.reset([{"question": "one", "seed": 1}]) == [
        f"Your number is {random.Random(1).random()}."
    ]
    assert random.getstate() == before


@pytest.mark.parametrize("seed", [None, "3", 1.0, True, -1])
def test_a_row_without_a_seed_is_refused_by_name(seed, stand_in):
    game = from_textarena("Wrong-v0")()
    with pytest.raises(
        ValueError, match=f"a row for 'Wrong-v0': seed={seed!r} must be a whole number"
    ):
        game.reset({"question": "one"} if seed is None else {"question": "one", "seed": seed})


def test_unknown_names_and_options_are_refused(stand_in):
    with pytest.raises(
        ValueError, match="name='Wrong-v1' is no game of textarena; the nearest are Wrong-v0"
    ):
        from_textarena("Wrong-v1")
    with pytest.raises(ValueError, match="options={'length': 3} do not fit 'Wrong-v0'"):
        from_textarena("Wrong-v0", length=3)


def test_what_to_install_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ImportError, match='pip install "textarena>=0.7.4,<0.8"'):
        from_textarena("GuessTheNumber-v0")
