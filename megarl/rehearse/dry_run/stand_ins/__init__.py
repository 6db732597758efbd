"""Stubs of compiled packages that require a GPU: their functions on fake tensors."""
