"""What of the documentation is made from the code: `make reference`, or `python -m docs.generate`."""
