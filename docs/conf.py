"""Settings of the documentation site, which `make docs` builds without a network."""

import sys
from importlib.resources import files
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_extensions"), str(DOCS.parent / "src")]

from rl_training.version import __version__  # noqa: E402

project = "rl_training"
copyright = "The rl_training developers"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "site_pages",
]
# Design notes are read in the repository.
exclude_patterns = ["_build", "plans"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4  # links such as `page.md#heading` work here and on GitHub

highlight_language = "text"
# Docstrings mark code with single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True

# Every link, page, heading, function and method must exist. Types in signatures are exempt: many
# are aliases, or belong to other packages, whose inventories would need a network.
nitpicky = True
nitpick_ignore_regex = [(r"py:(class|data|obj)", r".*")]

# MathJax draws formulas as SVG. It needs only this file of an installed package, so pages look the
# same without a network and without fonts for mathematics.
MATHJAX = files("sphinx-mathjax-offline") / "static/mathjax/tex-svg-full.js"
mathjax_path = MATHJAX.name

html_theme = "furo"
html_title = f"rl_training {version}"
html_static_path = ["_static", str(MATHJAX)]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "source_repository": "https://github.com/rl-training/rl-training/",
    "source_branch": "main",
    "source_directory": "docs/",
    "light_css_variables": {"color-brand-primary": "#1d4ed8", "color-brand-content": "#1d4ed8"},
    "dark_css_variables": {"color-brand-primary": "#7aa2f7", "color-brand-content": "#7aa2f7"},
}
# The button copies commands without their prompt and output.
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
