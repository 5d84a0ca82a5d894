"""The Modelfile says what the chat template says: read by hand, and by Go's own template engine where there is one."""

import json
import re
import shutil
import subprocess

import pytest
from transformers import AutoTokenizer

from grpo_kit.models._gguf_reader import embedded_folder
from grpo_kit.more.export._template import (
    ExportError,
    Prompting,
    modelfile,
    with_serving_template,
)

SHOWN = (("1 + 1?", "<answer>2</answer>"), ("2 + 1?", "<answer>3</answer>"))
PLAIN = Prompting('Be "brief".', "<answer>", SHOWN)
ODD = Prompting(
    '"Both" \'quotes\', {{ braces }} {{- end }} `ticks` """three""" four """" \\n ä🙂{',
    '{"antwort": {{',
    (("{% set x = 1 %}?", "{{ 7 * 7 }}{"),),
)
TALK = [
    {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4</answer>"},
    {"role": "user", "content": "{{ 3 }} + 3?"},
]  # fmt: skip


@pytest.fixture(scope="module")
def smollm():
    return AutoTokenizer.from_pretrained(embedded_folder())


def template_of(text):
    """As Ollama's reader of Modelfiles finds it: from the first three quotes to the next."""
    return text.partition('TEMPLATE """')[2].partition('"""\n')[0]


def test_by_hand(smollm):
    served = with_serving_template(smollm, PLAIN)
    text = modelfile(served, PLAIN, "m.gguf", temperature=0.7, tokens=12)
    own, _, rest = template_of(text).removeprefix("{{ if .System }}").partition("{{ else }}")
    head, _, turns = rest.partition("{{ end }}{{ range .Messages }}")
    user, _, assistant = turns.partition('{{ else if eq .Role "assistant" }}')
    user = user.removeprefix('{{ if eq .Role "user" }}')
    assistant = assistant.removesuffix("{{ end }}{{ end }}")
    asked = head + user.replace("{{ .Content }}", "2 + 2?")
    assert asked == PLAIN.prompt(smollm, "2 + 2?")
    again = assistant.replace("{{ .Content }}", "4</answer>")
    both = asked + again + user.replace("{{ .Content }}", "{{ 3 }} + 3?")
    assert both == served.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    asked = own.replace("{{ .System }}", "Mine.") + user.replace("{{ .Content }}", "2 + 2?")
    mine = [{"role": "system", "content": "Mine."}, TALK[0]]
    assert asked == served.apply_chat_template(mine, tokenize=False, add_generation_prompt=True)
    lines = (
        "FROM ./m.gguf",
        "PARAMETER temperature 0.7",
        "PARAMETER num_predict 12",
        'PARAMETER stop "<|im_end|>"',
    )
    assert set(lines) <= set(text.splitlines())
    two = modelfile(served, PLAIN, "m.gguf", temperature=0.7, tokens=12, ends=[2, 0])
    assert 'PARAMETER stop "<|im_end|>"\nPARAMETER stop "<|endoftext|>"\n' in two


@pytest.mark.parametrize(
    "prompting", [Prompting(), PLAIN, ODD], ids=["nothing", "plain", "odd"]
)
def test_what_stands_there_ends_neither_template_nor_file(prompting, smollm):
    """An action of Go's is only what was put there; three quotes end the file's template."""
    text = modelfile(
        with_serving_template(smollm, prompting), prompting, "m", temperature=1, tokens=3
    )
    assert text.count('"""') == 2
    actions = re.findall(r"\{\{ (.*?) \}\}", template_of(text), re.DOTALL)
    known = {"if .System", ".System", "else", "end", "range .Messages", 'if eq .Role "user"', ".Content",
             'else if eq .Role "assistant"', '"{{"', '"{"', r'"\"\"\""'}  # fmt: skip
    assert all(one in known or re.fullmatch(r'"\\U[0-9a-f]{8}"', one) for one in actions)
    assert all(c.isprintable() or c in "\n\t" for c in text)


GO = """package main

import ("encoding/json"; "os"; "text/template")

type Message struct { Role, Content string }

func main() {
    var given struct { Template, System string; Messages []Message }
    if err := json.NewDecoder(os.Stdin).Decode(&given); err != nil { panic(err) }
    made, err := template.New("").Option("missingkey=zero").Parse(given.Template)
    if err != nil { panic(err) }
    values := map[string]any{"System": given.System, "Messages": given.Messages, "Response": ""}
    if err := made.Execute(os.Stdout, values); err != nil { panic(err) }
}
"""


@pytest.mark.skipif(shutil.which("go") is None, reason="no Go (apt-get install golang-go)")
def test_by_go(smollm, tmp_path):
    """Its template engine, which Ollama's is, renders what the chat template renders."""
    (tmp_path / "main.go").write_text(GO)
    program = tmp_path / "render"
    subprocess.run(["go", "build", "-o", program, "main.go"], cwd=tmp_path, check=True)
    mine = {"role": "system", "content": "My {{ own }}."}
    for prompting in (Prompting(), PLAIN, ODD):
        served = with_serving_template(smollm, prompting)
        template = template_of(modelfile(served, prompting, "m", temperature=1, tokens=3))
        for messages in (TALK[:1], TALK, [mine, *TALK]):
            # as Ollama collects it
            system = messages[0]["content"] if messages[0] is mine else ""
            given = json.dumps({"Template": template, "System": system, "Messages": messages})
            done = subprocess.run([program], input=given, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert done.stdout == served.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )


def test_a_template_that_answers_twice_otherwise(smollm):
    import copy

    other = copy.copy(smollm)
    other.chat_template = (
        "{% for m in messages %}{{ loop.index }}{{ m['content'] }}|{% endfor %}"
    )
    with pytest.raises(ExportError, match="a second question unlike the first"):
        modelfile(other, Prompting(), "m", temperature=1, tokens=3)
