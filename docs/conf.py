"""Sphinx settings of the documentation; `make docs` builds it."""

from importlib import metadata

project = "narrowkv"
author = "narrowkv contributors"
copyright = "narrowkv contributors, Apache-2.0"
release = version = metadata.version("narrowkv-runtime")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
default_role = "literal"  # docstrings write `code` as Markdown does
nitpicky = False

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
napoleon_numpy_docstring = False
# A docstring names several arguments or attributes before one colon ("k, v: ..."), which field lists cannot.
napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]
python_maximum_signature_line_length = 80
add_module_names = False

html_theme = "furo"
html_title = "narrowkv"
html_static_path = ["_static"]
html_css_files = ["narrowkv.css"]
html_copy_source = False
html_show_sourcelink = False
