"""Measure how fast the engine trains on this machine's CPU, as ratios to peers measured in the same run.

    python -m benchmarks.engine [--quick] [--cpu-time] [--only hugging_face ...]

The benchmark measures forward + backward of a batch (no optimizer step) in float32, in one process with as
many threads as cores, for Qwen2-style models with random weights. The loss is the mean log-prob of all
response tokens. A speed is real tokens (prompt + response, without padding) per second, the median of several
repeats. The repeats of two contestants alternate, so that other load on the machine slows both. A ratio is
the median of the ratios of neighboring repeats; repeats are added until its standard error is below 1 %, up
to five times the minimum. Read the ratios, not the speeds. On a busy machine two threads wait for each other
most of the time: `--cpu-time` uses one thread and its processor seconds.

hugging_face   the engine (packed) over `Qwen2ForCausalLM` (sdpa attention) on the same rows, with the same matrix products on both
               sides: torch's own, which are MKL's on x86, and oneDNN's, which the engine uses (megarl/engine/cpu_kernels.py). The peer
               is at its best: all rows have one length, so it pads nothing and needs no mask; it computes logits of response tokens
               only and the fused cross-entropy, whereas the engine also computes the entropy.
               In addition `product`: the engine with oneDNN's products over itself with torch's, the gain of that choice
packing        rows of log-normal length, on average a third of the longest allowed: packed over padded, both in the engine
               with the same rows in each micro-batch. Padding ends at the longest row of its own micro-batch.
token_budget   the same rows, packed on both sides, in the same memory of N tokens: micro-batches of at most N tokens over
               micro-batches of a fixed number of rows. A fixed number must be safe if every row has the longest
               length: N // longest. The gain of a budget shrinks as memory grows, because a few rows keep a CPU busy; the
               target applies to tight memory, for one row of the longest length, and the rest is shown. There is no
               pipeline and no data parallelism here, where micro-batches of equal work would gain more.
shared_prompts eight samples of one prompt in a micro-batch, all packed: the prompt once over the prompt in every row. With
               prompts as long as responses 16 parts of tokens become 9 (1.78 without attention), with prompts of a quarter of the
               response 40 become 33 (1.21).
"""

from __future__ import annotations

import argparse
import math
import os
import platform as host
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.history.rows import Ratio, at_least, record
from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric
from megarl.config.schema import Device, DType, EngineConfig, OptimConfig, ParallelConfig
from megarl.data.packing import plan_micro_batches
from megarl.engine import platform
from megarl.engine.spec import ModelSpec
from megarl.models.families import read_architecture

platform.activate(Device.cpu)  # before anything that imports Megatron

from megarl.engine import cpu_kernels, groups  # noqa: E402
from megarl.engine.engine import MegatronEngine, MicroBatches  # noqa: E402

LONGEST = 256  # tokens of a row, prompt and response
PROMPT = 64  # a quarter of each row
LENGTH_SIGMA = 0.6  # of log(length): about 2 % of the rows are cut off at LONGEST
SAME_LOSS = 1e-4
ERROR = 0.01
SAMPLES = 8  # of a prompt, where prompts are shared
COMPARISONS = ("hugging_face", "packing", "shared_prompts", "token_budget")
PRODUCTS = ("torch", "oneDNN") if torch.backends.mkldnn.is_available() else ("torch",)

RowLayout = Literal["padded", "packed", "shared"]  # of micro-batches; shared: packed, with each prompt once
Step = Callable[[], Tensor | float]  # forward and backward of the whole batch; returns the loss


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Qwen2-style model and the number of rows in its comparisons. Two query heads share a key head."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    full_rows: int  # of the longest length
    log_normal_rows: int
    safe_rows: tuple[int, ...]  # memories of the token budget, in rows of the longest length


