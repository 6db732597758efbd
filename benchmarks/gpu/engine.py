"""Measure how fast the engine trains and scores on one GPU, as ratios to Hugging Face measured in the same run.

    python -m benchmarks.gpu.engine [--shapes 0.5B 1.5B 7B] [--tokens 16384] [--repeats 3]
    python -m benchmarks.gpu.engine --device cpu    # a dry run: a tiny shape, in seconds

Models have the shapes of Qwen2.5 and random weights, the same on both sides. The benchmark measures forward +
backward of a batch (no optimizer step), for every installed kind of layers and each `recompute`, and the
scoring pass. A batch has rows of log-normal length, a quarter of each its prompt, split into micro-batches
that both sides pack without padding. The loss is the mean log-prob of all response tokens, and must be equal.
A speed is tokens (prompt + response) per second of the fastest repeat; the two sides alternate.

The peer is `Qwen2ForCausalLM` at its best: its inputs are on the device before the clock starts, it computes
logits of response tokens only, and its attention of packed rows is flash attention: that of the package
flash_attn if it is installed, else torch's own `varlen_attn` (on a CPU `sdpa`). Compared with `full`, it
recomputes all layers too (its gradient checkpointing); compared with `selective`, it recomputes nothing,
because it has no such mode.

MFU is the operations that the model needs (megarl/models/counts.py; a third of them for the scoring pass)
relative to the peak of the GPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen2Config

from benchmarks.hugging_face_peer import HuggingFace, Step, flash_attention, pack, prompt_tokens
from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric
from megarl.config.layers import has_transformer_engine
from megarl.config.schema import (
    Device,
    DType,
    EngineConfig,
    Layers,
    OptimConfig,
    ParallelConfig,
    Recomputation,
    Recompute,
)
from megarl.data.packing import plan_micro_batches
from megarl.engine import platform
from megarl.engine.spec import ModelSpec
from megarl.machine.usage import Stopwatch
from megarl.models.architecture import Architecture
from megarl.models.counts import training_flops
from megarl.models.families import read_architecture

if TYPE_CHECKING:
    from megarl.engine.engine import MegatronEngine
    from megarl.engine.groups import ParallelGroups

LENGTH_SIGMA = 0.6  # standard deviation of log(length)
SAME_LOSS = {DType.float32: 1e-4, DType.bfloat16: 2e-2}


class Shape(NamedTuple):
    """A model of the family Qwen2.

    Attributes:
        longest: The most tokens of a row.
        micro_batch: The most tokens of several rows.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool
    longest: int
    micro_batch: int

    def config(self) -> Qwen2Config:
        sizes = {
            name: value for name, value in self._asdict().items() if name not in ("longest", "micro_batch")
        }
        return Qwen2Config(max_position_embeddings=self.longest, **sizes)


SHAPES = {
    "tiny": Shape(64, 96, 2, 4, 2, 199, False, longest=32, micro_batch=64),
    "0.5B": Shape(896, 4864, 24, 14, 2, 151_936, True, longest=4096, micro_batch=8192),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151_936, True, longest=4096, micro_batch=8192),
    "7B": Shape(3584, 18_944, 28, 28, 4, 152_064, False, longest=4096, micro_batch=4096),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    device: torch.device
    dtype: DType  # bfloat16 or float32
    tokens: int  # of a batch
    repeats: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype.value)


