"""Stands in for IPython, of which SGLang imports `display` for notebooks."""

# ruff: noqa: N999  the name is that of the package that it stands in for

from . import display as display
