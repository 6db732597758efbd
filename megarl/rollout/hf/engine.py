"""Reference engine: transformers in the process of the rollout worker, exact and without a server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.initialization import no_init_weights

from megarl.agents.trajectory import Sample, VersionSpan
from megarl.config.schema import Device
from megarl.data.images import ImageProcessor
from megarl.machine.errors import counted
from megarl.models.families import family_of
from megarl.models.family import stored_name
from megarl.rollout.hf.attention import GROUPED
from megarl.rollout.hf.decoding import decode, prompt_images
from megarl.rollout.interface import (
    EngineLifecycle,
    GenerationRequest,
    LifecycleState,
    RolloutEngine,
    RolloutEngineSpec,
    SamplingParameters,
    check_request,
    end_token_ids,
)
from megarl.weights.checkpoint_index import read_checkpoint_index
from megarl.weights.checksum import checksum
from megarl.weights.manifest import manifest_of_folder
from megarl.weights.plan import TensorSlices, whole_slices
from megarl.weights.safetensors_file import OpenFiles
from megarl.weights.tensors import Manifest, Part, WeightTransferError
from megarl.weights.transports.interface import EngineLink, WeightReceiver

_kind = attrgetter(*(field.name for field in fields(SamplingParameters) if field.name != "seed"))


def _logits_in_float32(head: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """Return logits (B, S, V) float32 of hidden (B, S, H). The weights are converted in each step."""
    return F.linear(hidden.float(), head.weight.float())


class HFEngine(RolloutEngine):
    """Engine on transformers.

    It starts without weights, from the folder's config.json; a weight sync provides the trainer's.

    Requests wait until `collect`, which decodes one batch of them to the end.

    Args:
        is_ended: Ends a sample, given its tokens, in addition to the model's end tokens.
    """

    def __init__(self, spec: RolloutEngineSpec, is_ended: Callable[[list[int]], bool] | None = None) -> None:
        path = spec.model.path
        trusted = spec.model.trust_remote_code
        config = AutoConfig.from_pretrained(path, trust_remote_code=trusted)

        # All weights come from a weight sync, so initializing them would be wasted work.
        with no_init_weights():
            dtype = getattr(torch, spec.model.dtype.value)
            reads_images = hasattr(config, "vision_config")
            self._images = ImageProcessor.of_folder(path, trusted) if reads_images else None
            kind = AutoModelForCausalLM if self._images is None else AutoModelForImageTextToText
            # A vision tower has no cache.
            attention = GROUPED if self._images is None else {"text_config": GROUPED, "vision_config": "sdpa"}
            model = kind.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=trusted
            )

        model.tie_weights()  # part of the skipped initialization

        # With its index, by which NCCL finds the communicator of a device.
        self._device = (
            torch.device("cuda", torch.cuda.current_device())
            if spec.device is Device.cuda
            else torch.device("cpu")
        )
        self.model = model.to(self._device).eval().requires_grad_(False)
        if spec.fp32_lm_head:
            head = self.model.get_output_embeddings()
            head.forward = partial(_logits_in_float32, head)
        self.max_concurrency = spec.rollout.max_concurrency
        self._max_length: int = config.get_text_config().max_position_embeddings
        self._vocab_size: int = config.get_text_config().vocab_size
        self._end_token_ids = end_token_ids(path)
        self._is_ended = is_ended
        self._lifecycle = EngineLifecycle()
        family = family_of(config.model_type)
        prefixes = {} if family is None else family.module_prefixes
        # Contains a tied output layer only once.
        self.parameters = {
            stored_name(name, prefixes): parameter for name, parameter in self.model.named_parameters()
        }
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        self._receiver = WeightReceiver(self._device)
        self._has_moved = False  # whether the parameters have moved since the last weights arrived
        self._waiting: list[GenerationRequest] = []

    @property
    def weight_version(self) -> int | None:
        return self._lifecycle.weight_version

    # ---- generation

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._lifecycle.require_ready()
        # Check all requests first, so that none is queued if one is refused.
        for request in requests:
            check_request(request, self._vocab_size, self._max_length)
            if request.images and self._images is None:
                raise ValueError("the request has images, but the model reads none")
        self._waiting += requests

    def collect(self, wait_s: float) -> list[tuple[int, Sample]]:
        """Decode a batch to the end, however long it takes; `wait_s` is ignored."""
        version = self._lifecycle.require_ready()
        batch = self._next_batch()
        if not batch:
            return []
        # Requests of a batch differ only in prompt and seed.
        sampling = batch[0].sampling
        stops = () if sampling.ignore_eos else {*sampling.stop_token_ids, *self._end_token_ids}
        stop_token_ids = torch.tensor(sorted(stops), dtype=torch.int64, device=self._device)
        token_ids, log_probs, lengths, stopped = decode(
            self.model,
            [request.prompt for request in batch],
            sampling,
            stop_token_ids,
            [request.sampling.seed for request in batch],
            self._is_ended,
            None if self._images is None else prompt_images(batch, self._images, self._device),
        )

        # Truncate each row to its own length: later tokens are not part of the sample.
        return [
            (
                request.request_id,
                Sample(
                    ids[:length],
                    of_tokens[:length],
                    "stop" if is_stopped else "length",
                    (VersionSpan(version, length),),
                ),
            )
            for request, ids, of_tokens, length, is_stopped in zip(
                batch,
                token_ids.int().cpu().numpy(),
                log_probs.cpu().numpy(),
                lengths.tolist(),
                stopped.tolist(),
                strict=True,
            )
        ]

    def _next_batch(self) -> list[GenerationRequest]:
        """Return up to max_concurrency requests that differ only in prompt and seed.

        Similar lengths are batched, to reduce padding.
        """
        if not self._waiting:
            return []
        # The longest prompt decides which kind of request is decoded next, and how wide the batch is.
        longest_first = sorted(self._waiting, key=lambda request: -len(request.prompt))
        kind = _kind(longest_first[0].sampling)
        batch = [request for request in longest_first if _kind(request.sampling) == kind][
            : self.max_concurrency
        ]
        taken = {request.request_id for request in batch}
        self._waiting = [request for request in self._waiting if request.request_id not in taken]

        return batch

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        self._waiting = [
            request
            for request in self._waiting
            if request_ids is not None and request.request_id not in request_ids
        ]

    def interrupt(self) -> None:
        """Do nothing: a batch is decoded to the end."""

    # ---- weights

    def needed_slices(self, manifest: Manifest) -> list[TensorSlices]:
        self._lifecycle.require(
            "report what it needs", LifecycleState.EMPTY, LifecycleState.UPDATING, LifecycleState.READY
        )
        self._check(manifest)
        return [whole_slices(self._shapes)]

    def _check(self, manifest: Manifest) -> None:
        shapes = {name: meta.shape for name, meta in manifest.items()}
        faults = [f"{name} is missing" for name in self._shapes.keys() - shapes.keys()]
        faults += [
            f"{name} is not a tensor of the engine's model" for name in shapes.keys() - self._shapes.keys()
        ]
        faults += [
            f"{name} has shape {shape}, but {self._shapes[name]} in the engine's model"
            for name, shape in shapes.items()
            if name in self._shapes and shape != self._shapes[name]
        ]

        if faults:
            raise WeightTransferError(
                f"the engine's model cannot load {counted(len(faults), 'tensor')}: "
                + "; ".join(sorted(faults)[:8])
            )

    def join_weights(self, links: Sequence[EngineLink]) -> None:
        (link,) = links
        self._receiver.join(link, whole_slices(self._shapes), self.places_of)

    def places_of(self, part: Part) -> list[torch.Tensor]:
        return [self.parameters[part.name].data[part.tensor_slice.index]]

    def leave_weights(self) -> None:
        self._receiver.leave()

    def begin_weight_update(self, manifest: Manifest, first_round: int = 0) -> None:
        assert first_round == 0, "a model of transformers has no adapters here, so all tensors change"
        self._lifecycle.require(
            "begin a weight update", LifecycleState.EMPTY, LifecycleState.UPDATING, LifecycleState.READY
        )
        self._check(manifest)
        self._lifecycle.begin(manifest)

    def receive_weights(self, folder: str | None = None) -> None:
        self._lifecycle.require_update()
        # After a sleep the parameters have new memory, which the receiver must look up.
        self._receiver.begin(has_moved=self._has_moved, folder=folder)
        self._has_moved = False
        while not self._receiver.receive():
            pass
        self._lifecycle.complete()

    def load_folder(self, folder: Path) -> None:
        self._lifecycle.require_update()
        # Record first: a tensor that does not belong to the model is refused before any is copied.
        self._lifecycle.record(manifest_of_folder(folder))
        with OpenFiles() as files:
            for name, stored in read_checkpoint_index(folder).items():
                self.parameters[name].data.copy_(files[stored.file].get_tensor(name))

    def end_weight_update(self, version: int) -> None:
        self._lifecycle.end(version)

    def checksums(self) -> dict[str, int]:
        self._lifecycle.require_ready()
        return {name: checksum(parameter.data) for name, parameter in self.parameters.items()}

    # ---- memory and end

    def sleep(self) -> None:
        self._lifecycle.require(
            "sleep",
            LifecycleState.EMPTY,
            LifecycleState.UPDATING,
            LifecycleState.READY,
            LifecycleState.ASLEEP,
        )
        self._release()
        self._lifecycle.leave(LifecycleState.ASLEEP)

    def wake(self) -> None:
        if not self._lifecycle.must_wake():
            return
        for name, parameter in self.parameters.items():
            parameter.data = torch.empty(self._shapes[name], dtype=parameter.dtype, device=self._device)
        self._has_moved = True
        self._lifecycle.leave(LifecycleState.EMPTY)

    def wake_cache(self) -> None:
        """Do nothing: there is no cache between two batches."""

    def process_ids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._release()
        self._receiver.leave()
        self._lifecycle.leave(LifecycleState.CLOSED)

    def _release(self) -> None:
        self.abort()
        # Free only the memory; the parameters stay part of the model.
        for parameter in self.model.parameters():
            parameter.data = parameter.data.new_empty(0)
