"""Episodes are browsed as conversations: whole, in order, every text harmless."""

import asyncio
import re
from html import unescape

import pandas as pd
import pytest

from grpo_kit.more.episodes._conversations import Conversations, conversation
from grpo_kit.record._run_folder import alone
from grpo_kit.watch import _follow as follow
from grpo_kit.watch import browse as module
from grpo_kit.watch._completions import completions_page, pages_of
from grpo_kit.watch.browse import ALL, CompletionBrowser, browse, select
from tests.made_metrics import Recorded

END = "<|im_end|>"


def episode(
    number,
    *,
    group=0,
    reward=1.0,
    words=("go",),
    invalid=(),
    cut=(),
    done=True,
    step=1,
    advantage=0.5,
):
    """Rows of one episode: a turn a word; the world answers "saw <word>", and pays in the last turn."""
    rows, goal = [], f"Goal: door {group}"
    for turn, word in enumerate(words, start=1):
        seen = f"start {number}" if turn == 1 else f"saw {words[turn - 2]}"
        asked = f"<|im_start|>user\n{goal}\n{seen}{END}\n<|im_start|>assistant\n"
        last = turn == len(words)
        rows.append(
            {
                "step": step, "group": group, "prompt": f"<|im_start|>system\nAn example.{END}\n{asked}", "prefill": "",
                "completion": word, "answer": None, "tokens": [word] if turn in cut else [word, END],
                "logprobs": [-0.1] if turn in cut else [-0.1, -7.0], "reward/episode_return": reward,
                "reward": reward, "advantage": advantage if isinstance(advantage, float) else advantage[turn - 1],
                "temperature": 1.0, "episode": number, "turn": turn, "observation": seen, "result": f"saw {word}",
                "turn_reward": reward if last else 0.0, "invalid": turn in invalid, "done": done and last,
            }
        )  # fmt: skip
    return rows


def write(run, *episodes):
    rows = [row for rows in episodes for row in rows]
    run.write_completions({name: [row[name] for row in rows] for name in rows[0]})


def text_of(html):
    html = re.sub("<style>.*?</style>", "", html)
    lines = re.sub("</?(?:div|summary|details)[^>]*>", " ", html)
    return " ".join(unescape(re.sub("<[^>]*>", "", lines)).split())


def shown(page):
    """The episodes of a page, in its order."""
    return [int(n) for n in re.findall(r"episode (\d+)<", page)]


@pytest.fixture
def run(tmp_path):
    run = Recorded(tmp_path / "run")
    write(
        run,
        episode(0, reward=0.25, words=("left", "up"), invalid=(1,), done=False),
        episode(1, reward=1.0, words=("a needle", "right", "up"), cut=(2,)),
        episode(2, group=1, reward=0.5, words=("down",)),
        episode(3, group=1, reward=0.0, words=("down", "left", "up", "up"), done=False),
    )
    return run


def test_turns_stand_in_order_with_what_came_of_them():
    rows = episode(7, group=2, words=("left", "up", "right"), advantage=-0.5)
    page = text_of(Conversations().html(pd.DataFrame(rows)))
    assert page.startswith("group 2 Goal: door 2 start 7 <|im_start|>system An example.")
    assert page.endswith(
        "episode 7 reward 1.00 advantage -0.50 3 turns, ended 1 start 7 left 2 saw left up 3 saw up right reward 1.00 "
        "saw right"
    )


def test_nothing_that_anyone_wrote_is_read_as_html():
    bad = "<script>alert('x')</script>$x$"
    rows = episode(0, words=(bad, bad))
    for row in rows:
        row |= {
            "observation": bad,
            "result": bad,
            "prefill": bad,
            "answer": bad,
            "prompt": bad + bad,
            "tokens": [bad, END],
        }
    page = Conversations().html(pd.DataFrame(rows))
    assert "<script" not in page and "$x$" not in page
    # the question and the answer; observation, prefill and completion of two turns; the last result
    assert page.count("&lt;script&gt;") == 9


def test_marks_and_scores_of_turns():
    rows = episode(
        0,
        words=("a", "b", "c"),
        invalid=(2,),
        cut=(3,),
        done=False,
        advantage=(0.5, -0.25, 0.125),
    )
    said = text_of(Conversations().html(pd.DataFrame(rows)))
    assert "episode 0 reward 1.00 3 turns, not ended" in said, (
        "the advantage is not the episode's"
    )
    assert "1 start 0 a advantage +0.50 2 saw a b invalid advantage -0.25" in said
    assert "3 saw b c cut off reward 1.00 advantage +0.12 saw c" in said
    assert said.count("invalid") == said.count("cut off") == 1
    assert "1 turn, ended" in text_of(Conversations().html(pd.DataFrame(episode(0))))


