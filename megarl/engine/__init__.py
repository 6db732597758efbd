"""Megatron-Core as megarl uses it. Call `megarl.engine.platform.activate` before importing any other module
of this package."""
