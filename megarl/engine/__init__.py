"""The Megatron-Core engine. Call `megarl.engine.platform.activate` before importing other modules of it."""
