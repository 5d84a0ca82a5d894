"""The code task and its files: every problem can be solved, hidden tests stay hidden, constants do not pass."""

import ast
import gzip
import json
import random
from dataclasses import replace

import pytest

from grpo_kit.more.code._code_files import load_problems
from grpo_kit.more.code._code_runner import CodeRunner, Job
from grpo_kit.more.code._code_tests import passes, read_tests
from grpo_kit.more.code._code_values import (
    AssertionNotReadError,
    decode,
    literal,
    read_assertions,
)
from grpo_kit.more.code.code import code
from grpo_kit.more.code.sandbox import isolation
from grpo_kit.rewards import check_rewards
from grpo_kit.tasks.rows import DataNotFoundError

RUNNER = CodeRunner(allow_unsafe=isolation() is None)

OWN = [
    {
        "name": f"{name}_{level}",
        "level": level,
        "question": f"Write a Python function {name}_{level}(n) that returns {what}.",
        "entry_point": f"{name}_{level}",
        "solution": f"def {name}_{level}(n):\n    return {body}",
        "tests": [[[n], n * factor + level] for n in (3, 0, 5, -4)],
    }
    for level in (1, 2, 3)
    for name, factor, what, body in (
        ("double", 2, f"n times 2 plus {level}", f"n * 2 + {level}"),
        ("negate", -1, f"{level} minus n", f"{level} - n"),
        ("tenfold", 10, f"n times 10 plus {level}", f"n * 10 + {level}"),
        ("half", 0.5, f"half of n plus {level}", f"n / 2 + {level}"),
    )
]
STDIN = {
    "name": "add",
    "level": 1,
    "question": "Write a program that reads two numbers from one line and prints their sum.",
    "solution": "a, b = map(int, input().split())\nprint(a + b)",
    "tests": [{"stdin": "3 4\n", "stdout": "7\n"}, {"stdin": "1 1\n", "stdout": "2\n"}],
}


def failing_solutions(problems):
    """{name: failure} for each problem whose own solution does not pass all its tests in the sandbox."""
    tests = [read_tests(problem["tests"]) for problem in problems]
    jobs = [
        Job.of(p["solution"], p["entry_point"], asked)
        for p, asked in zip(problems, tests, strict=True)
    ]
    failing = {}
    for problem, several, outcome in zip(problems, tests, RUNNER.run(jobs), strict=True):
        wrong = [
            (t, a) for t, a in zip(several, outcome.answers, strict=True) if not passes(a, t)
        ]
        failing |= {problem["name"]: outcome.error or str(wrong[0])} if wrong else {}
    return failing


@pytest.fixture
def write(tmp_path):
    def made(rows, name="problems.json"):
        path = tmp_path / name
        text = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
        path.write_bytes(
            gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
        )
        return path

    return made


# --- assertions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "args", "expected", "more"),
    [
        ("assert f(1, [2]) == (3,)", [1, [2]], (3,), {}),
        ("assert (3,) == f(1)", [1], (3,), {}),
        ("assert f({1: 'a'}) == {'a': 1}, 'message'", [{1: "a"}], {"a": 1}, {}),
        ("assert f() is True", [], True, {}),
        ("assert f() is None", [], None, {}),
        ("assert f('x')", ["x"], True, {}),
        ("assert not f('x')", ["x"], False, {}),
        ("assert f(-1) == 6.0 / 5", [-1], 1.2, {}),
        ("assert f('a' * 3) == [1] * 2 + [2]", ["aaa"], [1, 1, 2], {}),
        ("assert abs(f(1) - 2.5) < 1e-6", [1], 2.5, {"tolerance": 1e-6}),
        ("assert abs(2.5 - f(1)) <= 0.1", [1], 2.5, {"tolerance": 0.1}),
        ("assert math.isclose(f(1), 200.0, rel_tol=0.001)", [1], 200.0, {"tolerance": 0.2}),
        ("assert set(f([1])) == set([1, 2])", [[1]], {1, 2}, {"as": "set"}),
        ("assert sorted(f(2)) == [1, 2]", [2], [1, 2], {"as": "sorted"}),
        ("assert tuple(f(2)) == tuple([1, 2])", [2], (1, 2), {"as": "tuple"}),
    ],
)
def test_an_assertion_becomes_a_call_and_a_value(text, args, expected, more):
    (test,) = read_assertions(ast.parse(text).body, "f")
    assert ([decode(arg) for arg in test.pop("args")], decode(test.pop("expected"))) == (
        args,
        expected,
    )
    assert test == pytest.approx(more)


