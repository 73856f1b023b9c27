"""The site of `make site`: Markdown of docs/ and results/, and a reference that tools/site makes from the code."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

project = "dpbench"
author = "The dpbench developers"
copyright = "the dpbench developers, Apache-2.0"

# The source folder is the whole repository, so that a link from docs/ to results/ is the same here and on a code host.
root_doc = "docs/index"
include_patterns = ["docs/**", "results/*.md", "results/**/*.md", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [
    "[!drC]*",  # all but docs/, results/ and two pages is not even looked into; a list of what lies there would change
    "dist",
    "runs",
    "docs/tutorials/README.md",  # is shown by index.md
    "docs/README.md",  # the same tables of contents, for who reads the files
    "docs/tutorials/**/.ipynb_checkpoints",
    "results/[!c]*/table.md",  # which stands in the README.md beside it
    "results/correlated_noise*/table.md",  # likewise
    "results/attack/**attack.md",
    "docs/reference/generated/api/modules.rst",  # a table of contents with one entry
    "docs/reference/generated/api/*.md",  # of builds before apidoc wrote these pages
]

extensions = [
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_copybutton",
    "tools.site",
]
nitpicky = True
nitpick_ignore_regex = [
    (r"py:class", r"dpbench\.privacy\.sampling\.scheme\.(Sampling\.to_dict|sampling_from_dict)"),  # validators
    (r"py:class", r"dpbench\.privacy\.accounting\.stated_plan\.StatedNoise\.to_dict"),
    (r"py:.*", r"dpbench\..*\.(_\w+(\.\w+)?|Annotated|[A-Z]|[A-Z]\w+T|RootModel\[.*)"),
]  # private names, type variables, the bases that pydantic makes

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # would come from another host

apidoc_modules = [{"path": "../src/dpbench", "destination": "docs/reference/generated/api"}]
apidoc_module_first = True
apidoc_max_depth = 1
autodoc_default_options = {"ignore-module-all": True}  # a package shows what is defined in it, not what it exports
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
default_role = "code"  # docstrings write `name`, as Markdown does
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 100
toc_object_entries = False  # thousands of names in the sidebar of every page
add_module_names = False

html_theme = "furo"
html_title = "dpbench"
html_math_renderer = "mathml"
html_copy_source = False
html_static_path = ["_static"]
html_extra_path = ["_extra"]  # the folder itself opens at the home page
html_css_files = ["site.css"]
copybutton_exclude = ".linenos, .gp, .go"
