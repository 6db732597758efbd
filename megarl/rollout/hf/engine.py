"""The reference engine: transformers in the process of the rollout worker, exact and without a server."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from megarl.protocol.weights import Manifest, WeightBucket, WeightTransferError
from megarl.rollout.hf.decoding import decode
from megarl.rollout.interface import RolloutEngine, Sample, SamplingParameters
from megarl.rollout.lifecycle import EngineLifecycle, EngineState


class HFEngine(RolloutEngine):
    """Starts without weights, from the folder's config.json: they come by an update, so they are always the trainer's.

    dtype: of the weights and the cache. max_concurrency: sequences that are decoded at the same time.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_concurrency: int,
        trust_remote_code: bool = False,
    ) -> None:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=trust_remote_code)
        model.tie_weights()  # a part of the initialisation that was skipped
        self._model = model.to(device).eval().requires_grad_(False)
        self._device = device
        self._max_concurrency = max_concurrency
        self._max_length: int = config.max_position_embeddings
        self._vocab_size: int = config.vocab_size
        self._end_token_ids = _end_token_ids(Path(path), config.eos_token_id)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}
        self._lifecycle = EngineLifecycle()

    @property
    def weight_version(self) -> int | None:
        return self._lifecycle.weight_version

    def generate(self, prompts: list[list[int]], sampling: SamplingParameters) -> list[Sample]:
        version = self._lifecycle.require_ready()
        for index, prompt in enumerate(prompts):
            self._check_prompt(index, prompt, sampling.max_new_tokens)
        stops = () if sampling.ignore_eos else {*sampling.stop_token_ids, *self._end_token_ids}
        stop_token_ids = torch.tensor(sorted(stops), dtype=torch.int64, device=self._device)
        generator = torch.Generator(self._device).manual_seed(sampling.seed)

        rows = [prompt for prompt in prompts for _ in range(sampling.n)]
        longest_first = sorted(range(len(rows)), key=lambda row: -len(rows[row]))  # like lengths together: little padding
        samples: dict[int, Sample] = {}
        for start in range(0, len(rows), self._max_concurrency):
            batch = longest_first[start : start + self._max_concurrency]
            decoded = decode(self._model, [rows[row] for row in batch], sampling, stop_token_ids, generator)
            for row, ids, log_probs, length, stopped in zip(batch, *(tensor.tolist() for tensor in decoded), strict=True):
                samples[row] = Sample(ids[:length], log_probs[:length], "stop" if stopped else "length", version)
        return [samples[row] for row in range(len(rows))]

    def _check_prompt(self, index: int, prompt: list[int], max_new_tokens: int) -> None:
        if not prompt:
            raise ValueError(f"prompt {index} is empty; a model needs at least one token to continue")
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise ValueError(
                f"prompt {index} has token ids {min(prompt)}..{max(prompt)}, the model's vocabulary is 0..{self._vocab_size - 1}"
            )
        if len(prompt) + max_new_tokens > self._max_length:
            raise ValueError(
                f"prompt {index} of {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed the model's "
                f"max_position_embeddings {self._max_length}; shorten the prompts or max_new_tokens"
            )

    def begin_weight_update(self, manifest: Manifest) -> None:
        shapes = {name: meta.shape for name, meta in manifest.items()}
        faults = [f"{name} is missing" for name in self._shapes.keys() - shapes.keys()]
        faults += [f"{name} is not a tensor of the engine's model" for name in shapes.keys() - self._shapes.keys()]
        faults += [
            f"{name} has shape {shape}, the engine's model {self._shapes[name]}"
            for name, shape in shapes.items()
            if name in self._shapes and shape != self._shapes[name]
        ]
        if faults:
            raise WeightTransferError(f"{len(faults)} tensors do not fit the engine's model: " + "; ".join(sorted(faults)[:8]))
        self._lifecycle.begin(manifest)

    def load_weights(self, bucket: WeightBucket) -> None:
        self._lifecycle.record(bucket)
        parameters = dict(self._model.named_parameters())  # a tied output layer is not in it twice
        for chunk in bucket.chunks:
            parameters[chunk.name].data.view(-1)[chunk.offset : chunk.offset + chunk.data.numel()].copy_(chunk.data)

    def end_weight_update(self, version: int) -> None:
        self._lifecycle.end(version)

    def sleep(self) -> None:
        self._lifecycle.require("sleep", EngineState.EMPTY, EngineState.UPDATING, EngineState.READY, EngineState.ASLEEP)
        self._release()
        self._lifecycle.leave(EngineState.ASLEEP)

    def wake(self) -> None:
        self._lifecycle.require("wake", EngineState.ASLEEP)
        for name, parameter in self._model.named_parameters():
            parameter.data = torch.empty(self._shapes[name], dtype=parameter.dtype, device=self._device)
        self._lifecycle.leave(EngineState.EMPTY)

    def close(self) -> None:
        self._release()
        self._lifecycle.leave(EngineState.CLOSED)

    def _release(self) -> None:
        for parameter in self._model.parameters():
            parameter.data = parameter.data.new_empty(0)


def _end_token_ids(folder: Path, from_config: int | list[int] | None) -> set[int]:
    """generation_config.json decides where it is there (chat models end turns with another token than documents)."""
    found = from_config
    if (folder / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(folder).eos_token_id
    if found is None:
        return set()
    return {found} if isinstance(found, int) else set(found)
