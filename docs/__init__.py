"""Contain the pages of the site, and in `generate` the code that makes the generated ones.

It is a package, so that no other package of this name is found first.
"""