@pytest.mark.parametrize(
    "text",
    [
        "assert g(1) == 2",
        "assert f(x) == 2",
        "assert f(1) == f(2)",
        "assert f(1) == g(2)",
        "assert f(1) != 2",
        "assert f(1) > 2",
        "assert f(1) == 2 == 2",
        "assert f(n=1) == 2",
        "assert f(*[1]) == 2",
        "assert f(1)[0] == 2",
        "assert len(f(1)) == 2",
        "assert f(1) == 2 ** 10 ** 10",
        "assert f('a' * 10 ** 10) == 1",
        "assert f(1) == open('x')",
        "assert math.isclose(f(1), 2.0, other=1)",
        "for i in range(3):\n    assert f(i) == i",
        "import math",
        "x = 1",
    ],
)
def test_any_other_statement_is_refused(text):
    with pytest.raises(AssertionNotReadError):
        read_assertions(ast.parse(text).body, "f")


def test_assertions_of_constants_test_nothing():
    assert read_assertions(ast.parse("assert True, 'well'\nprint\n'text'").body, "f") == []
    with pytest.raises(AssertionNotReadError):
        read_assertions(ast.parse("assert False").body, "f")


@pytest.mark.parametrize(
    "text",
    ["(3 + 5, 6.0 / 5)", "[1] * 3 + [2]", "'ab' * 2", "-3 - 4", "2 ** 5", "set()", "{1}"],
)
def test_a_literal_is_what_python_makes_of_it(text):
    assert literal(ast.parse(text, mode="eval").body) == eval(text)


# --- files -----------------------------------------------------------------------------------------------

MBPP = [
    {
        "task_id": 11,
        "text": "Write a python function to double.",
        "code": "def helper(n): \r\n    return n\r\ndef dbl(n): \r\n    return helper(n) * 2",
        "test_list": ["assert dbl(1) == 2", "assert dbl(2)==4", "assert dbl(3) == 6"],
        "test_setup_code": "",
        "challenge_test_list": ["assert dbl('a') == 'aa'"],
    },
    {
        "task_id": 12,
        "text": "Is it even?",
        "code": "def even(n): return n % 2 == 0",
        "test_list": [
            "assert even(2) == True",
            "assert even(3) == False",
            "assert even(5) == False",
        ],
    },
    {
        "task_id": 13,
        "text": "Always.",
        "code": "def yes(n): return True",
        "test_list": ["assert yes(2) == True", "assert yes(3) == True"],
    },
    {
        "task_id": 14,
        "text": "Random.",
        "code": "def f(n): return n",
        "test_list": ["assert f(2) == 2", "assert f(x) == x"],
    },
    {
        "task_id": 15,
        "text": "Set up.",
        "code": "def f(n): return n",
        "test_list": ["assert f(2) == 2"],
        "test_setup_code": "x = 1",
    },
    {
        "task_id": 16,
        "text": "None.",
        "code": "def f(n): return n",
        "test_list": ["assert g(2) == 2"],
    },
]
HUMAN_EVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": 'def dbl(n):\n    """Twice n.\n    >>> dbl( 1 )\n    2\n    >>> dbl("x")\n    \'xx\'\n    """\n',
        "entry_point": "dbl",
        "canonical_solution": "    return n * 2\n",
        "test": "META = {}\n\ndef check(candidate):\n    assert candidate(1) == 2\n    assert candidate('x') == 'xx'\n"
        "    assert candidate(3) == 6, 'm'\n    assert True\n    assert abs(candidate(0.25) - 0.5) < 1e-6\n",
    },
    {
        "task_id": "HumanEval/1",
        "prompt": 'def same(n):\n    """n."""\n',
        "entry_point": "same",
        "canonical_solution": "    return n\n",
        "test": "def check(candidate):\n    for i in range(9):\n        assert candidate(i) == i\n",
    },
]


@pytest.mark.parametrize("name", ["mbpp.jsonl", "mbpp.jsonl.gz", "mbpp.json"])
def test_mbpp_files_load_and_what_does_not_is_named(write, name):
    loaded = load_problems(
        write([{"doc": row} for row in MBPP] if name.endswith("gz") else MBPP, name)
    )
    first, second = loaded.problems
    assert first["question"] == "Write a python function to double. Example: dbl(1) == 2"
    assert (first["name"], first["entry_point"], first["level"]) == ("11", "dbl", 1)
    assert [test["args"] for test in first["tests"]] == [[2], [3], ["a"]]
    # showing the first assertion would leave False, False: a constant
    assert second["question"].endswith("Example: even(3) == False")
    assert [test["expected"] for test in second["tests"]] == [True, False]
    reasons = {
        "13": "a constant would pass",
        "14": r"f\(x\)",
        "15": "set-up code",
        "16": "no function",
    }
    assert set(loaded.left_out) == set(reasons)
    for task_id, reason in reasons.items():
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(loaded.left_out[task_id])
    assert repr(loaded) == "CodeProblems(2 problems, 4 left out)"
    assert failing_solutions(loaded.problems) == {}