MODELS = {
    "10M": Shape(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=4096,
        full_rows=8,
        log_normal_rows=32,
        safe_rows=(1, 2, 4),
    ),
    "100M": Shape(
        hidden_size=640,
        intermediate_size=2560,
        num_hidden_layers=12,
        num_attention_heads=10,
        vocab_size=16384,
        full_rows=4,
        log_normal_rows=16,
        safe_rows=(1,),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """The times of two contestants.

    Attributes:
        seconds: Of each contestant, repeat by repeat.
        target: None if the result is only shown.
    """

    name: str
    num_tokens: int
    seconds: Mapping[str, Sequence[float]]
    target: float | None

    @property
    def ratios(self) -> list[float]:
        """Return the speed of the first contestant over the second, repeat by repeat."""
        ours, peer = self.seconds.values()
        return [theirs / our for our, theirs in zip(ours, peer, strict=True)]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def error(self) -> float:
        """Return the standard error of the ratio.

        It is that of the median of a normal distribution, whose quartiles are 1.35 standard deviations apart.
        """
        lower, _, upper = quantiles(self.ratios, n=4)
        return math.sqrt(math.pi / 2 / len(self.ratios)) * (upper - lower) / 1.35

    @property
    def is_met(self) -> bool:
        return self.target is None or self.ratio >= self.target

    def __str__(self) -> str:
        target = "" if self.target is None else f"{self.target:.1f} {'met' if self.is_met else 'MISSED'}"
        speeds = ", ".join(
            f"{name} {self.num_tokens / median(seconds):,.0f}" for name, seconds in self.seconds.items()
        )
        return f"{self.name:<31} {self.ratio:6.3f} ± {self.error:.3f}   {target:<11} {speeds}"


def make_batch(lengths: Sequence[int], vocab_size: int) -> dict[str, Tensor]:
    """Make a padded batch of rows of `lengths` tokens.

    Returns:
        Tensors (B, S), padded to the left of prompts and to the right of responses.
    """
    total = torch.tensor(lengths)
    prompts = (total * PROMPT // LONGEST).clamp(min=1)
    column = torch.arange(LONGEST)
    mask = (column >= PROMPT - prompts[:, None]) & (column < PROMPT + (total - prompts)[:, None])
    ids = torch.randint(0, vocab_size, tuple(mask.shape), generator=torch.Generator().manual_seed(1))

    return {
        "input_ids": torch.where(mask, ids, 0),
        "attention_mask": mask.long(),
        "response_mask": mask[:, PROMPT:],
    }


def make_samples(prompt_tokens: int, responses: Sequence[int], vocab_size: int) -> dict[str, Tensor]:
    """Make a batch like `make_batch`, with SAMPLES rows for each prompt."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(
        0, vocab_size, (len(responses) // SAMPLES, prompt_tokens), generator=generator
    ).repeat_interleave(SAMPLES, 0)
    ids = torch.cat(
        [prompts, torch.randint(0, vocab_size, (len(responses), max(responses)), generator=generator)], dim=1
    )
    mask = torch.arange(ids.shape[1]) < prompt_tokens + torch.tensor(responses)[:, None]

    return {
        "input_ids": torch.where(mask, ids, 0),
        "attention_mask": mask.long(),
        "response_mask": mask[:, prompt_tokens:],
    }


def log_normal_lengths(num_rows: int, longest: int = LONGEST) -> list[int]:
    """Draw lengths, truncated at the longest and scaled so that their mean is a third of it."""
    draws = (torch.randn(num_rows, generator=torch.Generator().manual_seed(0)) * LENGTH_SIGMA).exp()
    lengths = draws
    for _ in range(20):  # cutting off lowers the mean a little each time
        lengths = (lengths * (longest / 3 / lengths.mean())).clamp(max=longest)
    return [max(2, round(length)) for length in lengths.tolist()]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long to measure.

    Each contestant is timed at least `repeats` times, and up to five times as often until the error of the
    ratio is below ERROR. `clock` returns seconds.
    """

    clock: Callable[[], float]
    repeats: int


def compare(
    name: str, contestants: Mapping[str, Step], num_tokens: int, timing: Timing, target: float | None
) -> Result:
    """Time two contestants in alternation, also of which comes first, after two untimed calls that allocate memory.

    Raises:
        ValueError: Their losses differ, so they did not do the same work.
    """
    for _ in range(2):
        losses = {key: step() for key, step in contestants.items()}
    if max(losses.values()) - min(losses.values()) > SAME_LOSS:
        raise ValueError(f"{name}: the contestants disagree on the loss: {losses}")
    seconds: dict[str, list[float]] = {key: [] for key in contestants}
    result = Result(name=name, num_tokens=num_tokens, seconds=seconds, target=target)
    order = list(contestants)

    for repeat in range(1, 5 * timing.repeats + 1):
        for key in order:
            start = timing.clock()
            contestants[key]()
            seconds[key].append(timing.clock() - start)
        if repeat >= timing.repeats and result.error < ERROR:
            break
        order.reverse()

    return result


class Contest:
    """One model with random weights, in Hugging Face and in the engine."""

    def __init__(self, size: str) -> None:
        self.size = size
        self.shape = shape = MODELS[size]
        torch.manual_seed(0)
        config = Qwen2Config(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_attention_heads // 2,
            vocab_size=shape.vocab_size,
            tie_word_embeddings=False,
            attn_implementation="sdpa",  # pyrefly: ignore[unexpected-keyword]  # in **kwargs
        )
        self.hugging_face = Qwen2ForCausalLM(config).float().train()
        self.num_parameters = sum(parameter.numel() for parameter in self.hugging_face.parameters())

        with tempfile.TemporaryDirectory() as folder:
            self.hugging_face.save_pretrained(folder)
            self._engine = _build_engine(folder)

    def engine(self, rows: RowLayout) -> MegatronEngine:
        """Return the only engine, configured for these rows from now on."""
        config = EngineConfig(packing=rows != "padded", share_prompts=rows == "shared")
        self._engine.spec = replace(self._engine.spec, engine=config)
        return self._engine

    def engine_step(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches, rows: RowLayout = "packed"
    ) -> Step:
        num_response_tokens = float(batch["response_mask"].sum())
        columns = DataProto.from_dict(batch).ragged

        def loss(
            outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]
        ) -> tuple[Tensor, dict[str, Metric]]:
            value = -(outputs["log_probs"] * rows["response_mask"]).sum() / num_response_tokens
            return value, {"loss": Metric.sum(value)}

        return lambda: self.engine(rows).forward_backward(columns, micro_batches, loss)["loss"].value

    def hugging_face_step(self, ids: Tensor) -> Step:
        """Run Hugging Face on `ids` (B, LONGEST), in which every row is full."""
        logit_positions = torch.arange(PROMPT - 1, LONGEST - 1)

        def step() -> float:
            self.hugging_face.zero_grad(set_to_none=True)
            logits = self.hugging_face(ids, use_cache=False, logits_to_keep=logit_positions).logits
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT:].flatten())
            loss.backward()
            return float(loss.detach())

        return step


