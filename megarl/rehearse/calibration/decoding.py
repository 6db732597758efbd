"""Measures the decode steps of the rollout engine over batch sizes, on a model of the run's width."""

from __future__ import annotations

import time
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

from megarl.config.schema import Device, DType, EngineDType, RolloutConfig
from megarl.config.speculation import without_speculation
from megarl.machine.background import LoopThread
from megarl.machine.errors import EngineDeadError
from megarl.models.architecture import Architecture
from megarl.models.counts import num_active_parameters
from megarl.models.layers import cached_numbers
from megarl.rehearse.calibration.measurements import (
    CalibrationRequest,
    DecodeSweep,
    DecodeTime,
    most_layers,
    write_reduced,
)
from megarl.rollout.interface import GenerationRequest, RolloutEngineSpec, SamplingParameters
from megarl.rollout.sglang.in_process import InProcessBackend
from megarl.rollout.sglang.messages import generation_payload
from megarl.rollout.sglang.server_args import build_server_args

_MEMORY_SHARE = 0.4  # of the device, for the weights
_CPU_BYTES = 2**30  # of weights, whose reading takes a CPU a tenth of a second
_MOST_PROMPT = 128
_MOST_STEPS = 64
_REPEATS = 3
_BYTES = {DType.float32: 4, DType.bfloat16: 2}


def decode_sweep(request: CalibrationRequest, rollout: RolloutConfig, memory_bytes: float) -> DecodeSweep:
    """Time decode steps of the engine with one rank. The engine has random weights."""
    folder = Path(request.folder) / "decoding"
    element_bytes = _BYTES[request.dtype]
    # Only the time per layer is needed, so a large model is measured with as many layers as fit.
    room = _MEMORY_SHARE * memory_bytes if request.is_cuda else min(_MEMORY_SHARE * memory_bytes, _CPU_BYTES)
    whole = request.architecture.num_hidden_layers
    num_layers = most_layers(request.role.path, folder, element_bytes, room, limit=whole)
    if num_layers == 0:
        return DecodeSweep(problem="two layers do not fit into the memory of one device")

    architecture = write_reduced(request.role.path, num_layers, folder)
    backend = InProcessBackend(build_server_args(_spec(request, rollout, folder)))

    try:
        loop = LoopThread("sglang", backend.start)
        loop.submit(backend.open()).result()
        times = tuple(_step(backend, loop, batch, architecture) for batch in request.batches)
    except EngineDeadError as error:
        return DecodeSweep(problem=f"SGLang did not run: {error}")
    finally:
        backend.stop()

    loop.stop()
    return DecodeSweep(
        times=times,
        num_layers=num_layers,
        weight_bytes=num_active_parameters(architecture) * element_bytes,
        cache_bytes=cached_numbers(architecture, range(architecture.num_hidden_layers), 1) * element_bytes,
    )


def _spec(request: CalibrationRequest, rollout: RolloutConfig, folder: Path) -> RolloutEngineSpec:
    return RolloutEngineSpec(
        model=replace(request.config.model, path=str(folder)),
        rollout=replace(
            rollout,
            dtype=EngineDType.model,
            # random weights accept no token of a draft model
            sglang=replace(rollout.sglang, server_args=without_speculation(rollout.sglang.server_args)),
            tensor_parallel_size=1,
            expert_parallel_size=1,
            max_concurrency=max(request.batches),
        ),
        device=Device.cuda if request.is_cuda else Device.cpu,
    )


def _step(backend: InProcessBackend, loop: LoopThread, batch: int, architecture: Architecture) -> DecodeTime:
    """Return the time of a step: the difference between long and short samples, by their tokens."""
    longest = architecture.max_position_embeddings
    prompt = min(_MOST_PROMPT, longest // 4)
    many = min(_MOST_STEPS, longest - prompt)
    few = many // 4

    def seconds(num_tokens: int) -> float:
        sampling = SamplingParameters(max_new_tokens=num_tokens, seed=0, ignore_eos=True)
        begin = time.perf_counter()
        running = [
            loop.submit(backend.generate(_payload(number, num_tokens, prompt, sampling)))
            for number in range(batch)
        ]
        wait(running)
        for each in running:
            each.result()
        return time.perf_counter() - begin

    seconds(few)  # compiles kernels for this batch size
    # Other load on the machine can only slow a repeat.
    fastest = [min(seconds(num_tokens) for _ in range(_REPEATS)) for num_tokens in (few, many)]
    return DecodeTime(batch, max(0.0, fastest[1] - fastest[0]) / (many - few), prompt + (many + few) / 2)


def _payload(number: int, num_tokens: int, prompt: int, sampling: SamplingParameters) -> dict[str, object]:
    # Different prompts, so that no engine finds them in its cache of prefixes.
    tokens = [1 + (number + place) % 8 for place in range(prompt)]
    request = GenerationRequest(number, tokens, sampling)
    return generation_payload(request, (), f"calibrate-{number}-{num_tokens}-{time.monotonic_ns()}")
