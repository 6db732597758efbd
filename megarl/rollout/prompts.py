"""Which requests no engine can serve."""

from __future__ import annotations

from megarl.rollout.interface import GenerationRequest


def check_request(request: GenerationRequest, vocab_size: int, max_length: int) -> None:
    """max_length: tokens of prompt and sample together. Raises ValueError, see `RolloutEngine.submit`."""
    prompt, max_new_tokens, name = request.prompt, request.sampling.max_new_tokens, f"the prompt of request {request.request_id}"
    if not prompt:
        raise ValueError(f"{name} is empty; a model needs at least one token to continue")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ValueError(f"{name} has token ids {min(prompt)}..{max(prompt)}, the model's vocabulary is 0..{vocab_size - 1}")
    if len(prompt) + max_new_tokens > max_length:
        raise ValueError(
            f"{name} of {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed the model's "
            f"max_position_embeddings {max_length}; shorten the prompts or max_new_tokens"
        )
