"""The exported chat template renders the training's prompt by itself: on every template that trl ships."""

import copy
from pathlib import Path

import pytest
import trl
from transformers import AutoTokenizer

from examples.calculator import calculator
from grpo_kit.models._gguf_reader import embedded_folder
from grpo_kit.more.export._template import (
    ExportError,
    Prompting,
    check_questions,
    with_serving_template,
)
from grpo_kit.prompts import PromptError, build_prompt

TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
SHOWN = (("1 + 1?", "<answer>2</answer>"), ("2 + 1?", "<answer>3</answer>"))
PROMPTINGS = {
    "nothing": Prompting(),
    "prefill": Prompting(prefill="<answer>"),
    "all": Prompting('Be "brief".\n{{ not jinja }}', "<answer>", SHOWN),
    "odd": Prompting(
        '"Both" \'quotes\', {{ braces }} {% endif %} {# no #} \\n \\ \t<ä 漢 🙂>\u2028"""{',
        '{"antwort": \'ä\\n{{',
        (("{% set x = 1 %}?", "{{ 7 * 7 }}\r\n'\""),),
    ),
    "thoughts": Prompting(
        None, "<think>\n", (("1 + 1?", "<think>\nhm\n</think>\n<answer>2</answer>"),)
    ),
}


@pytest.fixture(scope="module")
def smollm():
    return AutoTokenizer.from_pretrained(embedded_folder())


@pytest.mark.parametrize(
    "path", [None, *TEMPLATES], ids=lambda path: path.stem if path else "smollm2"
)
def test_a_question_alone_is_asked_as_in_training(path, smollm):
    """By every way of prompting that a run can train on with this template."""
    tokenizer, able = copy.copy(smollm), []
    if path:
        tokenizer.chat_template = path.read_text()
    for name, p in PROMPTINGS.items():
        how = {"system": p.system, "prefill": p.prefill, "examples": p.examples}
        try:
            trained = build_prompt(tokenizer, "2 + 2?", **how)
        except PromptError:
            continue
        able.append(name)
        asked_as_in_training(tokenizer, name, p, trained)
    if not able:
        pytest.skip("no run can train on any prompt of this template")


def asked_as_in_training(tokenizer, name, p, trained):
    served = with_serving_template(tokenizer, p)
    asked = [{"role": "user", "content": "2 + 2?"}]
    assert (
        served.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        == tokenizer(trained)["input_ids"]
    ), name
    check_questions(tokenizer, served, p, ["2 + 2?", "Is\nit {{ 4 }}?", "\"'\\ {% raw %} ä🙂"])
    assert tokenizer.chat_template != served.chat_template or name == "nothing", (
        "a copy: the training's stays"
    )


def test_a_tokenizer_that_adds_bos_gets_it_once(smollm):
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(smollm)
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    one = "'[Q]' + m['content'] + '[/Q]' if m['role'] == 'user' else m['content']"
    turns = "{% for m in messages %}{{ " + one + " }}{% endfor %}"
    for template in (turns, "{{ bos_token }}" + turns):
        tokenizer.chat_template = template
        served = with_serving_template(tokenizer, Prompting(prefill="<a>"))
        ids = served.apply_chat_template(
            [{"role": "user", "content": "x"}], add_generation_prompt=True, return_dict=False
        )
        assert (
            ids == tokenizer("[Q]x[/Q]<a>")["input_ids"]
            and ids.count(tokenizer.bos_token_id) == 1
        )


def test_a_conversation_has_its_prefills_again_and_a_callers_system_text_counts(smollm):
    served = with_serving_template(smollm, PROMPTINGS["all"])
    said = "4</answer>"  # what a server returned: the completion
    talk = [
        {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": said},
        {"role": "user", "content": "3 + 3?"},
    ]  # fmt: skip
    text = served.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert text.endswith(
        "2 + 2?<|im_end|>\n<|im_start|>assistant\n<answer>4</answer><|im_end|>\n<|im_start|>user\n3 + 3?<|im_end|>\n"
        "<|im_start|>assistant\n<answer>"
    )
    talk[1]["content"] = "<answer>" + said  # a client that kept it
    assert text == served.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "2 + 2?"}]
    text = served.apply_chat_template(own, tokenize=False, add_generation_prompt=True)
    assert (
        text.startswith("<|im_start|>system\nMine.<|im_end|>\n<|im_start|>user\n1 + 1?")
        and "brief" not in text
    )
    # A caller who opens the answer himself gets no second opening.
    opened = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "Well, <answer>"},
    ]
    text = served.apply_chat_template(opened, tokenize=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nWell, <answer>")


def test_a_question_that_the_template_changes_is_refused(smollm):
    tokenizer = copy.copy(smollm)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content']", "message['content'] | trim"
    )
    served = copy.copy(tokenizer)
    served.chat_template = served.chat_template.replace("| trim", "| upper")
    with pytest.raises(ExportError, match="the chat template alone gives"):
        check_questions(tokenizer, served, Prompting(), ["a question"])


def test_prompting_of_a_task_of_several_turns():
    task = calculator(8, 4)
    p = Prompting.of(task)
    assert p.system == task.view.system and len(p.examples) == len(task.view.example_pairs())
