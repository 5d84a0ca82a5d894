"""Browsing completions and setting a profile's numbers, with and without widgets."""

import math
import re
from html import unescape

import pandas as pd
import pytest

from grpo_kit._support.display import escape
from grpo_kit.record.files import RunFolderError
from grpo_kit.watch._completions import Pages, completions_html, pick_three
from grpo_kit.watch.browse import ALL, CompletionBrowser, browse, select
from tests.made_metrics import Recorded


def part(
    step: int, rewards: list[float | None], texts: list[str], groups: list[int]
) -> dict[str, list]:
    n = len(rewards)
    return {
        "step": [step] * n,
        "prompt": [f"Question {g}? <answer>" for g in groups],
        "prefill": ["<answer>"] * n,
        "completion": texts,
        "reward/exact": [None if r is None else 1 - r for r in rewards],
        "reward": rewards,
        "advantage": [0.0] * n,
        "group": groups,
        "temperature": [1.0] * n,
    }


@pytest.fixture
def run(tmp_path):
    run = Recorded(tmp_path / "run")
    run.write_completions(
        part(1, [0.2, 0.9, 0.5, 0.1], ["a1", "b1", "<b>c1</b>", "d1"], [0, 0, 1, 1])
    )
    run.write_completions(part(3, [0.3, 0.4], ["a3", "needle"], [0, 0]))
    return run


@pytest.mark.parametrize(
    "text, safe",
    [
        ("<script>", "&lt;script&gt;"),  # no code of the model's runs in the notebook
        ("$x$", "<span>$</span>x<span>$</span>"),  # MathJax sees no pair of delimiters
        ("\\(x\\)", "<span>\\</span>(x<span>\\</span>)"),
        ('"&', "&quot;&amp;"),
        (None, ""),
        (math.nan, ""),
        ("x" * 401, "x" * 400 + " …"),
    ],
)
def test_escape(text, safe):
    assert escape(text) == safe


def test_escape_keeps_the_end_when_asked():
    assert escape("abcdef", 3, end=True) == "… def"


@pytest.mark.parametrize(
    "rewards, picked, why",
    [
        (
            [0.5, 0.9, 0.1, 0.4, 0.6],
            [(0.9, "best"), (0.5, "median"), (0.1, "worst")],
            "five: the third is median",
        ),
        (
            [0.5, 0.5, 0.5],
            [(0.5, "best"), (0.5, "median"), (0.5, "worst")],
            "three different rows all the same",
        ),
        (
            [None, 0.2, 0.3, 0.4],
            [(0.4, "best"), (0.3, "median"), (0.2, "worst")],
            "no reward: left out",
        ),
        ([0.2], [(0.2, "best")], "one only"),
        ([], [], "none"),
    ],
)
def test_pick_three(rewards, picked, why):
    table = pd.DataFrame(
        part(2, rewards, [str(i) for i in range(len(rewards))], [0] * len(rewards))
    )
    table = pd.concat([pd.DataFrame(part(1, [1.0], ["old"], [0])), table]) if rewards else table
    chosen = pick_three(table)
    assert list(zip(chosen.reward, chosen.pick, strict=True)) == picked, why
    assert chosen.completion.is_unique


def test_a_group_has_its_question_and_answer_once_and_each_response_whole():
    table = pd.DataFrame(part(1, [0.25, 0.5, None], ["<i>82</i>", "b", "c"], [7, 7, 8]))
    table["answer"], table["advantage"] = ["82", "82", None], [-1.0, 1.0, math.nan]
    for page in (completions_html(table), completions_html(table.head(2))):
        assert page.count("Question 7?") == 1 and page.count(">82</span>") == 1
        assert "&lt;answer&gt;</span>&lt;i&gt;82&lt;/i&gt;" in page and "<i>" not in page
        for score in ("0.25", "0.75", "-1.00", "+1.00"):
            assert f">{score}</" in page, "the total, its part, the advantage"
    assert completions_html(table).index("Question 8?") > completions_html(table).index(
        "&lt;i&gt;"
    )
    assert ">none</b>" in completions_html(table)


def text_of(html: str) -> str:
    return unescape(re.sub("<[^>]*>", "", html))


def summaries(page: str) -> list[str]:
    return [text_of(one) for one in re.findall("<summary.*?</summary>", page, re.S)]


def test_a_long_response_is_folded_and_nothing_is_cut_off():
    words = " ".join(f"word{n}" for n in range(400))
    lines = "\n".join(f"line {n}" for n in range(9))
    short, unbroken = "a" * 300, "b" * 5000
    for text in (words, lines, short, unbroken):
        page = completions_html(pd.DataFrame(part(1, [0.5], [text], [0])))
        shown = summaries(page)[-1] if summaries(page) else text_of(page)
        whole = re.sub("… [0-9,]+ characters more", "", text_of(page))
        assert "".join(text.split()) in "".join(whole.split()), text[:20]
        if text == short:
            assert "<details" not in page
        else:
            assert len(shown) < 350 and "characters more" in shown
            assert text[-20:] not in shown or text == unbroken
    page = completions_html(pd.DataFrame(part(1, [0.5], [lines], [0])))
    assert summaries(page)[-1].startswith("<answer>line 0\nline 1\nline 2 …")


