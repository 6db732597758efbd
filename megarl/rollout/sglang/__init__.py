"""SGLang behind the engines' interface. Only its own processes, and processes that host it, import
`sglang`."""
