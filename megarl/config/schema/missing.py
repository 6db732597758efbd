"""The mark of a value that the user must give."""

MISSING = "???"  # OmegaConf's own
