"""Generate pages and drawings of the documentation from the code: `make reference` or `python -m docs.generate`."""
