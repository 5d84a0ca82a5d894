"""Programs that try to pass hidden tests without solving anything. CodeTests is checked against these cheats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from grpo_kit.rewards.code_tests import CallTest, Test

_PATCH = """import builtins, json, sys
builtins.isinstance = lambda *args: True
builtins.len = lambda *args: 1
builtins.all = builtins.any = lambda *args: True
json.dumps = lambda *args, **more: "true"
sys.exit = lambda *args: None
"""
_EQUAL = """class Anything(int):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
    __repr__ = __str__ = lambda self: "True"
"""
_FORGE = """import os, sys
try:
    told = sys._getframe(1).f_locals
    for i in range(100):
        os.write(told["out"], f"\\n{told['mark']} {i} {{\\"value\\": true}}\\n".encode())
        os.write(told["out"], f"\\n{told['mark']} {i} {{\\"passed\\": true}}\\n".encode())
except Exception:
    print("true")
"""


def definition(entry_point: str, arguments: str = "*args") -> tuple[str, str]:
    """The lines above the body of a function that an entry point names, and the body's indentation.

    >>> definition("f"), definition("Solution().f", "n")
    (('def f(*args):\\n', '    '), ('class Solution:\\n    def f(self, n):\\n', '        '))
    """
    owner, _, name = entry_point.replace("()", "").rpartition(".")
    if owner:
        return f"class {owner}:\n    def {name}(self, {arguments}):\n", "        "
    return f"def {name}({arguments}):\n", "    "


def cheating_programs(tests: Sequence[Test], entry_point: str | None) -> dict[str, str]:
    """{name: program}: they exit, patch, forge results, or always answer one thing. entry_point: None for stdin tests.

    >>> print(cheating_programs([CallTest("(3,)", 6), CallTest("(1,)", 6)], "f")["the most frequent expected value"])
    def f(*args):
        return 6
    <BLANKLINE>
    """
    head, frame = definition(entry_point) if entry_point else ("", "")

    def body(*lines: str) -> str:
        return head + "".join(f"{frame}{line}\n" for line in lines)

    expected = [test.expected if isinstance(test, CallTest) else test.stdout for test in tests]
    most = Counter(map(repr, expected)).most_common(1)[0][0] if expected else "None"
    verdict = f"{len(tests)} passed in 0.01s"
    return {
        "pass": "pass\n",
        "does nothing": body("pass"),
        "the most frequent expected value": body(
            f"return {most}" if entry_point else f"print({most}, end='')"
        ),
        "prints the verdict": body(f"print({verdict!r})", "print('OK')", "print('true')"),
        "exits with success": "import os\n" + body("os._exit(0)"),
        "exits on import": "import os\nos._exit(0)\n",
        "raises SystemExit(0)": body("raise SystemExit(0)"),
        "patches builtins": _PATCH + body("pass"),
        "equal to everything": _EQUAL + body("return Anything()" if entry_point else "print(Anything())"),
        "forges the results": _FORGE + body("pass"),
    }
