"""Runs inside the sandbox: calls a function and writes down what it returned. Sent as text, never imported there.

This code knows the program and the arguments, but no expected answer. A program that takes over its functions
gains nothing. The parent judges everything that is written as data.
"""

import builtins
import os
import sys

try:  # importing all of json takes as long as starting the interpreter
    from _json import encode_basestring_ascii as quoted
except ImportError:
    from json import dumps as quoted

NOT_PYTHON = 97  # exit code of a program that does not compile
_DEEP = 40
LONGEST = 32_000  # characters of one result


def encode(value, depth=0):
    """The value as JSON: plain types only. A type that JSON lacks becomes an object with one key, {"$tuple": [...]}.

    Subclasses count as the plain type below them (Counter -> dict), read by that type's own methods.
    Raises TypeError for any other object, ValueError for nesting deeper than 40.

    >>> encode({"a": (1, None)}), encode({1: {2}})
    ({'a': {'$tuple': [1, None]}}, {'$dict': [[1, {'$set': [2]}]]})
    """
    if depth > _DEEP:
        raise ValueError(f"nested deeper than {_DEEP}")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__add__(value, 0)
        # str() of it is quadratic
        return number if -(2**53) <= number <= 2**53 else {"$int": hex(number)}
    if isinstance(value, float):
        return float.__add__(value, 0.0)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return {"$bytes": bytes.hex(value)}
    if isinstance(value, complex):
        number = complex.__pos__(value)
        return {"$complex": [number.real, number.imag]}
    if isinstance(value, dict):
        pairs = [
            [encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value)
        ]
        if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": pairs}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items = [encode(item, depth + 1) for item in kind.__iter__(value)]
            return items if kind is list else {f"${kind.__name__}": items}
    raise TypeError(f"a {type(value).__name__} is no plain value")


def as_json(data):
    """json.dumps of what encode() returns.

    >>> as_json({"value": [1, None, "a"]})
    '{"value": [1, null, "a"]}'
    """
    if data is None or data is True or data is False:
        return {None: "null", True: "true", False: "false"}[data]
    if isinstance(data, str):
        return quoted(data)
    if isinstance(data, int):
        return int.__repr__(data)
    if isinstance(data, float):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(
            repr(data), repr(data)
        )
    if isinstance(data, list):
        return "[" + ", ".join([as_json(item) for item in data]) + "]"
    return (
        "{" + ", ".join([f"{quoted(key)}: {as_json(item)}" for key, item in data.items()]) + "}"
    )


def compiled(source):
    """The program's code; the process ends here if it is not Python, before any of it has run."""
    try:
        return compile(source, "solution.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        os._exit(NOT_PYTHON)


def run_script(source):
    """Run the program as a script: its own stdin, stdout and exit code."""
    # Python's site gives these to scripts; there is none in the sandbox.
    builtins.exit = builtins.quit = sys.exit
    exec(compiled(source), {"__name__": "__main__"})


def find(module, entry_point):
    """The function of an entry point: "f", "Solution.f" or "Solution().f"; f may be in a class Solution.

    Each call of a method gets a new object, as on LeetCode.
    """
    owner, _, name = entry_point.replace("()", "").rpartition(".")
    if not owner and not hasattr(module, name) and hasattr(module, "Solution"):
        owner = "Solution"

    def function():
        return getattr(getattr(module, owner)() if owner else module, name)

    if not callable(function()):
        raise TypeError(f"{entry_point} is not callable")
    return (lambda *args: function()(*args)) if owner else function()


def call_all(source, entry_point, calls, mark):
    """Run the program as a module, call the function with each text of arguments, and write one line per call.

    A line is: mark, number of the call, JSON: {"value": ...}, {"other": why it is no plain value} or
    {"error": exception}. Number -1 reports: the program ran and has the function; ending in exit() counts as run. The
    program's own output is thrown away. Each call gets its own copy of the arguments.
    """
    code = compiled(source)
    out = os.dup(1)
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    except OSError:
        pass  # the mark still distinguishes these lines from the program's
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8", errors="replace")

    def tell(place, result):
        text = as_json(result)
        if len(text) > LONGEST:
            text = as_json({"other": f"longer than {LONGEST} characters"})
        line = f"\n{mark} {place} {text}\n".encode()
        while line:
            line = line[os.write(out, line) :]

    def described(error):
        try:
            return f"{type(error).__name__}: {error}"[:200]
        except Exception:
            return "an exception without a text"

    builtins.exit = builtins.quit = sys.exit
    module = type(sys)("solution")
    sys.modules["solution"] = module
    try:
        if "class Solution" in source:  # LeetCode's code stub uses List and Optional
            exec("from typing import *", module.__dict__)
        try:
            exec(code, module.__dict__)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise ValueError(f"exit code {error.code}") from None
        function = find(module, entry_point)
    except Exception as error:
        tell(-1, {"error": described(error)})
        os._exit(1)
    tell(-1, {"value": None})
    inf, nan = float("inf"), float("nan")
    # repr writes these names, which Python itself does not have.
    names = {"inf": inf, "nan": nan, "infj": complex(0, inf), "nanj": complex(0, nan)}
    for place, text in enumerate(calls):
        args = eval(text, names)
        try:
            value = function(*args)
        except Exception as error:
            tell(place, {"error": described(error)})
            continue
        try:
            result = {"value": encode(value)}
        except Exception as error:
            result = {"other": described(error)}
        tell(place, result)
    os._exit(0)
