"""Conversion of our requests to SGLang's format, and of its responses to ours. Pure functions."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection
from typing import Any, Literal

import numpy as np
import torch

from megarl.agents.trajectory import Sample, VersionSpan
from megarl.batch.token_rows import route_dtype
from megarl.machine.errors import counted
from megarl.models.architecture import Architecture
from megarl.models.layers import routing_layers
from megarl.models.tensor_table import dimension_sizes
from megarl.rollout.interface import GenerationRequest, RequestFailedError, SamplingParameters


def generation_payload(
    request: GenerationRequest, end_token_ids: Collection[int], name: str, image_token_id: int | None = None
) -> dict[str, Any]:
    """Return a GenerateReqInput, which can be aborted by its name.

    SGLang expands one placeholder per image itself, by its own image processor.
    """
    sampling = request.sampling
    stops = [] if sampling.ignore_eos else sorted({*sampling.stop_token_ids, *end_token_ids})
    images = [f"data:image;base64,{base64.b64encode(data).decode()}" for data in request.images]

    return {
        "rid": name,
        "input_ids": with_single_placeholders(request, image_token_id),
        **({"image_data": images} if images else {}),
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


def with_single_placeholders(request: GenerationRequest, image_token_id: int | None) -> list[int]:
    """Return the prompt with one placeholder for each image instead of as many as the image has features.

    Raises:
        ValueError: There are not as many runs of placeholders as images.
    """
    if not request.images:
        return request.prompt
    if image_token_id is None:
        raise ValueError("the request has images, but the model reads none")

    prompt = request.prompt
    kept = [
        token
        for place, token in enumerate(prompt)
        if token != image_token_id or place == 0 or prompt[place - 1] != image_token_id
    ]
    if (found := kept.count(image_token_id)) != len(request.images):
        raise ValueError(
            f"request {request.request_id} has {found} runs of image tokens (id {image_token_id}) for "
            f"{len(request.images)} images"
        )
    return kept


def check_prompt_length(answer: dict[str, Any], request: GenerationRequest) -> None:
    """Check that SGLang has read as many tokens as the trainer will, if the request has images.

    Raises:
        RequestFailedError: SGLang's image processor gives an image another number of tokens.
    """
    num_tokens = answer["meta_info"].get("prompt_tokens")
    if request.images and num_tokens != len(request.prompt):
        raise RequestFailedError(
            f"SGLang read the prompt and its images as {counted(num_tokens, 'token')}, but the model's "
            f"image processor in transformers as {len(request.prompt)}: both must read the same "
            "preprocessor_config.json"
        )


def route_reader(architecture: Architecture) -> Callable[[str], np.ndarray]:
    """Return the function that converts SGLang's routes to those of a sample, (tokens x L x K,) numbers."""
    layers = routing_layers(architecture)
    assert layers, "only models with experts have routes"
    dtype = torch.empty(0, dtype=route_dtype(architecture.num_experts)).numpy().dtype
    num_chosen = dimension_sizes(architecture)["e"]

    def read(encoded: str) -> np.ndarray:
        routes = np.frombuffer(base64.b64decode(encoded), np.int32)
        # SGLang returns numbers for dense layers too.
        by_layer = routes.reshape(-1, architecture.num_hidden_layers, num_chosen)
        return by_layer[:, list(layers)].astype(dtype).reshape(-1)

    return read


def read_sample(
    answer: dict[str, Any],
    sampling: SamplingParameters,
    read_routes: Callable[[str], np.ndarray] | None = None,
) -> Sample:
    """Convert SGLang's response to a sample.

    Args:
        answer: The response.
        sampling: The parameters of the request.
        read_routes: See `route_reader`; needed if routes are requested.

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
    routes = None
    if sampling.with_routes:
        assert read_routes is not None, "an engine without routes refuses the request"
        routes = read_routes(meta["routed_experts"])

    return Sample(
        token_ids,
        np.array([log_prob for log_prob, *_ in tokens], dtype=np.float32),
        ended,
        spans,
        routes,
        meta.get("spec_verify_ct", 0),
    )