@pytest.mark.parametrize(
    "tokens, text, cut, why",
    [
        (["go", END], "go", False, "an end"),
        (["go", " on"], "go on", True, "the last word is one of the text's"),
        (["go", " on "], "go on", True, "decoded without the blank"),
        (["go", "\ufffd"], "go\ufffd", True, "half a letter"),
        (["\ufffd", "\ufffd"], "é", True, "two halves"),
        ([END], "", False, "nothing but the end"),
        (None, "go", False, "not known"),
    ],
)
def test_cut_off_is_read_off_the_tokens(tokens, text, cut, why):
    row = episode(0)[0] | {"tokens": tokens, "completion": text}
    assert ("cut off" in Conversations().html(pd.DataFrame([row]))) == cut, why


def test_the_prompt_is_there_once_a_group(run):
    page = CompletionBrowser(run.path).view.value
    assert page.count("An example.") == page.count("<details>") == 2
    assert page.count("Goal: door 0") == 2, "in bold, and in the prompt behind the click"


def test_sorting_and_groups_keep_episodes_whole(run):
    table = CompletionBrowser(run.path).table
    wholes = {0: [1, 2], 1: [1, 2, 3], 2: [1], 3: [1, 2, 3, 4]}
    wanted = {
        "as written": [0, 1, 2, 3], "reward": [1, 2, 0, 3], "turns": [3, 1, 0, 2], "advantage": [0, 1, 2, 3],
    }  # fmt: skip
    for sort, order in wanted.items():
        found = select(table, 1, sort=sort)
        assert found["episode"].drop_duplicates().tolist() == order, sort
        assert {
            e: turns["turn"].tolist() for e, turns in found.groupby("episode", sort=False)
        } == wholes, sort
    assert select(table, 1, group=1)["episode"].unique().tolist() == [2, 3]
    assert select(table, 2).empty


def test_the_best_turn_gives_an_episode_its_place(tmp_path):
    run = Recorded(tmp_path / "run")
    write(
        run,
        episode(0, words=("a", "b"), advantage=(0.5, 0.4)),
        episode(1, words=("a", "b"), advantage=(-1.0, 2.0)),
    )
    found = select(browse(run.path), 1, sort="advantage")
    assert found[["episode", "turn"]].values.tolist() == [[1, 1], [1, 2], [0, 1], [0, 2]]


def test_a_turn_that_holds_the_text_brings_its_episode(run):
    table = browse(run.path)
    episodes = lambda text: select(table, 1, text=text)["episode"].unique().tolist()  # noqa: E731
    assert select(table, 1, text="NEEDLE")[["episode", "turn"]].values.tolist() == [
        [1, 1],
        [1, 2],
        [1, 3],
    ]
    assert episodes("saw right") == [1] and episodes("start 3") == [3], (
        "what the environment said"
    )
    assert episodes("door 1") == [2, 3], "the question"
    assert episodes("An example") == [], "which stands in every prompt"


def test_the_browser_shows_episodes(run):
    browser = CompletionBrowser(run.path)
    assert shown(browser.view.value) == [0, 1, 2, 3]
    assert browser.sort.options == ("as written", "reward", "turns", "advantage")
    browser.sort.value = "reward"
    assert shown(browser.view.value) == [1, 0, 2, 3], "groups together, by their best"
    browser.group.value = 1
    assert shown(browser.view.value) == [2, 3] and "door 0" not in browser.view.value
    browser.text.value = "needle"
    assert (
        browser.view.value
        == "No episode of group 1 of step 1 holds <b>needle</b>. It is in step 1."
    )
    browser.group.value = ALL
    assert shown(browser.view.value) == [1]


def test_the_limit_counts_episodes(run, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 3)
    browser = CompletionBrowser(run.path)
    assert (
        shown(browser.view.value) == [0, 1, 2] and "1 more are not shown" in browser.view.value
    )
    browser.group.value = 1
    assert shown(browser.view.value) == [2, 3] and "not shown" not in browser.view.value


