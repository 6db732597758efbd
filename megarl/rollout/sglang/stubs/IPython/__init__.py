"""Stub of IPython.

SGLang imports `display` for notebooks, and Ray calls `get_ipython` if IPython was imported.
"""

# ruff: noqa: N999  the name is that of the replaced package

from . import display as display


def get_ipython() -> None:
    """Return None, as in IPython outside of its shells."""