def draw_lengths(tokens: int, longest: int, seed: int = 0) -> list[int]:
    """Draw the lengths of rows with at least two tokens each and `tokens` in total.

    Their mean is about a third of the longest allowed length, which is above two.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []

    while (left := tokens - sum(lengths)) > 0:
        draw = round(longest / 3 * float((torch.randn((), generator=generator) * LENGTH_SIGMA).exp()))
        length = min(max(draw, 2), longest, left)
        lengths.append(length + (left - length == 1 and length < longest))

    if lengths[-1] == 1:  # the previous row has the longest length
        lengths[-2:] = [lengths[-2] - 1, 2]
    return lengths


def make_batch(lengths: Sequence[int], vocab_size: int) -> dict[str, Tensor]:
    """Make a padded batch (B, P + R), padded to the left of prompts and to the right of responses."""
    total = torch.tensor(lengths)
    prompts = torch.tensor([prompt_tokens(length) for length in lengths])
    width = int(prompts.max())
    column = torch.arange(width + int((total - prompts).max()))
    mask = (column >= width - prompts[:, None]) & (column < width + (total - prompts)[:, None])
    ids = torch.randint(0, vocab_size, tuple(mask.shape), generator=torch.Generator().manual_seed(1))

    return {
        "input_ids": torch.where(mask, ids, 0),
        "attention_mask": mask.long(),
        "response_mask": mask[:, width:],
    }


def build_engine(
    folder: Path,
    peer: HuggingFace,
    settings: Settings,
    groups: ParallelGroups,
    layers: Layers,
    recompute: Recompute | None,
) -> MegatronEngine:
    """Build an engine from the folder's config.json, with the peer's weights.

    The optimizer only has what a forward and backward pass needs: its state would be twelve bytes per
    parameter, and the largest shape would not fit on one GPU together with the peer.

    Args:
        recompute: None builds an engine that only scores.
    """
    from megarl.engine.engine import MegatronEngine
    from megarl.weights.shards import Shards, held_slices
    from megarl.weights.tensors import Part

    class Gradients:
        megatron_configs = ()

        def __init__(self, chunks: Sequence[Any]) -> None:
            self._chunks = chunks

        def zero_grad(self) -> None:
            for chunk in self._chunks:
                chunk.zero_grad_buffer()

    class MeasuredEngine(MegatronEngine):
        def _load(self, folder: str) -> None:
            tensors = dict(peer.model.named_parameters())
            architecture = self.spec.architecture
            shards = Shards(
                parameters=self.parameters(), architecture=architecture, layout=self.layout, head="lm"
            )

            for name, slices in held_slices(architecture, self.layout, "lm").items():
                for tensor_slice in slices:
                    left = tensors[name].detach()[tensor_slice.index].flatten()
                    for region in shards.regions(Part(name, tensor_slice)):
                        region.copy_(left[: region.numel()].view_as(region))
                        left = left[region.numel() :]

        def _build_optimizer(self, optim: OptimConfig, dtype: torch.dtype) -> Any:
            return Gradients(self.chunks)

    spec = ModelSpec(
        path=str(folder),
        architecture=read_architecture(str(folder)),
        head="lm",
        dtype=settings.dtype,
        parallel=groups.parallel,
        engine=EngineConfig(layers=layers),
        device=Device(settings.device.type),
        seed=0,
        optim=OptimConfig() if recompute else None,
        recomputation=Recomputation(how=recompute or Recompute.none),
    )

    return MeasuredEngine(spec, groups)


class Result(NamedTuple):
    """Tokens per second and, if the device's peak is known, MFU.

    They are None for a contestant that did not fit into the device's memory.
    """

    name: str
    ours: float | None
    peer: float | None
    tflop_per_token: float
    peak: float | None  # TFLOP/s

    def __str__(self) -> str:
        ratio = f"{self.ours / self.peer:5.2f}" if self.ours and self.peer else "    -"
        return (
            f"{self.name:<38} {ratio}   megarl {self._speed(self.ours)}   Hugging Face "
            f"{self._speed(self.peer)}"
        )

    def _speed(self, speed: float | None) -> str:
        if speed is None:
            return f"{'out of memory':>25}"
        mfu = f"MFU {100 * speed * self.tflop_per_token / self.peak:4.1f} %" if self.peak else ""
        return f"{speed:9,.0f} tokens/s {mfu}"


def compare(name: str, ours: Step, peer: Step, settings: Settings) -> tuple[float | None, float | None]:
    """Return the seconds of each contestant, the fastest of the repeats, without the first calls.

    They are None if the device's memory was too small.

    Raises:
        ValueError: The losses differ, so the contestants did not do the same work.
    """
    steps = [ours, peer]
    losses: list[Tensor | float | None] = [None, None]
    seconds: list[list[float]] = [[], []]

    for repeat in range(settings.repeats + 1):
        for side, step in enumerate(steps):
            if repeat and not seconds[side]:
                continue
            stopwatch = Stopwatch(settings.device)
            try:
                with stopwatch:
                    losses[side] = step()
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                continue
            seconds[side].append(stopwatch.seconds())

    our_loss, peers_loss = losses
    if our_loss is not None and peers_loss is not None:
        difference = abs(float(our_loss) - float(peers_loss))
        if not difference <= SAME_LOSS[settings.dtype]:  # also if one is NaN
            raise ValueError(f"{name}: the contestants disagree on the loss: {our_loss} and {peers_loss}")

    fastest = [min(times[1:], default=None) for times in seconds]
    return fastest[0], fastest[1]


class Work:
    """The work of one shape on both sides: the same batch, split in the same way."""

    def __init__(self, shape: Shape, architecture: Architecture, settings: Settings) -> None:
        lengths = draw_lengths(settings.tokens, shape.longest)
        plan = plan_micro_batches(lengths, 1, max_tokens=shape.micro_batch).ranks[0]
        self.batch = make_batch(lengths, shape.vocab_size)
        self._columns = DataProto.from_dict(self.batch).ragged
        self.micro_batches = [list(rows) for rows in plan.micro_batches]
        self.packed = [pack(self.batch, rows, settings.device) for rows in self.micro_batches]
        rows = [(prompt_tokens(length), length - prompt_tokens(length)) for length in lengths]

        # forward + backward
        self.tflop_per_token = training_flops(architecture, rows) / settings.tokens / 1e12
        self._num_responses = float(self.batch["response_mask"].sum())

    def trains(self, engine: MegatronEngine) -> Step:
        return lambda: (
            engine.forward_backward(self._columns, self.micro_batches, self._loss, extras=())["loss"].value
        )

    def scores(self, engine: MegatronEngine) -> Step:
        def score() -> float:
            outputs = engine.forward(self._columns, self.micro_batches, extras=())
            assert outputs is not None, "one rank has the last stage"
            return -float(outputs["log_probs"].values.sum()) / self._num_responses

        return score

    def _loss(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Metric]]:
        value = -(outputs["log_probs"] * rows["response_mask"]).sum() / self._num_responses
        return value, {"loss": Metric.sum(value)}


def contests(shape: Shape, folder: Path, settings: Settings, groups: ParallelGroups) -> Iterator[Result]:
    """Run every installed kind of layers, each recomputation, and the scoring pass.

    Args:
        folder: An empty folder.
    """
    attention = flash_attention(settings.device, settings.torch_dtype)
    peer = HuggingFace(shape.config(), settings.device, settings.torch_dtype, attention)
    peer.model.config.save_pretrained(folder)
    work = Work(shape, read_architecture(str(folder)), settings)
    peak = platform.current().peak_tflops(settings.dtype)

    for layers, recompute in product(kinds_of_layers(settings), [*Recompute, None]):
        engine = build_engine(folder, peer, settings, groups, layers, recompute)
        if recompute:
            what = f"{layers.value}, recompute {recompute.value}"
            tflop = work.tflop_per_token
            sides = work.trains(engine), peer.trains(work.packed, recompute is Recompute.full)
        else:
            what = f"{layers.value}, log-probs"
            tflop = work.tflop_per_token / 3
            sides = work.scores(engine), peer.scores(work.packed)
        ours, peers = (settings.tokens / each if each else None for each in compare(what, *sides, settings))
        yield Result(what, ours, peers, tflop_per_token=tflop, peak=peak)
        del engine, sides
        free(settings.device)


def results(names: Sequence[str], settings: Settings) -> Iterator[Result]:
    """Yield the results of these shapes, one after the other.

    The process uses the device and has its own process group.
    """
    from megarl.engine import groups as engine_groups

    groups = engine_groups.initialize(ParallelConfig(), seed=0)

    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for result in contests(SHAPES[name], Path(folder), settings, groups):
                yield result._replace(name=f"{name} {result.name}")
        free(settings.device)


def kinds_of_layers(settings: Settings) -> list[Layers]:
    """Return the kinds of layers that are available here for packed rows."""
    has_both = (
        settings.device.type == "cuda" and settings.dtype is DType.bfloat16 and has_transformer_engine()
    )
    return [Layers.transformer_engine, Layers.local] if has_both else [Layers.local]


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def parse(options: Sequence[str] | None) -> tuple[list[str], Settings]:
    """Return the names of the shapes, and the settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="bfloat16 on cuda, float32 on cpu where it is not given",
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, help="all but tiny on cuda, tiny on cpu where none is named"
    )
    parser.add_argument(
        "--tokens", type=int, help="of a batch: 16384 on cuda, 256 on cpu where it is not given"
    )
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(options)
    on_cuda = given.device == "cuda"
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    settings = Settings(
        device=device,
        dtype=DType(given.dtype or ("bfloat16" if on_cuda else "float32")),
        tokens=given.tokens or (16_384 if on_cuda else 256),
        repeats=given.repeats,
    )

    if settings.tokens < 2 or settings.repeats < 1:
        parser.error(
            f"--tokens {settings.tokens} and --repeats {settings.repeats}: at least 2 and 1 are needed"
        )

    return given.shapes or ([name for name in SHAPES if name != "tiny"] if on_cuda else ["tiny"]), settings