def _build_engine(folder: str) -> MegatronEngine:
    spec = ModelSpec(
        path=folder,
        architecture=read_architecture(folder),
        head="lm",
        dtype=DType.float32,
        parallel=ParallelConfig(),
        engine=EngineConfig(),
        device=Device.cpu,
        seed=0,
        optim=OptimConfig(),
    )
    return MegatronEngine(spec, groups.initialize(spec.parallel, spec.seed))


def multiplying_with(product: str, step: Step) -> Step:
    """Return the step with linear layers of one of PRODUCTS, in the engine and in Hugging Face."""

    def by_onednn(layer: torch.nn.Linear, hidden: Tensor) -> Tensor:
        return cpu_kernels.linear(hidden, layer.weight, layer.bias)

    def run() -> Tensor | float:
        with mock.patch.object(cpu_kernels, "HAS_ONEDNN", product == "oneDNN"):
            if product == "torch":
                return step()
            with mock.patch.object(torch.nn.Linear, "forward", by_onednn):
                return step()

    return run


def beside_hugging_face(contest: Contest, timing: Timing) -> Iterator[Result]:
    num_rows = contest.shape.full_rows
    batch = make_batch([LONGEST] * num_rows, contest.shape.vocab_size)
    ours = contest.engine_step(batch, [range(num_rows)])
    theirs = contest.hugging_face_step(batch["input_ids"])

    for product in PRODUCTS:
        contestants = {
            "megarl": multiplying_with(product, ours),
            "Hugging Face": multiplying_with(product, theirs),
        }
        yield compare(
            f"hugging_face {contest.size}, {product}", contestants, num_rows * LONGEST, timing, target=1.0
        )

    if len(PRODUCTS) > 1:
        products = {product: multiplying_with(product, ours) for product in reversed(PRODUCTS)}
        yield compare(f"product {contest.size}", products, num_rows * LONGEST, timing, target=None)


def packed_beside_padded(contest: Contest, rows_together: int, timing: Timing) -> Result:
    lengths = log_normal_lengths(contest.shape.log_normal_rows)
    batch = make_batch(lengths, contest.shape.vocab_size)
    cuts = [range(start, start + rows_together) for start in range(0, len(lengths), rows_together)]
    contestants = {
        "packed": contest.engine_step(batch, cuts),
        "padded": contest.engine_step(batch, cuts, "padded"),
    }

    return compare(
        f"packing {contest.size}, {rows_together} rows each", contestants, sum(lengths), timing, target=1.3
    )


