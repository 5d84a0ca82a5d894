"""Prompts turn by turn: word for word what build_prompt and a server would make, and never a token made twice."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import trl

from examples.calculator import calculator
from grpo_kit.models import load_policy
from grpo_kit.more.episodes import grid
from grpo_kit.more.episodes.episode_task import EpisodeTask
from grpo_kit.more.episodes.observation import Renderer, View, write_turn
from grpo_kit.more.episodes.rollout_episodes import Written, rollout_episodes, show_turns
from grpo_kit.more.episodes.template_audit import audit_turns
from grpo_kit.prompts import PromptError, build_prompt

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
EXAMPLE = (("Open the box.", [("It is shut.", "pull"), ("It is stuck.", "push")]),)


@pytest.fixture
def tokenizer():
    return load_policy("tiny-random", quiet=True)[1]


def with_template(tokenizer, name):
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def sampled(tokenizer, text, *, ended=True):
    return (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        + [tokenizer.eos_token_id] * ended
    )


def test_a_view_without_chat_is_one_message_with_the_last_actions(tokenizer):
    view = View(actions=2, system="Be brief.", prefill="Action:", examples=EXAMPLE)
    renderer = Renderer(tokenizer, view)
    talk = renderer.first("Find the key.", "A room.")
    for action, seen in (
        ("look", "A desk."),
        ("open desk", "A drawer."),
        ("pull\n drawer", "A key."),
    ):
        renderer.next(talk, sampled(tokenizer, f" {action}"), seen)
    pairs = [
        ("Goal: Open the box.\nIt is shut.", "pull"),
        ("Goal: Open the box.\nYou did: pull.\nIt is stuck.", "push"),
    ]
    message = "Goal: Find the key.\nYou did: open desk, then pull drawer.\nA key."
    wanted = build_prompt(
        tokenizer, message, system="Be brief.", prefill="Action:", examples=pairs
    )
    assert talk.text == wanted and talk.ids == tokenizer(wanted)["input_ids"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"actions": 0}, "Goal: G\nnow"),
        ({"actions": 1}, "Goal: G\nYou did: c.\nnow"),
        ({"actions": None}, "Goal: G\nYou did: a, then b, then c.\nnow"),
        ({"actions": 1, "repeat_goal": False}, "You did: c.\nnow"),
        ({"chat": True}, "Goal: G\nnow"),
        ({"chat": True, "repeat_goal": False}, "now"),
    ],
)
def test_what_a_turns_message_holds(options, message):
    assert View(**options).message("G", ["a", "b", "c"], "now") == message
    assert View(**options).message("G", [], "now") == "Goal: G\nnow"


def test_write_turn_can_be_replaced():
    view = View(
        write=lambda goal, actions, seen: f"{seen} [{len(actions)}] {goal}", actions=None
    )
    assert view.message("G", ["a"], "now") == "now [1] G"
    assert write_turn("", [], "only this") == "only this"


@pytest.mark.parametrize("name", [None, "qwen2_5", "llama3", "qwen3", "phi3", "gemma3"])
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut off"])
def test_a_conversation_goes_on_from_the_sampled_tokens(name, ended, tokenizer):
    """Its text is the template's own; its tokens begin with those of the last prompt and those sampled, as they are."""
    if name:
        with_template(tokenizer, name)
    renderer = Renderer(
        tokenizer, View(chat=True, examples=EXAMPLE), ends=[tokenizer.eos_token_id]
    )
    talk = renderer.first("Find the key.", "A room.")
    # one letter a token: no tokenizer writes it so
    odd = [tokenizer.convert_tokens_to_ids(c) for c in "look"]
    assert tokenizer.decode(odd) == "look" and odd != sampled(tokenizer, "look", ended=False)
    before = list(talk.ids)
    renderer.next(talk, odd + [tokenizer.eos_token_id] * ended, "A desk.")
    assert talk.ids[: len(before) + len(odd)] == before + odd
    messages = []
    for asked, answered in renderer.view.example_pairs():
        messages += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answered},
        ]
    messages += [
        {"role": "user", "content": "Goal: Find the key.\nA room."},
        {"role": "assistant", "content": "look"},
        {"role": "user", "content": "Goal: Find the key.\nA desk."},
    ]
    served = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert talk.text == served
    assert tokenizer.decode(talk.ids).endswith(served[-60:])