def test_two_rollouts_of_a_step_are_not_mixed_up(tmp_path):
    """Each counts its episodes from 0; groups go on."""
    run = Recorded(tmp_path / "run")
    write(run, episode(0, words=("a1", "a2")))
    write(run, episode(0, group=1, words=("b1", "b2", "b3"), reward=0.5))
    table = browse(run.path)
    assert table["turns"].tolist() == [2, 2, 3, 3, 3] and table["number"].tolist() == [0] * 5
    assert select(table, 1, text="b3")["completion"].tolist() == ["b1", "b2", "b3"]
    assert CompletionBrowser(run.path).view.value.count("reward <b>") == 2 + 2, (
        "two cards, two paid turns"
    )


def test_a_saved_notebook_and_the_live_page_keep_three_episodes(run):
    browser = CompletionBrowser(run.path)
    bundle = browser._repr_mimebundle_()
    said = text_of(bundle["text/html"])
    for words in (
        "best, episode 1 reward 1.00",
        "median, episode 0 reward 0.25",
        "worst, episode 3 reward 0.00",
    ):
        assert words in said and words.replace(" reward", ", reward") in bundle["text/plain"]
    assert "episode 2" not in said and said.count("a needle") == 2
    assert ">>> right  (cut off)" in bundle["text/plain"]
    plain, page = completions_page(browser.table, scrolls=True)
    assert (plain, text_of(page)) == (bundle["text/plain"], said)


def test_the_last_step_alone_is_picked_from(run):
    write(run, episode(0, step=2, words=("fresh",)))
    table = browse(run.path)
    picked, _ = pages_of(table).picks(table)
    assert "best, episode 0" in picked and "needle" not in picked


def test_outside_a_notebook_a_row_has_its_whole_conversation(run):
    table = browse(run.path)
    assert table["response"].tolist()[:2] == ["left", "up"] and table["number"].tolist()[
        2:6
    ] == [
        1,
        1,
        1,
        0,
    ]
    assert table["turns"].tolist() == [2, 2, 3, 3, 3, 1, 4, 4, 4, 4]
    first = table["conversation"].iloc[0]
    assert first == (
        "group 0, episode 0, reward 0.25, advantage +0.50, 2 turns, not ended\n"
        "1. Goal: door 0\nstart 0\n>>> left  (invalid)\n2. saw left\n>>> up  (reward 0.25)\nsaw up"
    )
    assert table["conversation"].iloc[1] == first and table["conversation"].iloc[2] != first
    assert first == conversation(table.head(2).to_dict("records"))
    prefilled = episode(0)[0] | {"prefill": "Move: "}
    assert "\n>>> Move: go  (reward 1.00)\n" in conversation([prefilled])


def test_it_follows_a_run_of_episodes(run, monkeypatch):
    """And a line that is still being written is not there yet."""
    monkeypatch.setattr(follow, "_LOOK", 0.02)
    monkeypatch.setattr(follow, "_SHARE", 10.0)

    async def watch():
        with alone(run.path):
            browser = CompletionBrowser(run.path)
            whole = (run.path / "completions.jsonl").read_bytes()
            (run.path / "completions.jsonl").write_bytes(whole + b'{"step": 2, "comp')
            await asyncio.sleep(0.1)
            assert browser.follow.value and browser.step.value == 1
            write(run, episode(0, step=2, words=("fresh", "words")))
            await asyncio.sleep(0.2)
        assert (
            browser.step.value == 2
            and "fresh" in browser.view.value
            and shown(browser.view.value) == [0]
        )
        browser.close()

    asyncio.run(watch())


def test_a_run_that_has_no_episodes_yet(tmp_path):
    run = Recorded(tmp_path / "run")
    browser = CompletionBrowser(run.path)
    assert (
        "No completions yet" in browser.view.value and browser._repr_mimebundle_()["text/html"]
    )
    write(run, episode(0))
    browser.button.click()
    assert shown(browser.view.value) == [0]


def test_single_completions_are_shown_as_ever(tmp_path):
    """Also where a reward has logged a column `episode` of its own."""
    run = Recorded(tmp_path / "run")
    run.write_completions({name: [row[name] for row in episode(0, words=("a", "b"))] for name in (
        "step", "group", "prompt", "completion", "reward", "advantage", "episode"
    )})  # fmt: skip
    browser = CompletionBrowser(run.path)
    assert "turns" not in browser.sort.options
    assert shown(browser.view.value) == [] and "conversation" not in browse(run.path)
    assert browse(run.path)["number"].tolist() == [0, 1]