def main(options: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 1 if there is no GPU and --device cpu was not given."""
    names, settings = parse(options)
    on_cuda = settings.device.type == "cuda"

    if on_cuda and not torch.cuda.is_available():
        print("torch sees no GPU; use --device cpu for a dry run")
        return 1

    active = platform.activate(Device(settings.device.type))
    attention = flash_attention(settings.device, settings.torch_dtype)
    print(
        f"{torch.cuda.get_device_name(0) if on_cuda else 'a CPU'}, torch {torch.__version__}, "
        f"{settings.dtype.value}"
    )
    print(f"{settings.tokens:,} tokens a batch; the peer's attention is {attention}")
    if Layers.transformer_engine not in kinds_of_layers(settings):
        print("left out: layers of Transformer Engine, which are for bfloat16 on CUDA where it is installed")
    print(
        f"\n{'comparison':<38} ratio   tokens of forward + backward, or of the forward pass, per second",
        flush=True,
    )

    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group(
            active.distributed_backend, init_method=f"file://{Path(store) / 'store'}", rank=0, world_size=1
        )
        try:
            for result in results(names, settings):
                print(result, flush=True)
        finally:
            # A process that ends with a live NCCL group may hang.
            dist.destroy_process_group()

    return 0


if __name__ == "__main__":
    sys.exit(main())