def test_a_template_that_drops_thoughts_makes_turns_fork_as_it_is_served(tokenizer):
    with_template(tokenizer, "qwen3")
    talks = {}
    for thoughts in ("as served", "kept"):
        renderer = Renderer(tokenizer, View(chat=True, thoughts=thoughts))
        talk = talks[thoughts] = renderer.first("Find the key.", "A room.")
        before = list(talk.ids)
        written = sampled(tokenizer, "<think>\nA desk may have one.\n</think>\n\nlook")
        renderer.next(talk, written, "A desk.")
        gone_on = before + written[:-1]
        assert (talk.ids[: len(gone_on)] == gone_on) == (thoughts == "kept")
    served = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "Goal: Find the key.\nA room."},
            {"role": "assistant", "content": "<think>\nA desk may have one.\n</think>\n\nlook"},
            {"role": "user", "content": "Goal: Find the key.\nA desk."},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert talks["as served"].text == served and "A desk may" not in served
    assert talks["as served"].ids == tokenizer(served)["input_ids"]
    assert "A desk may have one." in talks["kept"].text


@pytest.mark.parametrize(
    "prefill, written, said",
    [
        ("", "open", "open"),
        ("", "<think>\nHm.\n</think>\n\nopen", "open"),
        ("<think>\n", "Hm.\n</think>\n\nopen", "open"),
        ("<think>\n", "Hm, the door", ""),
        ("Step by step\n<think>", "</think>\nopen", "open"),
        ("", "Hm.</think>open", "open"),  # the template opened it
        ("", "<think>a</think>b<think>c</think> open ", "open"),
        ("Action:", " open", "Action: open"),
    ],
)
def test_environments_do_not_read_thoughts(prefill, written, said, tokenizer):
    """Nor do the last actions that later turns show."""
    heard = []

    class Door:
        def reset(self, row):
            return "A door."

        def step(self, text):
            heard.append(text)
            return "It stays shut.", 0.0, len(heard) == 2

    view = View(prefill=prefill, actions=1)
    task = EpisodeTask(
        "door",
        [{"question": "Out", "n": 0}],
        [{"question": "Out", "n": 1}],
        Door,
        view,
        max_turns=2,
    )
    prompts = []

    def complete(asked, who, turn):
        prompts.extend(asked)
        return Written([sampled(tokenizer, written)])

    rollout_episodes(task, task.train, Renderer(tokenizer, view), task.world(), complete)
    assert heard == [said, said]
    text = tokenizer.decode(prompts[1])
    assert (
        "Hm" not in text
        and f"You did: {said.removeprefix('Action:').strip() or 'nothing'}." in text
    )


def test_a_perfect_policy_stays_perfect_behind_an_opened_thought(tokenizer):
    task = calculator(8, 8)
    thinking = replace(task, view=replace(task.view, prefill="<think>\n", examples=()))
    assert thinking.score(thinking.optimum) == 1.0
    assert ">>> \n</think>\n\ncalc " in show_turns(with_template(tokenizer, "qwen3"), thinking)


# Their messages are parts, not texts: build_prompt refuses them.
REFUSED = {"idefics3", "smolvlm", "llava_next"}


@pytest.mark.parametrize(
    "name", sorted(p.stem for p in TEMPLATES.glob("*.jinja") if "training" not in p.stem)
)
def test_random_conversations_are_the_templates_own_under_every_template(name, tokenizer):
    """Prompts trained are prompts served: text for text; and where nothing is dropped, not one token is made anew."""
    with_template(tokenizer, name)
    rng = random.Random(name)
    words = [
        "look",
        "desk",
        "7 * 6 = 42",
        "open the\nbox",
        "<think>\nhm\n</think>\n\nyes",
        "no.",
        "é ß 数",
    ]
    # SmolLM2's is what opens a turn, which some templates write behind a BOS
    tokenizer.bos_token = "<repo_name>"
    opens = audit_turns(tokenizer).opens
    prefill = "" if "</" in opens else opens
    view = View(chat=True, repeat_goal=rng.random() < 0.5, prefill=prefill)
    renderer = Renderer(tokenizer, view)
    try:
        talk = renderer.first("Find it.", "A room.")
        renderer.next(talk, sampled(tokenizer, "look"), "A desk.")
    except PromptError as error:
        assert name in REFUSED, error
        return
    assert name not in REFUSED
    renderer = Renderer(tokenizer, view)
    talk = renderer.first("Find it.", "A room.")
    messages = [{"role": "user", "content": talk.messages[0]["content"]}]
    for _ in range(4):
        said, seen = rng.choice(words), rng.choice(words[:4])
        before, text_before = list(talk.ids), talk.text
        ids = sampled(tokenizer, said, ended=rng.random() < 0.7)
        renderer.next(talk, ids, seen)
        text = prefill + tokenizer.decode(ids, skip_special_tokens=True)
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": talk.messages[-1]["content"]},
        ]
        served = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert talk.text in (served, served.removeprefix(tokenizer.bos_token or ""))
        written = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids
        if talk.text.startswith(text_before + tokenizer.decode(written)):
            assert talk.ids[: len(before) + len(written)] == before + written
        else:
            assert talk.ids == tokenizer(talk.text)["input_ids"]


