"""Sphinx's settings. The site needs no network, neither to be built nor to be read."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "grpo_kit"
copyright = "the authors of grpo_kit, Apache-2.0"
extensions = ["myst_nb", "mathml", "names"]
nb_execution_mode = "off"  # outputs are the committed ones
nb_mime_priority_overrides = [
    ("html", "application/vnd.jupyter.widget-view+json", None)
]  # the table, not the widget
nb_merge_streams = True
nb_render_markdown_format = "gfm"  # tables in outputs
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4  # as a repository host makes them
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_function_parentheses = False
smartquotes = False  # quotes are part of what is quoted
nitpicky = True  # a name that the reference links to and lacks is an error,
nitpick_ignore_regex = [("py:(class|exc)", ".*")]  # but not a type of another library
toc_object_entries_show_parents = "hide"
html_theme = "furo"
html_title = "grpo_kit"
html_static_path = ["static"]
html_css_files = ["kit.css"]
html_search_scorer = str(Path(__file__).parent / "scorer.js")
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
pygments_style = "default"
pygments_dark_style = "github-dark"
