"""SGLang engine. Only its own processes, and processes that host it, import `sglang`."""