def test_special_tokens_in_an_observation_are_refused(tokenizer):
    for view in (View(), View(chat=True)):
        renderer = Renderer(tokenizer, view)
        talk = renderer.first("Find it.", "A room.")
        with pytest.raises(PromptError, match=r"<\|im_end\|>"):
            renderer.next(talk, sampled(tokenizer, "look"), "A desk.<|im_end|>")


@pytest.mark.parametrize(
    "options, said",
    [
        ({"actions": -1}, "actions=-1 must be a whole number"),
        ({"thoughts": "never"}, "thoughts='never' is not known"),
        ({"thoughts": "kept"}, "thoughts='kept' needs chat=True"),
    ],
)
def test_what_no_view_can_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        View(**options)


def test_turns_are_shown_as_text_with_what_is_new(tokenizer):
    shown = show_turns(tokenizer, calculator())
    assert shown.count("--- turn") == 3 and "of them as before" in shown
    assert shown.splitlines()[-2] == "--- Right. reward 1"
    task = grid()
    assert ">>> up" in show_turns(tokenizer, task, responses=["up", "up"])
    with pytest.raises(ValueError, match="has no optimum; give responses"):
        show_turns(tokenizer, replace(task, optimum=None))


def test_what_thoughts_cost_is_said_in_rows_and_tokens(tokenizer):
    """Counted here by hand: all tokens of all rows, and the distinct prefixes that are read."""
    with_template(tokenizer, "qwen3")
    task = calculator()
    said = [
        f"<think>\nNow step {i}.\n</think>\n\n{act}"
        for i, act in enumerate(["calc 1 + 2", "say 3"])
    ]
    last = show_turns(tokenizer, task, responses=said).splitlines()[-1]
    counted = {}
    for thoughts in ("as served", "kept"):
        view = replace(task.view, thoughts=thoughts)
        renderer, world = Renderer(tokenizer, view), task.world()
        (seen,) = world.reset([task.train[0]])
        talk, rows = renderer.first(task.train[0]["question"], seen), []
        for turn, text in enumerate(said, start=1):
            ids = sampled(tokenizer, text)
            rows.append([*talk.ids, *ids])
            seen = world.step({0: view.said(text)}, turn)[0].observation
            renderer.next(talk, ids, seen)
        read = {tuple(row[:n]) for row in rows for n in range(1, len(row))}
        counted[thoughts] = (
            f"2 rows of {sum(map(len, rows)):,} tokens in all; {len(read):,} are computed"
        )
    assert last.startswith(f"--- thoughts as served: {counted['as served']}")
    assert f"; thoughts kept: {counted['kept']}" in last
    plain = show_turns(tokenizer, task, responses=["calc 1 + 2", "say 3"]).splitlines()[-1]
    assert plain.startswith("--- 2 rows of ") and "thoughts" not in plain


def test_special_tokens_that_a_model_spells_out_are_nobodys_own(tokenizer):
    """In other tokens than the special one: no environment and no later prompt shall read it as one."""
    ids = [
        i
        for part in ("up <|im", "_end|>", " now")
        for i in tokenizer(part, add_special_tokens=False).input_ids
    ]
    assert (
        "<|im_end|>" in tokenizer.decode(ids)
        and tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids
    )
    for view in (View(actions=2), View(chat=True)):
        renderer = Renderer(tokenizer, view)
        assert renderer.text_of(ids) == "up  now"
        talk = renderer.first("Find it.", "A room.")
        renderer.next(talk, ids, "A desk.")
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert talk.ids.count(end) == talk.text.count("<|im_end|>")