def token_budget_beside_fixed(contest: Contest, safe_rows: int, timing: Timing) -> Result:
    """Compare the two in memory for `safe_rows` rows of the longest length."""
    lengths = log_normal_lengths(contest.shape.log_normal_rows)
    batch = make_batch(lengths, contest.shape.vocab_size)
    max_tokens = safe_rows * LONGEST
    plans = {
        "budget": plan_micro_batches(lengths, 1, max_tokens=max_tokens).ranks[0].micro_batches,
        "fixed": plan_micro_batches(lengths, 1, sequences=safe_rows).ranks[0].micro_batches,
    }
    contestants = {
        f"{name} ({len(plan)} micro-batches)": contest.engine_step(batch, list(plan))
        for name, plan in plans.items()
    }
    name = f"token_budget {contest.size}, {max_tokens} tokens"

    return compare(name, contestants, sum(lengths), timing, target=1.2 if safe_rows == 1 else None)


def shared_beside_repeated(
    contest: Contest, prompt_tokens: int, mean_response: int, target: float, timing: Timing
) -> Result:
    """Compare on responses whose lengths are half to one and a half times the mean."""
    responses = [mean_response // 2 + mean_response * sample // (SAMPLES - 1) for sample in range(SAMPLES)]
    batch = make_samples(prompt_tokens, responses, contest.shape.vocab_size)
    rows = [range(SAMPLES)]
    contestants = {
        "shared": contest.engine_step(batch, rows, "shared"),
        "repeated": contest.engine_step(batch, rows),
    }
    name = f"shared_prompts {contest.size}, {prompt_tokens}+{mean_response}"

    return compare(name, contestants, int(batch["attention_mask"].sum()), timing, target)


def run_contests(size: str, comparisons: Collection[str], timing: Timing) -> Iterator[Result]:
    contest = Contest(size)
    shape = contest.shape
    print(
        f"{size}: {contest.num_parameters / 1e6:.1f} million parameters, {shape.num_hidden_layers} layers, "
        f"hidden {shape.hidden_size}, "
        f"{shape.num_attention_heads} heads, vocabulary {shape.vocab_size}"
    )
    if "hugging_face" in comparisons:
        yield from beside_hugging_face(contest, timing)
    if "packing" in comparisons:
        yield packed_beside_padded(contest, 8, timing)

    if "shared_prompts" in comparisons:
        yield shared_beside_repeated(contest, 128, 128, 1.5, timing)
        yield shared_beside_repeated(contest, 48, 192, 1.1, timing)

    if "token_budget" in comparisons:
        for safe_rows in shape.safe_rows:
            yield token_budget_beside_fixed(contest, safe_rows, timing)


def processor_name() -> str:
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return host.processor() or host.machine()


def race(
    command: str, results: Callable[[Timing], Iterable[Result]], what: str, repeats: int, cpu_time: bool
) -> int:
    """Print results as they arrive, in this process and a process group of its own, and return 1 if a target is missed.

    Args:
        cpu_time: Use one thread and its processor seconds.
    """
    num_cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(1 if cpu_time else num_cores)
    disable_progress_bar()
    print(f"{processor_name()}, {num_cores} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    print(f"{torch.get_num_threads()} threads, seconds {'on the processor' if cpu_time else 'on the clock'}")
    print(f"{what:<31}  ratio           target      tokens/s")
    missed = []
    judged: dict[str, Ratio] = {}

    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/rendezvous", rank=0, world_size=1)
        for result in results(
            Timing(clock=time.process_time if cpu_time else time.perf_counter, repeats=repeats)
        ):
            print(result, f"({len(result.ratios)} repeats)", flush=True)
            if result.target is not None:
                judged[result.name] = at_least(result.ratio, result.target)
            if not result.is_met:
                missed.append(result.name)
        dist.destroy_process_group()

    record(command, ratios=judged)
    print(f"targets missed: {', '.join(missed)}" if missed else "every target is met")
    return 1 if missed else 0


def main() -> int:
    """Run the comparisons and return 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the 10M model only, half as many repeats")
    parser.add_argument("--cpu-time", action="store_true", help="one thread and its processor seconds")
    parser.add_argument(
        "--only", choices=COMPARISONS, nargs="+", default=COMPARISONS, help="these comparisons"
    )
    arguments = parser.parse_args()

    def results(timing: Timing) -> Iterator[Result]:
        for size in ["10M"] if arguments.quick else MODELS:
            yield from run_contests(size, arguments.only, timing)

    return race("benchmarks.engine", results, "comparison", 5 if arguments.quick else 10, arguments.cpu_time)


if __name__ == "__main__":
    sys.exit(main())
