"""The site's pages, and in `generate` what makes those that come from the code. A package, so that no other
of this name is found first."""