def test_human_eval_files_load_without_the_tests_that_the_prompt_shows(write):
    loaded = load_problems(write(HUMAN_EVAL, "h.jsonl"))
    (problem,) = loaded.problems
    assert [(test["args"], test["expected"]) for test in problem["tests"]] == [
        ([3], 6),
        ([0.25], 0.5),
    ]
    assert problem["tests"][1]["tolerance"] == 1e-6
    assert problem["question"].startswith("Complete this function.\ndef dbl(n):")
    assert list(loaded.left_out) == ["HumanEval/1"]
    assert failing_solutions(loaded.problems) == {}


def test_a_solution_that_fails_is_found():
    wrong = OWN[0] | {"name": "wrong", "solution": "def double_1(n):\n    return 7"}
    ends = OWN[0] | {"name": "ends", "solution": "raise SystemExit"}
    failing = failing_solutions([OWN[0], wrong, ends, STDIN | {"entry_point": None}])
    assert list(failing) == ["wrong", "ends"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"question": "double_1(3) is 7. Write double_1(n)."},
            r"shows the hidden test double_1\(3\)",
        ),
        ({"question": "Write a function."}, "does not name the function 'double_1'"),
        ({"question": " "}, "the question is ' '"),
        ({"tests": [[[1], True], [[2], True]]}, "a constant would pass"),
        ({"tests": []}, "a constant would pass"),
        ({"tests": [[[1]]]}, "test 0 is"),
        ({"entry_point": None}, "does not fit its tests"),
        ({"name": "negate_1"}, "names must differ"),
    ],
)
def test_a_problem_of_our_own_that_cannot_be_used_is_an_error(write, change, message):
    rows = [OWN[0] | change, *OWN[1:]]
    with pytest.raises(ValueError, match=message):
        load_problems(write(rows))


