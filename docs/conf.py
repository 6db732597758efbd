"""How Sphinx builds the site: `make docs`. Pages are Markdown, read on a code host as well as here."""

from megarl import __version__

project = "megarl"
version = release = __version__
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["generate"]
nitpicky = True  # a reference to nothing is a warning, and warnings are errors

copybutton_prompt_text = "$ "  # of a console; what it printed is not copied

myst_heading_anchors = 4  # every heading can be linked to, as on a code host

html_theme = "furo"
html_title = f"megarl {__version__}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
