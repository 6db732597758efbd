"""Conversion of our requests to SGLang's format, and of its responses to ours. Pure functions."""

from __future__ import annotations

import base64
from collections.abc import Collection
from typing import Any, Literal

import numpy as np

from megarl.rollout.interface import (
    GenerationRequest,
    RequestFailedError,
    Sample,
    SamplingParameters,
    VersionSpan,
)


def generation_payload(
    request: GenerationRequest, end_token_ids: Collection[int], name: str
) -> dict[str, Any]:
    """Return a GenerateReqInput, which can be aborted by its name."""
    sampling = request.sampling
    stops = [] if sampling.ignore_eos else sorted({*sampling.stop_token_ids, *end_token_ids})
    return {
        "rid": name,
        "input_ids": request.prompt,
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": sampling.min_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": stops,
            "ignore_eos": sampling.ignore_eos,
            "sampling_seed": sampling.seed,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        **({"return_routed_experts": True} if sampling.with_routes else {}),
    }


def read_sample(
    answer: dict[str, Any], sampling: SamplingParameters, routes_as: np.dtype | None = None
) -> Sample:
    """Convert SGLang's response to a sample.

    Args:
        routes_as: Dtype of the expert indices, if routes are requested.

    Raises:
        RequestFailedError: The request was ended by something other than a token or its length.
    """
    meta = answer["meta_info"]

    # (log-prob, token, text) of every token, including the end token; SGLang's log-probs follow the contract.
    tokens = meta["output_token_logprobs"]
    reason = meta["finish_reason"]

    # SGLang may end a request for another reason, such as an abort: that is not a sample.
    if reason["type"] not in ("stop", "length") or (
        reason["type"] == "length" and len(tokens) != sampling.max_new_tokens
    ):
        raise RequestFailedError(
            f"SGLang ended a request after {len(tokens)} of {sampling.max_new_tokens} tokens: {reason}"
        )

    ended: Literal["stop", "length"] = reason["type"]
    spans = tuple(VersionSpan(int(span["version"]), int(span["end"])) for span in meta["weight_versions"])
    token_ids = np.array([token for _, token, *_ in tokens], dtype=np.int32)
    routes = (
        np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).astype(routes_as)
        if sampling.with_routes
        else None
    )
    return Sample(
        token_ids, np.array([log_prob for log_prob, *_ in tokens], dtype=np.float32), ended, spans, routes
    )