def test_files_that_are_none(write, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    with pytest.raises(DataNotFoundError, match="is no file; give a .json"):
        load_problems(tmp_path / "missing.json")
    with pytest.raises(ValueError, match="is no problem: it needs"):
        load_problems(write([{"question": "?", "answer": "!"}]))
    with pytest.raises(ValueError, match="is not JSON"):
        load_problems(broken)
    with pytest.raises(ValueError, match="holds no problem that can be used"):
        load_problems(write(MBPP[2:], "none.jsonl"))


@pytest.mark.parametrize(
    ("source", "loads", "of"), [("mbpp", 494, 500), ("humaneval", 152, 164)]
)
def test_the_published_files_load_and_a_sample_of_their_solutions_passes(source, loads, of):
    try:
        loaded = load_problems(source)
    except DataNotFoundError as error:
        pytest.skip(str(error))
    assert (len(loaded.problems), len(loaded.problems) + len(loaded.left_out)) == (loads, of)
    # 123 takes seconds
    sample = random.Random(0).sample([p for p in loaded.problems if p["name"] != "123"], 16)
    assert failing_solutions(sample) == {}


# --- the task --------------------------------------------------------------------------------------------


@pytest.fixture
def task(write):
    return code(source=write([*OWN, STDIN]), n_held_out=5, runner=RUNNER)


def test_rows_are_split_by_problem_and_level(write, task):
    path = write([*OWN, STDIN])
    assert (len(task.train), len(task.held_out)) == (8, 5)
    assert {row["level"] for row in task.held_out} == {1, 2, 3}
    questions = [row["question"] for row in task.train + task.held_out]
    assert len(set(questions)) == 13
    again, other = (
        code(source=path, n_held_out=5, seed=seed, runner=RUNNER) for seed in (0, 1)
    )
    assert (again.train, again.held_out) == (task.train, task.held_out)
    assert {row["question"] for row in other.held_out} != {
        row["question"] for row in task.held_out
    }
    for count in range(1, 12):
        levels = [
            row["level"] for row in code(source=path, n_held_out=count, runner=RUNNER).held_out
        ]
        assert len(levels) == count
        assert all(
            abs(levels.count(level) - count * n / 13) <= 1
            for level, n in ((1, 5), (2, 4), (3, 4))
        )
    easy = code(source=path, levels=(1,), n_held_out=2, runner=RUNNER)
    assert {row["level"] for row in easy.train + easy.held_out} == {1}


def test_every_rows_own_answer_earns_everything_and_other_answers_do_not(task):
    rows = task.train + task.held_out
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    completions = [f"{row['answer']}\n```" for row in rows]
    for reward in task.rewards:
        assert reward(completions, prefill=[task.prefill] * len(rows), **columns) == [
            1.0
        ] * len(rows)
    assert task.reward_weights == [0.125, 0.125, 0.75]
    for row, completion in zip(rows, completions, strict=True):
        assert task.is_correct(task.answer_of(completion), row)
    row, other = rows[0], rows[1]
    assert not task.is_correct(other["answer"], row)
    assert not task.is_correct("", row)
    assert not task.is_correct("no idea", row)
    assert task.answer_of("no block") is None


def test_one_wrong_test_is_not_correct(write):
    task = code(source=write(OWN), n_held_out=3, runner=RUNNER)
    row = next(row for row in task.train + task.held_out if row["entry_point"] == "double_1")
    assert task.is_correct("def double_1(n):\n    return n * 2 + 1", row)
    assert not task.is_correct("def double_1(n):\n    return n * 2 + 1 if n else 0", row)


def test_the_prompt_is_short_and_shows_no_hidden_test(task, smol_tokenizer):
    data = task.dataset(smol_tokenizer, "held_out")
    assert data.column_names == [
        "prompt",
        "prefill",
        "question",
        "answer",
        "entry_point",
        "tests",
        "level",
    ]
    for row, source in zip(data, task.held_out, strict=True):
        assert row["prompt"].endswith("```python\n")
        assert len(smol_tokenizer(row["prompt"]).input_ids) < 120
        assert read_tests(row["tests"]) == read_tests(source["tests"]) != ()
        assert source["answer"] not in row["prompt"]
        for test in read_tests(row["tests"]):
            assert (
                getattr(test, "args", None) is None
                or f"{row['entry_point']}{test.args}" not in row["prompt"]
            )
    batch = {
        name: data[name] for name in data.column_names if name not in ("prompt", "prefill")
    }
    completions = [f"{row['answer']}\n```" for row in task.held_out]
    for reward in task.rewards:  # as a trainer calls it: columns out of the data set
        assert reward(completions, prefill=data["prefill"], **batch) == [1.0] * 5


def test_cheats_do_not_pay(task):
    table = check_rewards(task.rewards, task, rows=5)
    assert table["total"].iloc[0] == 1.0
    assert (table["total"].iloc[1:] < 1.0).all()
    assert {
        "returns its first argument",
        "exits with success",
        "two blocks, right last",
    } <= set(table["case"])


def test_constants_are_programs_and_do_not_pass(task):
    assert task.best_constant(task.train + task.held_out)[1] == 0.0
    assert "always nothing" in task.strategies
    easy = {"question": "?", "entry_point": "f", "tests": "[[[1], 1], [[5], 5]]"}
    assert task.constant_accuracies([easy])["always its first argument"] == 1.0


def test_a_problem_may_ask_for_a_method_of_leetcodes_class(write):
    method = OWN[0] | {
        "name": "method",
        "question": "Write a class Solution with a method twice(self, n) that returns n times 2 plus 1.",
        "entry_point": "Solution().twice",
        "solution": "class Solution:\n    def twice(self, n):\n        return n * 2 + 1",
    }
    task = code(source=write([*OWN, method]), n_held_out=3, runner=RUNNER)
    row = next(
        row for row in task.train + task.held_out if row["entry_point"] == "Solution().twice"
    )
    assert task.is_correct(row["answer"], row)
    assert set(task.constant_accuracies([row]).values()) == {0.0}
    alone = replace(
        task, held_out=[row], train=[other for other in task.train if other is not row]
    )
    assert (check_rewards(task.rewards, alone)["total"].iloc[1:] < 1.0).all()
    with pytest.raises(ValueError, match=r"shows the hidden test twice\(3\)"):
        load_problems(
            write([method | {"question": "twice(3) is 7: write Solution with twice."}])
        )


def test_bad_arguments(write):
    path = write(OWN)
    with pytest.raises(ValueError, match=r"levels=\(4,\) .* \[1, 2, 3\]"):
        code(source=path, levels=(4,))
    with pytest.raises(ValueError, match=r"levels=\(\)"):
        code(source=path, levels=())
    for count in (0, 12):
        with pytest.raises(
            ValueError, match=f"n_held_out={count}: there are 12 problems; use 1..11"
        ):
            code(source=path, n_held_out=count)


def test_the_shipped_problems_are_usable():
    task = code(runner=RUNNER)
    rows = task.train + task.held_out
    assert len(rows) >= 60
    assert (
        {row["level"] for row in task.train}
        == {row["level"] for row in task.held_out}
        == {1, 2, 3}
    )
    problems = [row | {"name": str(i), "solution": row["answer"]} for i, row in enumerate(rows)]
    assert failing_solutions(problems) == {}
