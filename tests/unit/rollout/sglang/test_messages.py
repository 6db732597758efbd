"""Test requests and responses in SGLang's format."""

from __future__ import annotations

import subprocess
from typing import Any

import numpy as np
import pytest

from megarl.rollout.interface import GenerationRequest, SamplingParameters
from megarl.rollout.sglang.messages import check_prompt_length, generation_payload, read_sample
from tests import fork_server
from tests.images import image_file

SAMPLING = SamplingParameters(max_new_tokens=3, seed=5, temperature=0.5, stop_token_ids=(9, 2))


def answer(reason: dict[str, Any], count: int = 3, **meta: Any) -> dict[str, Any]:
    tokens = [(-0.5 * index, 10 + index, None) for index in range(count)]
    told = {"finish_reason": reason, "output_token_logprobs": tokens}
    told["weight_versions"] = [{"version": "4", "start": 0, "end": count}]
    return {"output_ids": [], "meta_info": told | meta}


def test_a_request_says_everything_explicitly() -> None:
    payload = generation_payload(GenerationRequest(1, [5, 6], SAMPLING), {7}, "one")
    assert (payload["rid"], payload["input_ids"]) == ("one", [5, 6])
    assert payload["return_logprob"]
    sampling = payload["sampling_params"]
    assert sampling["stop_token_ids"] == [2, 7, 9]
    assert (sampling["sampling_seed"], sampling["temperature"], sampling["max_new_tokens"]) == (5, 0.5, 3)


def test_with_ignore_eos_nothing_stops() -> None:
    sampling = SamplingParameters(max_new_tokens=3, seed=5, stop_token_ids=(9,), ignore_eos=True)
    assert (
        generation_payload(GenerationRequest(1, [5], sampling), {7}, "one")["sampling_params"][
            "stop_token_ids"
        ]
        == []
    )


def test_an_answer_becomes_a_sample() -> None:
    sample = read_sample(answer({"type": "length", "length": 3}), SAMPLING)
    assert (sample.token_ids.tolist(), sample.log_probs.tolist()) == ([10, 11, 12], [0.0, -0.5, -1.0])
    assert (sample.token_ids.dtype, sample.log_probs.dtype, sample.finish_reason) == (
        np.int32,
        np.float32,
        "length",
    )
    assert read_sample(answer({"type": "stop", "matched": 11}, count=2), SAMPLING).finish_reason == "stop"


def test_a_sample_counts_the_passes_that_verified_drafts() -> None:
    """SGLang's own numbers, which it leaves out where it decodes one token at a time."""
    length = {"type": "length", "length": 3}
    drafted = {"spec_verify_ct": 2, "spec_accept_length": 1.5, "spec_accept_rate": 0.25}
    assert read_sample(answer(length, **drafted), SAMPLING).num_verifications == 2
    assert read_sample(answer(length), SAMPLING).num_verifications == 0


def test_weight_versions_by_token() -> None:
    length = {"type": "length", "length": 3}
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    sample = read_sample(answer(length, weight_versions=spans), SAMPLING)
    assert (sample.spans, sample.weight_versions, sample.token_versions.tolist()) == (
        ((3, 1), (4, 3)),
        (3, 4),
        [3, 4, 4],
    )


@pytest.mark.parametrize(
    ("reason", "count"), [({"type": "abort", "message": "gone"}, 2), ({"type": "length", "length": 2}, 2)]
)
def test_a_sample_that_was_cut_off_is_an_error(reason: dict[str, Any], count: int) -> None:
    with pytest.raises(RuntimeError, match="after 2 of 3 tokens"):
        read_sample(answer(reason, count), SAMPLING)


# Runs in a process that has imported Megatron-Core, as a trainer's process has: pickles with the name that
# Megatron gives to torch's function, and with torch's name, as the trainer and the engine restore it.
PICKLE = """
import pickle, torch
from megarl.config.schema import Device
from megarl.engine import platform
from megarl.machine.tensor_pickles import pickle_as_torch
tensors = [("message", torch.arange(5, dtype=torch.uint8))]
platform.activate(Device.cpu)
message = pickle.dumps(tensors)
load = torch.storage._load_from_bytes
load.__module__, load.__qualname__ = "megatron.core.safe_globals", "safe_load_from_bytes"
print(pickle.dumps(tensors).hex())
pickle_as_torch()
print(message.hex())
print(pickle.dumps(tensors).hex())
"""
# Runs in a process of SGLang, with the messages as its arguments.
UNPICKLE = """
import io, sys
from sglang.srt.utils.common import SafeUnpickler
for data in map(bytes.fromhex, sys.argv[1:]):
    try:
        print(SafeUnpickler(io.BytesIO(data)).load()[0][1].tolist())
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_sglang_accepts_tensors_of_a_process_with_megatron(forked_processes: None) -> None:
    def run(*arguments: str) -> list[str]:
        command = [*fork_server.PYTHON, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-3:]

    refused, *accepted = run("--sglang", "-c", UNPICKLE, *run("-c", PICKLE))
    assert "megatron.core.safe_globals.safe_load_from_bytes" in refused
    assert accepted == ["[0, 1, 2, 3, 4]"] * 2


IMAGE_TOKEN = 190
PROMPT = [5, 192, 190, 190, 190, 193, 7, 192, 190, 193]


def test_a_request_has_images_and_a_placeholder_for_each() -> None:
    request = GenerationRequest(1, PROMPT, SAMPLING, "", (b"first", b"second"))
    payload = generation_payload(request, {7}, "one", IMAGE_TOKEN)
    assert payload["input_ids"] == [5, 192, 190, 193, 7, 192, 190, 193]
    assert payload["image_data"] == ["data:image;base64,Zmlyc3Q=", "data:image;base64,c2Vjb25k"]
    assert "image_data" not in generation_payload(
        GenerationRequest(1, [5], SAMPLING), {7}, "one", IMAGE_TOKEN
    )

    with pytest.raises(ValueError, match="has 2 runs of image tokens .id 190. for 1 images"):
        generation_payload(request._replace(images=(b"first",)), {7}, "one", IMAGE_TOKEN)
    with pytest.raises(ValueError, match="the request has images, but the model reads none"):
        generation_payload(request, {7}, "one")


def test_a_prompt_that_sglang_reads_as_other_tokens_is_an_error() -> None:
    request = GenerationRequest(1, PROMPT, SAMPLING, "", (b"first", b"second"))
    check_prompt_length(answer({"type": "length"}, prompt_tokens=10), request)
    with pytest.raises(RuntimeError, match="read the prompt and its images as 9 tokens, .* as 10"):
        check_prompt_length(answer({"type": "length"}, prompt_tokens=9), request)


# Runs in a process of SGLang: its own functions for images and for prompts that are tokens.
IMAGES = """
import sys
from sglang.srt.environ import envs
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor
from sglang.srt.utils import load_image
image, _ = load_image(sys.argv[1])
prompt = [int(token) for token in sys.argv[2].split(",")]
print(image.size, BaseMultimodalProcessor._expand_input_ids(prompt, [3, 1], 190))
"""


def test_sglang_reads_the_image_and_expands_the_prompt(forked_processes: None) -> None:
    request = GenerationRequest(1, PROMPT, SAMPLING, "", (image_file(8, 4), image_file(4, 4)))
    payload = generation_payload(request, {7}, "one", IMAGE_TOKEN)
    command = [*fork_server.PYTHON, "--sglang", "-c", IMAGES, payload["image_data"][0]]
    prompt = ",".join(map(str, payload["input_ids"]))
    printed = subprocess.run([*command, prompt], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == f"(8, 4) {PROMPT}"