def test_the_question_is_what_the_user_said_last_and_the_prompt_is_a_click_away():
    turns = [
        ("system", "Be brief."),
        ("user", "An example?"),
        ("assistant", "Yes."),
        ("user", "Which is $1?"),
    ]
    chatml = (
        "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in turns)
        + "<|im_start|>assistant\n"
    )
    llama = "".join(
        f"<|start_header_id|>{who}<|end_header_id|>\n\n{what}<|eot_id|>" for who, what in turns
    )
    for prompt in (chatml, llama):
        table = pd.DataFrame(part(1, [0.5], ["x"], [0])).assign(prompt=prompt + "<answer>")
        (shown,) = summaries(completions_html(table))
        assert shown == "group 0 Which is $1?" and "Be brief." in text_of(
            completions_html(table)
        )


def test_numbers_count_a_group_in_the_order_written(run):
    table = browse(run.path)
    assert (
        table.number.tolist() == [0, 1, 0, 1, 0, 1] == Pages().numbered(table).number.tolist()
    )


def test_select(run):
    table = browse(run.path)
    assert select(table, 1).completion.tolist() == ["a1", "b1", "<b>c1</b>", "d1"]
    assert select(table, 1, sort="reward").completion.tolist() == [
        "b1",
        "<b>c1</b>",
        "a1",
        "d1",
    ]
    assert select(table, 1, sort="reward/exact").completion.tolist() == [
        "d1",
        "a1",
        "<b>c1</b>",
        "b1",
    ]
    assert select(table, 1, text="(B").empty  # plain text, not a pattern
    assert select(table, 1, text="C1").completion.tolist() == ["<b>c1</b>"]
    assert select(table, 1, group=1).completion.tolist() == ["<b>c1</b>", "d1"]


def test_browse_outside_a_notebook_is_a_plain_table(run, tmp_path):
    table = browse(run.path)
    assert isinstance(table, pd.DataFrame) and table.response.tolist()[0] == "<answer>a1"
    with pytest.raises(RunFolderError):
        browse(tmp_path / "nowhere")


def test_the_browser_follows_its_controls(run):
    browser = CompletionBrowser(run.path)
    assert browser.step.options == (1, 3) and browser.step.value == 3
    assert "needle" in browser.view.value and "b1" not in browser.view.value
    browser.step.value = 1
    browser.sort.value = "reward"
    page = browser.view.value
    assert page.index("b1") < page.index("a1") < page.index("c1") < page.index("d1"), (
        "groups by their best"
    )
    assert "&lt;b&gt;c1" in page and "<b>c1" not in page
    browser.text.value = "needle"
    assert browser.view.value == "No completion of step 1 holds <b>needle</b>. It is in step 3."
    browser.text.value = "<nowhere>"
    assert browser.view.value.endswith("holds <b>&lt;nowhere&gt;</b>. Nor does any step.")
    browser.text.value = ""
    browser.group.value = 1
    assert "c1" in browser.view.value and "a1" not in browser.view.value
    assert browser.view.value.count("Question 1?") == 1  # once, over the group
    browser.step.value = 3  # has no group 1
    assert browser.group.value == ALL and "needle" in browser.view.value


def test_the_group_selector_says_all(run):
    """ipywidgets shows nothing where the value of the option chosen is None."""
    browser = CompletionBrowser(run.path)
    assert (browser.group.index, browser.group.label) == (0, "all")
    browser.group.value = 0
    browser.group.value = ALL
    assert (browser.group.index, browser.group.label) == (0, "all")


def test_refresh_reads_the_folder_again(run, tmp_path):
    browser = CompletionBrowser(run.path)
    run.write_completions(part(4, [1.0], ["fresh"], [0]))
    assert "fresh" not in browser.view.value
    browser.button.click()
    assert browser.step.value == 4 and "fresh" in browser.view.value
    browser.step.value = 1
    run.write_completions(part(5, [1.0], ["later"], [0]))
    browser.button.click()
    assert browser.step.value == 1 and browser.step.options[-1] == 5

    empty = CompletionBrowser(Recorded(tmp_path / "new").path)
    assert "No completions yet" in empty.view.value


def test_a_saved_notebook_keeps_three_completions(run):
    bundle = CompletionBrowser(run.path)._repr_mimebundle_()
    assert "needle" in bundle["text/html"] and "needle" in bundle["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in bundle
