"""One text in the many ways people and models write it: the table of spellings that mean the same.

`plain(text)` brings gold and answer alike to one spelling. It changes how a thing is written, never what it says: a
superscript stays a power, ½ stays a half, a sign that is not in the table stays where it is and is not understood.

Longer than 300 lines because it is one table.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

# Characters, and the command that LaTeX has for them.
_NAMED = (
    "×✕✖⨯ times | ·⋅∙•∗＊ cdot | ∞ infty | ≤⩽≦ le | ≥⩾≧ ge | ≠ ne | ≈≃ approx | ≅ cong | ∼ sim | → to | "
    "⇒ Rightarrow | ¬ neg | ∀ forall | ∃ exists | ∠ angle | △ triangle | ∥ parallel | ⊥ perp | ⊂ subset | "
    "⊆ subseteq | ∧ land | ≡ equiv | ∈ in | ∪ cup | ∩ cap | ∅⌀ emptyset | ± pm | ∓ mp | ∘ circ | "
    "…⋯ ldots | ⟨〈 langle | ⟩〉 rangle | ⌊ lfloor | ⌋ rfloor | ⌈ lceil | ⌉ rceil | ∑ sum | ∏ prod | "
    "∖ setminus | ∨ lor | µμ mu | ‰ permille | α alpha | β beta | γ gamma | δ delta | ε epsilon | "
    "ζ zeta | η eta | θϑ theta | ι iota | κ kappa | λ lambda | ν nu | ξ xi | π pi | ρ rho | σ sigma | "
    "τ tau | υ upsilon | φϕ phi | χ chi | ψ psi | ω omega | Γ Gamma | Δ Delta | Θ Theta | Λ Lambda | "
    "Ξ Xi | Π Pi | Σ Sigma | Φ Phi | Ψ Psi | Ω Omega"
)
# What any other character is written as. Reason: keyboards, fonts and languages differ, the value does not.
_SIGNS = {
    "−‐‑‒–—﹣⁻": "-",  # minus and dashes
    "＋⁺": "+",
    "÷": " / ",
    "∕⁄／": "/",
    "°º˚": r"^\circ ",
    "′’‘ʼ＇": "'",
    "″“”„＂": '"',
    "ℝ": r" \mathbb{R} ",
    "ℤ": r" \mathbb{Z} ",
    "ℕ": r" \mathbb{N} ",
    "ℚ": r" \mathbb{Q} ",
    "ℂ": r" \mathbb{C} ",
    "∣": "|",
    "∶": ":",
    "٪﹪": "%",
    "।": ".",
    "：": ":",
    "٫": ".",
    "٬": ",",
    "、，﹐": ",",
    "；": ";",
    "。．": ".",
    "\r": "\n",
}
_CHARACTERS: dict[str, str] = {}
for _signs, _replacement in _SIGNS.items():
    _CHARACTERS |= dict.fromkeys(_signs, _replacement)
for _row in _NAMED.split(" | "):
    _signs, _name = _row.split()
    _CHARACTERS |= dict.fromkeys(_signs, f" \\{_name} ")
_HIGH_ROOT = re.compile("([²³⁴⁵⁶⁷⁸⁹])√")
_SMALL_FRACTION = re.compile("([⁰¹²³⁴⁵⁶⁷⁸⁹]+)[⁄/]([₀₁₂₃₄₅₆₇₈₉]+)")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
# Nothing to see, nothing to read: zero-width marks, directions of writing, soft hyphens, emoji's variants.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufe00-\ufe0f\ufeff]"
)
# decompositions that change the font alone
_KEEP_VALUE = ("<wide>", "<narrow>", "<font>", "<compat>")

_UPRIGHT = {"m": "metres", "g": "grams", "h": "hours", "s": "seconds", "L": "litres", "N": "newtons", "J": "joules",
            "W": "watts", "V": "volts", "K": "kelvin"}  # fmt: skip
# (what is written, what it becomes), in this order.
_LATEX = [
    # sizes of brackets and signs
    (r"\\(?:left|right)\s*\.|\\(?:displaystyle|textstyle|limits|nolimits|left|right|[bB]igg?[lrm]?)(?![A-Za-z])", ""),
    (r"\\(?:[dtc]|nice|s)frac(?![A-Za-z])", r"\\frac"),  # size of a fraction
    (r",\\!\s*", ","),  # thousands as MATH writes them: 10,\!000
    (r"\{([,.])\}", r"\1"),  # thousands in LaTeX: 1{,}234
    (r"(?<!\\)\\!", ""),  # a negative space
    # spaces
    (r"\\(?:quad|qquad|thinspace|hspace\{[^}]*\})(?![A-Za-z])|(?<!\\)\\[,;: >]|(?<=\S)~(?=\S)", " "),
    (r"(?<=[\d})])(?:\\[,; ]|[\s~])*\\(?:text|mathrm|mbox|textrm)\s*\{\s*([mghsLNJWVK])\s*\}",
     lambda m: f" {_UPRIGHT[m[1]]} "),  # an upright letter behind a number is a unit
    (r"\\(?:text|textbf|textit|textrm|textnormal|mbox|hbox|mathrm|mathbf|mathit|mathsf|operatorname\*?|rm|bf)"
     r"\s*\{([^{}]*)\}", r" \1 "),  # words and upright letters
    (r"(?<!\\)\\([$%#&])", r"\1"),  # signs that LaTeX escapes
    (r"\\lt(?![A-Za-z])", "<"),  # one name a relation
    (r"\\gt(?![A-Za-z])", ">"),  # one name a relation
    (r"\\neq(?![A-Za-z])|\\not\s*=|!=", r"\\ne"),  # one name a relation
    # one name a relation, those of programmers too
    (r"\\(?:leq|leqslant)(?![A-Za-z])|<=|=<", r"\\le"),
    (r"\\(?:geq|geqslant)(?![A-Za-z])|>=", r"\\ge"),
    (r"\\(?:dots|cdots|dotsc)(?![A-Za-z])|\.\.\.", r"\\ldots"),  # an ellipsis
    (r"\\(?:varnothing)(?![A-Za-z])", r"\\emptyset"),  # the empty set
    # braces by name
    (r"\\(?:lbrace|rbrace)(?![A-Za-z])", lambda m: "\\{" if "l" in m[0][:3] else "\\}"),
    (r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])", "|"),  # bars by name
    (r"\\degree(?![A-Za-z])|\^\{\s*\\circ\s*\}", r"^\\circ"),  # degrees
    (r"\\div(?![A-Za-z])", "/"),  # division
    (r"\*\*", "^"),  # a power in Python
    (r"->", r" \\to "),  # an arrow on a keyboard
    # colours
    (r"\\(?:textcolor|color)\s*\{[a-zA-Z]+\}|\\(?:tiny|small|large|Large|huge|Huge)(?![A-Za-z])", " "),
    (r"</?(?:b|i|strong|em|u|p|span|br)\s*/?>", " "),  # tags of a page
    (r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1 \2"),  # siunitx
    (r"(?<![\d.,])(\d+),(\d\d)(?=\s?(?:€|EUR\b|[eE]uros?\b))", r"\1.\2"),  # prices in euros
    (r"(?<=€)\s?(\d+),(\d\d)(?!\d)", r"\1.\2"),  # prices in euros
    (r"(?i)^(?:in )?(?:the year|in) (?=\d{4}$)", ""),  # a year
    (r"^([a-zA-Z]) equals (?=\S)", r"\1 = "),  # a name in a sentence
    (r"^(-?\d+) squared$", r"\1^2"),  # a power in words
    (r"^(-?\d+) cubed$", r"\1^3"),  # a power in words
    (r"\^\{?\s*\\prime\s*\}?", "'"),  # a derivative
    # a function of a function
    (r"\(\s*([A-Za-z])\s*\\circ\s*([A-Za-z])\s*\)\s*\(([^()]*)\)", r"\1(\2(\3))"),
    (r"\{\\(?:bf|rm|it|cal|sf)\s+([^{}]*)\}", r" \1 "),  # letters of another face
    # faces and lines
    (r"\\(?:ensuremath|underline|boldsymbol|mathnormal)\s*\{([^{}]*)\}", r" \1 "),
    (r"&gt;", ">"),  # a page's signs
    (r"&lt;", "<"),  # a page's signs
    (r"\b(?:math|np|numpy|sympy|sp)\.(?=[a-z])", ""),  # Python's modules
    (r"\b(?:Fraction|Rational)\((-?\d+), ?(\d+)\)", r"\1/\2"),  # Python's fractions
    (r"\b(?:Matrix|np\.array|array)\((\[\[.*\]\])\)", r"\1"),  # Python's matrices
    (r"\\(?:lor|vee)(?![A-Za-z])", " or "),  # logic
    (r"\\(?:land|wedge)(?![A-Za-z])", " and "),  # logic
    (r"(?<=[\])])\s*U\s*(?=[\[(])", r" \\cup "),  # a union on a keyboard
    (r"\\(?:backslash|smallsetminus)(?![A-Za-z])", r"\\setminus"),  # a set without another
    (r"\\(?:mathbb|Bbb)\s*\{?\s*([RZNQC])\s*\}?|\\([RZNQC])(?![A-Za-z])|(?<=\\in)\s*([RZNQC])\s*$",
     r"\\mathbb{\1\2\3}"),  # sets of numbers
    # a real letter
    (r"(?<=\S),?\s+(?:for )?[a-z]\s*\\in\s*\\mathbb\{R\}$|,\s*[a-z]\s*\\in\s*\\mathbb\{R\}$", ""),
    (r"(\\\\)\[[\d.]+(?:pt|em|ex|mm|cm)\]", r"\1"),  # room between rows
    # brackets of a matrix
    (r"^[\[(]\s*(\\begin\{(?:array|matrix)\}.*\\end\{(?:array|matrix)\})\s*[\])]$", r"\1"),
    (r"\\var(phi|epsilon|theta|rho)(?![A-Za-z])", r"\\\1"),  # letters of another shape
    (r"\\bar(?![A-Za-z])", r"\\overline"),  # a line above
    (r"\\rightarrow(?![A-Za-z])", r"\\to"),  # logic
    (r"\\lnot(?![A-Za-z])", r"\\neg"),  # logic
    (r"(?i)^\s*all (?:real numbers|reals) (?=except )", r"\\mathbb{R} "),  # sets in words
    (r"\\colon(?![A-Za-z])", ":"),  # a ratio's colon
    (r"(?<!\\)\bper ?mill?e?\b", r" \\permille "),  # in a thousand
    (r"^(?:minus|negative) (?=[\d\\])", "-"),  # a sign in words
    (r"(?<=\d) over (?=\d)", "/"),  # a fraction in words
    (r"(?<=\d) and (?=\d+\s*/\s*\d+(?!\d)|\\frac)", " "),  # a mixed number in words
]  # fmt: skip
_LATEX = [(re.compile(pattern), replacement) for pattern, replacement in _LATEX]
_WRAPPERS = [  # what stands around a whole answer and says nothing
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("```", "```"), ("`", "`"),
    ("*", "*"), ('"', '"'), ("_", "_"),
]  # fmt: skip
_BARE = re.compile(r"-?\d+(?:\.\d+)?|[A-Za-z]+", re.A)
_DOLLARS = re.compile(r"(?<!\\)\$")
_FORMULA = re.compile(r"(?<!\\)\$((?:\\\$|[^$])+?)(?<!\\)\$")
_BOXES = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SYSTEM = re.compile(
    r"(?:\\left)?\s*(?:\\\{)?\s*\\begin\{cases\}(.*=.*)\\end\{cases\}(?:\s*\\right\s*\.)?", re.S
)
_LINES = re.compile(
    r"\\begin\{(aligned|align\*?|equation\*?|gather\*?|split)\}(.*)\\end\{\1\}", re.S
)
# Words before an answer that only announce it. "The answer is not 5" leaves "not 5", which is no number.
_WHAT = (
    r"(?:(?:final |correct |right |total )?(?:answer|result|solution|value|total|sum|difference|product|quotient|ratio|"
    r"area|perimeter|volume|length|width|height|distance|probability|cost|price|average|mean|median|mode|number|time|speed)"
    r"(?: of (?:the )?[a-z]+)?|(?<=the )[a-z]+(?: [a-z]+){0,3}(?= is\b))"
)
_LEAD_IN = re.compile(
    r"(?:(?:so|thus|hence|therefore|then),? |\\therefore\s*)?"
    rf"(?:(?:the |my |your |our )?{_WHAT}\s*(?:is|are|equals|will be|must be|:|=|\n)(?: (?:therefore|thus|then))?"
    r"(?: exactly| equal to)?\s*:?|"
    r"it(?: is|'s| equals)\b|(?:we|you|i) (?:get|have|find|obtain)\b|equals\b|exactly\b|just\b|only\b|a total of\b|"
    r"=|#{1,6}(?= )|答:|答案(?:是|为|為|:)|答え(?:は|:)|la respuesta es:?|respuesta:|"
    r"die antwort (?:ist|lautet):?|antwort:|la réponse est:?|réponse ?:|la risposta è:?|"
    r"risposta:|a resposta é:?|resposta:|ответ:?)\s*(?=\S)",
    re.I,
)
_ANNOUNCES = re.compile(r"(?:so|thus|hence|therefore),? (?=\S)|\\therefore\s*(?=\S)", re.I)
# A word and a colon: "Length: 5 cm". One letter and a colon is a choice.
_LABEL = re.compile(r"[a-z]{2,}(?: [a-z]+){0,3}:\s+(?=\S)", re.I)
_THE_OPTION = re.compile(r"the (?:correct|right) (?:option|choice|answer) is", re.I)
_TAKES_BACK = re.compile(
    r"\b(?:not|no|never|n't|wrong|false|incorrect|invalid|opposite|negative|inverse|reciprocal|square|cube|half|double|"
    r"twice|option|choice|either|if|except|exclud\w+|without|un\w+|less|more|than|minus|plus|times|"
    r"bound|limit|estimate|guess|least|most|other|rest|remainder|same|question|problem)\b",
    re.I,
)


@lru_cache(4096)
def plain(text: str) -> str:
    r"""The text in one spelling: signs of Unicode as LaTeX, wrappers and the sentence's end gone, spaces single.

    >>> plain("**−1 234 €**"), plain(r"The answer is $\dfrac{1}{2}$."), plain("2½ cm²")
    ('-1 234 €', '\\frac{1}{2}', '2\\frac{1}{2} cm^{2}')
    """
    if _BARE.fullmatch(text):  # most answers, and nothing to change
        return text
    text = _inner(letters(text).strip())
    if len(_DOLLARS.findall(text)) % 2 == 0:  # formulas in a sentence: $5$ apples
        text = _FORMULA.sub(r" \1 ", text)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return re.sub(r"\s+", " ", _inner(text)).strip()


def letters(text: str) -> str:
    """The text in the letters, digits and signs that the reader knows; see _SIGNS."""
    text = _INVISIBLE.sub("", unicodedata.normalize("NFC", text))
    if text.isascii():
        return text.replace("\r\n", "\n")
    text = _SMALL_FRACTION.sub(lambda m: rf"\frac{{{_flat(m[1])}}}{{{_flat(m[2])}}}", text)
    text = _HIGH_ROOT.sub(lambda m: rf"\sqrt[{_flat(m[1])}]", text)
    text = re.sub(
        "((?:\\d\u0305)+)", lambda m: rf"\overline{{{m[0].replace(chr(0x305), '')}}}", text
    )
    text = re.sub(r"(\d{4})年(\d{1,2})月(\d{1,2})日", r"\1-\2-\3", text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: f"^{{{_flat(m[0])}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋]+", lambda m: f"_{{{_flat(m[0])}}}", text)
    text = re.sub(r"([√∛∜])\s*(\d+)", lambda m: f"{_ROOTS[m[1]]}{{{m[2]}}}", text)
    text = re.sub(r"([√∛∜])\s*", lambda m: _ROOTS[m[1]], text)
    return "".join(map(_letter, text.replace("\r\n", "\n")))


def _flat(text: str) -> str:
    """Superscripts and subscripts as plain digits and signs."""
    return text.translate(_SUPERSCRIPTS | _SUBSCRIPTS)


@lru_cache(4096)
def _letter(char: str) -> str:
    if char.isascii():
        return char
    if char in _CHARACTERS:
        return _CHARACTERS[char]
    if unicodedata.category(char) == "Nd":
        return str(unicodedata.decimal(char))
    if unicodedata.category(char) == "Zs":
        return " "
    kind, _, _ = unicodedata.decomposition(char).partition(" ")
    plain_char = unicodedata.normalize("NFKC", char)
    if kind == "<fraction>":
        top, _, bottom = plain_char.partition("\u2044")
        if bottom:
            return rf"\frac{{{top}}}{{{bottom}}}"
    if kind not in _KEEP_VALUE or plain_char == char:
        return char
    return "".join(map(_letter, plain_char))


def _inner(text: str) -> str:
    """The text without wrappers, announcing words and the full stop."""
    previous = None
    while text != previous:
        previous, text = text, text.strip()
        text = re.sub(r"(?<=[^.\s])\s*\.$|^\.$", "", text)  # a sentence's end, no ellipsis
        text = _unwrapped(text)
        box = _BOXES.search(text)
        if box and len(_BOXES.findall(text)) == 1:
            closing = _closing_brace(text, box.end())
            if closing:
                end = closing.start()
                text = f"{text[: box.start()]} {text[box.end() : end]} {text[end + 1 :]}"
        system = _SYSTEM.fullmatch(text)
        if system:
            text = re.sub(r"\\\\", ", ", system[1].replace("&", "")).strip(" ,")
        lines = _LINES.fullmatch(text)
        if lines:
            text = re.sub(r"(?<!\\)&", "", lines[2])
            text = re.sub(r"\\\\\s*(?==)", " ", text)
        bare = re.sub(r"^\*\*([^*]+?)\*\*", r"\1", text)
        lead = _LEAD_IN.match(bare) or _ANNOUNCES.match(bare) or _LABEL.match(bare)
        if lead and (_THE_OPTION.match(lead[0]) or not _TAKES_BACK.search(lead[0])):
            text = bare[lead.end() :]
    return text


def _unwrapped(text: str) -> str:
    for opening, closing in _WRAPPERS:
        inside = text.removeprefix(opening).removesuffix(closing)
        if (
            inside
            and text == opening + inside + closing
            and opening not in inside
            and closing not in inside
        ):
            return inside
    return text


def _closing_brace(text: str, start: int) -> re.Match | None:
    """The brace that closes the one that is open at start."""
    depth = 1
    for brace in re.compile(r"(?<!\\)[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace
    return None


def exact(text: str) -> str:
    """The same characters, in one encoding of them: NFC, LF, nothing invisible, no white space at the ends.

    >>> exact("cafe\\u0301\\r\\n\\u200b") == "caf\\u00e9"
    True
    """
    text = _INVISIBLE.sub("", unicodedata.normalize("NFC", text))
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()
