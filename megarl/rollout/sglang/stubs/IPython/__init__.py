"""Stub of IPython.

SGLang imports `display` of it for notebooks, and Ray asks in what shell it is where IPython was imported.
"""

# ruff: noqa: N999  the name is that of the package that it stands in for

from . import display as display


def get_ipython() -> None:
    """None, as IPython's outside of its shells."""
