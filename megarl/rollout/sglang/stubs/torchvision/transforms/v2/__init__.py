"""Second generation of the same names."""

from . import functional as functional
