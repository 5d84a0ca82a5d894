"""One word per thing: those words of the design that can be searched for, in all that people read."""

import ast
import json
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Names that are not ours to choose.
LOGPS_OF_TRL = {
    "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps",
    "_get_per_token_logps_and_entropies", "logps/chosen", "logps/rejected",
}  # fmt: skip
CALLS = {  # a length that is not ours to name: the calls that may be given it
    "max_new_tokens": r"generate|GenerationConfig",
    "max_completion_length": r"\w*Config|loop.config",
}
GROUP_WORDS = re.compile(
    r"\b(?:silent|mixed|unanimous|disagreeing)[ _-]groups?\b"
    r"|\bgroups?(?: of \w+)? (?:that |which )?(?:(?:is|are|was|were|becomes?|stays?) )?(?:silent|mixed|unanimous)\b"
    r"|\bgroups?(?: of \w+)? (?:that |which )?disagree[sd]?\b"
    r"|\bgroups? (?:with|without) (?:a |any )?spread\b|\bgroups? (?:has|have|had) (?:a|no) spread\b",
    re.IGNORECASE,
)

SAVED = "a label in the saved output of a real run; it goes when the notebook is run again"
OF_TRL = "the name of TRL's argument: a key of its config, or a message that names what the reader has set there"
OF_TRANSFORMERS = "the name of the argument in transformers, whose GenerationConfig it is about"
ALLOWED = {  # (file, word): (how often at most, why)
    ("benchmarks/flag_fixtures.py", "max_completion_length"): (1, OF_TRL),
    ("benchmarks/oracle/cases.py", "max_completion_length"): (1, OF_TRL),
    ("benchmarks/oracle/textbook.py", "max_completion_length"): (1, OF_TRL),
    ("grpo_kit/_support/argument_checks.py", "max_completion_length"): (
        1,
        "what other libraries call a field",
    ),
    ("grpo_kit/_support/argument_checks.py", "max_new_tokens"): (
        2,
        "what other libraries call a field",
    ),
    ("grpo_kit/more/bridges/_trl_config.py", "max_completion_length"): (2, OF_TRL),
    ("grpo_kit/more/bridges/_trl_fields.py", "max_completion_length"): (2, OF_TRL),
    ("grpo_kit/engine/rollout.py", "max_new_tokens"): (4, OF_TRANSFORMERS),
    ("grpo_kit/engine/_supported_models.py", "max_new_tokens"): (1, OF_TRANSFORMERS),
    ("grpo_kit/engine/_update_memory.py", "max_completion_length"): (1, OF_TRL),
    ("grpo_kit/watch/_red_flag.py", "max_completion_length"): (2, OF_TRL),
    ("notebooks/12_is_the_model_ready.ipynb", "groups"): (1, SAVED),
}


def offences(text: str, *, code: bool = False) -> list[tuple[str, str]]:
    """(word, the place) for each use of a word that the design has another one for."""
    found = []
    for match in re.finditer(r"\w*logps(?:/\w+|\w*)", text, re.IGNORECASE):
        if match[0] not in LOGPS_OF_TRL:
            found.append(("logps", match[0]))
    lines = text.splitlines()
    for word in CALLS:
        fine = _lines_that_may(text, word) if code else set()
        found += [
            (word, lines[n - 1].strip()) for n in _lines_with(text, word) if n not in fine
        ]
    # A phrase may go over the end of a line, of comments too.
    flowing = re.sub(r"\s*\n\s*(?:#:? )?", " ", text)
    found += [("groups", match[0]) for match in GROUP_WORDS.finditer(flowing)]
    return found


def _lines_with(text: str, word: str) -> list[int]:
    return [n for n, line in enumerate(text.splitlines(), 1) if re.search(rf"\b{word}\b", line)]


def _lines_that_may(code: str, word: str) -> set[int]:
    """Lines on which `word` is given to one of its calls, or read off an object as an attribute."""
    code = re.sub(r"^%%writefile.*\n", "", code)  # a notebook's file, or a part of one
    # and its commands
    code = re.sub(r"^(\s*)[!%].*$", r"\1pass", textwrap.dedent(code), flags=re.MULTILINE)
    fine: set[int] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if re.fullmatch(CALLS[word], name):
                fine |= {keyword.lineno for keyword in node.keywords if keyword.arg == word}
        elif isinstance(node, ast.Attribute) and node.attr == word:
            fine.add(node.end_lineno or node.lineno)
    return fine


def _texts(path: Path) -> list[tuple[str, bool]]:
    """What people read of a file, and whether it is code; of a notebook the cells without their outputs."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return [(text, path.suffix == ".py")]
    return [
        ("".join(cell["source"]), cell["cell_type"] == "code")
        for cell in json.loads(text)["cells"]
    ]


def _files() -> list[Path]:
    found = [
        *ROOT.glob("grpo_kit/**/*.py"),
        *ROOT.glob("benchmarks/**/*.py"),
        *ROOT.glob("examples/*.py"),
        *ROOT.glob("notebooks/*.ipynb"),
    ]
    return sorted([*found, ROOT / "README.md", *ROOT.glob("docs/*.md")])


def test_one_word_per_thing():
    places = {key: [] for key in ALLOWED}
    for path in _files():
        name = path.relative_to(ROOT).as_posix()
        for text, code in _texts(path):
            for word, place in offences(text, code=code):
                places.setdefault((name, word), []).append(place)
    most = {key: ALLOWED.get(key, (0, "not allowed here")) for key in places}
    too_many = {
        key: (*most[key], where) for key, where in places.items() if len(where) > most[key][0]
    }
    assert not too_many, "(file, word): (at most, why, places)"
    assert not [key for key, where in places.items() if not where], (
        "not there any more: take it out of ALLOWED"
    )


def test_every_exception_is_of_a_file_that_is_looked_at():
    assert {file for file, _ in ALLOWED} <= {
        path.relative_to(ROOT).as_posix() for path in _files()
    }


@pytest.mark.parametrize(
    "word, bad",
    [
        ("logps", "old_logps = score(model)"),
        ("logps", "per_token_logps"),
        ("max_new_tokens", "def ask(model, max_new_tokens=8): ..."),
        ("max_new_tokens", "complete(model, tokenizer, prompts, max_new_tokens=8)"),
        ("max_new_tokens", 'how = {"max_new_tokens": 8}'),
        ("max_completion_length", "dr_grpo(p, p, A, mask, max_completion_length=4)"),
        ("max_completion_length", "# max_completion_length: of one turn"),
        ("groups", "# the share of silent groups"),
        ("groups", "# resample groups\n# without spread"),
        ("groups", "# a group of 8 disagrees one time in seven"),
        ("groups", "# some groups are mixed"),
    ],
)
def test_the_search_finds(word, bad):
    assert [found for found, _ in offences(bad, code=True)] == [word]


@pytest.mark.parametrize(
    "good",
    [
        'inputs["old_per_token_logps"] = logprobs',
        'log["logps/chosen"]',
        "model.generate(\n    ids,\n    max_new_tokens=8,\n)",
        "!ls\nlimit = generation_config.max_new_tokens",
        "GRPOConfig(max_completion_length=8)\nargs.max_completion_length",
        "# a silent error; people disagree; the mixed precision of a group; groups with a signal",
    ],
)
def test_the_search_leaves_alone(good):
    assert not offences(good, code=True)
