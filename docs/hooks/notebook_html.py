"""A notebook as mkdocs-jupyter renders it, in the look of the site: links lead to pages, formulas are MathML.

Left out is what JupyterLab would bring into every page: 0.6 MB of styles, and scripts that ask other servers.
"""

from __future__ import annotations

import html
import re
import warnings
from collections.abc import Callable, Container, Mapping

from latex2mathml.converter import convert

warnings.filterwarnings(
    "ignore", "Your element with mimetype"
)  # a display that was emptied in the end

WORDS = re.compile(r'(<div class="jp-RenderedHTMLCommon jp-RenderedMarkdown.*?</div>)', re.S)
CODE = re.compile(r"(<(code|pre)\b.*?</\2>)", re.S)
MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.S)
CELL = re.compile(
    r'<div class="zeroclipboard-container">.*?<pre>(.*?)</pre></div>\s*<div class="clipboard-copy-txt".*?</div>',
    re.S,
)
INPUT = re.compile(
    r'(jp-CodeCell[^"]*" id="cell-id=([^"]+)">.*?)(<div class="highlight"><pre><code>.*?</code></pre></div>)',
    re.S,
)
LINK = re.compile(r'(<a [^>]*?href=")(?!\w+:|#)([^"#]+)')
NO_ALT = "No description has been provided for this image"  # nbconvert's own words
CELL_OR_PICTURE = re.compile(rf'id="cell-id=([^"]+)"|alt="{NO_ALT}"|<svg (?=[^>]*viewBox)')


def in_the_look_of_the_site(
    content: str,
    to_page: Callable[[str], str],
    folded: Container[str] = (),
    alts: Mapping[str, str] = {},
) -> str:
    """content: HTML of mkdocs-jupyter; to_page: a link of the repository -> one of the site.

    folded: ids of the cells whose code is folded, as JupyterLab does where a cell's metadata ask for it.
    alts: id of a cell -> what one sees on its picture.
    """
    content = content[
        content.index('<div class="jupyter-wrapper">') : content.rindex("<style>")
    ]
    content = CELL.sub(r'<div class="highlight"><pre><code>\1</code></pre></div>', content)
    content = INPUT.sub(
        lambda cell: with_code_folded(cell) if cell[2] in folded else cell[0], content
    )
    content = with_alts(content, alts)
    content = content.replace('class="anchor-link"', 'class="headerlink"').replace(
        ' border="1" class="dataframe"', ""
    )
    content = LINK.sub(lambda link: link[1] + to_page(html.unescape(link[2])), content)
    return WORDS.sub(lambda words: with_formulas(words[0]), content)


def with_code_folded(cell: re.Match[str]) -> str:
    return f'{cell[1]}<details class="folded"><summary>the code of this cell</summary>{cell[3]}</details>'


def with_alts(content: str, alts: Mapping[str, str]) -> str:
    """Each picture says what one sees on it, for who does not see it; alts: by its cell's id.

    >>> with_alts(f'<div id="cell-id=curve"><img alt="{NO_ALT}"></div>', {"curve": "a line"})
    '<div id="cell-id=curve"><img alt="a line"></div>'
    """
    cell = ""

    def described(match: re.Match[str]) -> str:
        nonlocal cell
        cell = match[1] or cell
        if match[1] or cell not in alts:
            return match[0]
        alt = html.escape(alts[cell])
        return (
            f'alt="{alt}"'
            if match[0].startswith("alt")
            else f'<svg role="img" aria-label="{alt}" '
        )

    return CELL_OR_PICTURE.sub(described, content)


def with_formulas(words: str) -> str:
    parts = CODE.split(words)  # text, code, its tag, text, ...
    parts[::3] = [MATH.sub(to_mathml, part) for part in parts[::3]]
    return "".join(part for n, part in enumerate(parts) if n % 3 != 2)


def to_mathml(formula: re.Match[str]) -> str:
    return convert(
        html.unescape(formula[1] or formula[2]), display="block" if formula[1] else "inline"
    )
