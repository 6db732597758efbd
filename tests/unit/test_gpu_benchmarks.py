"""benchmarks/gpu on the CPU: the same functions on tiny shapes, and what they count and print."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import hugging_face_peer
from benchmarks.gpu import copies, engine, weights
from benchmarks.gpu.engine import SHAPES, Result, Settings, Work
from benchmarks.hugging_face_peer import HuggingFace, prompt_tokens
from megarl.config.schema import Device, DType
from megarl.engine import platform
from megarl.models.families import read_architecture
from tests.ranks import RankPool
from tests.unit.engine.test_layers import slow_varlen_attn

CPU = Settings(device=torch.device("cpu"), dtype=DType.float32, tokens=100, repeats=1)


@pytest.mark.parametrize(
    ("tokens", "longest"), [(100_000, 4096), (16_384, 4096), (256, 32), (33, 32), (2, 32)]
)
def test_lengths_are_drawn_with_a_seed_and_fill_the_batch(tokens: int, longest: int) -> None:
    for seed in range(20):
        lengths = engine.draw_lengths(tokens, longest, seed)
        assert lengths == engine.draw_lengths(tokens, longest, seed)
        assert sum(lengths) == tokens
        assert 2 <= min(lengths) <= max(lengths) <= longest
    if tokens > 10_000:
        assert len(set(lengths)) > 5
        assert 0.8 < sum(lengths) / len(lengths) / (longest / 3) < 1.5
        assert lengths != engine.draw_lengths(tokens, longest, 0)


def test_the_peers_packed_attention_is_its_own_of_one_row_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hugging_face_peer, "varlen_attn", slow_varlen_attn)
    SHAPES["tiny"].config().save_pretrained(tmp_path)
    work = Work(SHAPES["tiny"], read_architecture(str(tmp_path)), CPU)
    assert len(work.micro_batches) > 1
    assert any(len(rows) > 1 for rows in work.micro_batches)
    by_name = {}

    for attention in ("torch_varlen", "sdpa", "eager"):
        peer = HuggingFace(SHAPES["tiny"].config(), CPU.device, torch.float32, attention)
        losses = [peer.trains(work.packed, recomputes)() for recomputes in (False, True)]
        by_name[attention] = [*losses, peer.scores(work.packed)()]

    rows = [
        ids[mask.bool()]
        for ids, mask in zip(work.batch["input_ids"], work.batch["attention_mask"], strict=True)
    ]
    total = 0.0

    for row in rows:
        log_softmax = peer.model(row[None]).logits[0].log_softmax(-1)
        first = prompt_tokens(len(row))
        total += float(log_softmax[first - 1 : -1].gather(1, row[first:, None]).detach().sum())

    expected = -total / float(work.batch["response_mask"].sum())
    for name, losses in by_name.items():
        assert losses == pytest.approx([expected] * 3, rel=1e-5), name


@pytest.mark.parametrize(
    ("options", "names", "settings"),
    [
        (
            [],
            ["0.5B", "1.5B", "7B"],
            Settings(device=torch.device("cuda", 0), dtype=DType.bfloat16, tokens=16_384, repeats=3),
        ),
        (
            ["--device", "cpu", "--dtype", "bfloat16", "--tokens", "64", "--repeats", "1"],
            ["tiny"],
            Settings(device=torch.device("cpu"), dtype=DType.bfloat16, tokens=64, repeats=1),
        ),
        (
            ["--shapes", "7B", "--dtype", "float32"],
            ["7B"],
            Settings(device=torch.device("cuda", 0), dtype=DType.float32, tokens=16_384, repeats=3),
        ),
    ],
)
def test_what_is_measured_where_nothing_else_is_said(
    options: Sequence[str], names: list[str], settings: Settings
) -> None:
    assert engine.parse(options) == (names, settings)


@pytest.mark.parametrize("wrong", [["--shapes", "8B"], ["--tokens", "1"], ["--repeats", "0"]])
def test_wrong_options_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        engine.parse(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_a_line_has_ratio_speeds_and_what_they_are_of_the_peak() -> None:
    line = str(Result("7B local", 9890.0, 4945.0, tflop_per_token=0.04, peak=989.0))
    assert (
        " ".join(line.split())
        == "7B local 2.00 megarl 9,890 tokens/s MFU 40.0 % Hugging Face 4,945 tokens/s MFU 20.0 %"
    )
    line = str(Result("7B local", 9890.0, None, tflop_per_token=0.04, peak=None))
    assert " ".join(line.split()) == "7B local - megarl 9,890 tokens/s Hugging Face out of memory"


def test_contestants_take_turns_and_must_do_the_same_work() -> None:
    settings = Settings(device=torch.device("cpu"), dtype=DType.float32, tokens=100, repeats=2)
    calls = []

    def contestant(name: str, loss: float) -> hugging_face_peer.Step:
        return lambda: calls.append(name) or loss

    ours, peer = engine.compare("alike", contestant("ours", 1.0), contestant("peer", 1.00001), settings)
    assert calls == ["ours", "peer"] * 3
    assert ours is not None
    assert peer is not None
    with pytest.raises(ValueError, match="unlike: the contestants disagree on the loss: 1.0 and 1.1"):
        engine.compare("unlike", contestant("ours", 1.0), contestant("peer", 1.1), settings)
    with pytest.raises(ValueError, match="broken: the contestants disagree on the loss: nan and 1.0"):
        engine.compare("broken", contestant("ours", float("nan")), contestant("peer", 1.0), settings)


def test_one_that_does_not_fit_ends_nothing() -> None:
    calls = []

    def too_large() -> float:
        calls.append(1)
        raise torch.OutOfMemoryError("7 GiB more")

    ours, peer = engine.compare("large", too_large, lambda: 1.0, CPU)
    assert (ours, calls) == (None, [1])
    assert peer is not None


def measured(names: list[str], settings: Settings) -> list[Result]:
    """In a rank."""
    platform.activate(Device.cpu)
    return list(engine.results(names, settings))


def test_the_engines_benchmark_rehearses_on_the_cpu(rank_pool: RankPool) -> None:
    (results,) = rank_pool.run(measured, world_size=1, names=["tiny"], settings=CPU)
    assert [result.name for result in results] == [
        f"tiny local, {what}"
        for what in ("recompute none", "recompute selective", "recompute full", "log-probs")
    ]
    assert all(result.ours and result.peer and result.peak is None for result in results)
    training = results[0].tflop_per_token
    scoring = results[-1].tflop_per_token
    assert training == pytest.approx(3 * scoring)

    # two layers, of half as many keys and values as queries at least
    assert scoring > 2 * 2 * 64 * (4 * 64 + 3 * 96) / 1e12 / 2


def test_the_weights_benchmark_rehearses_on_the_cpu(
    forked_processes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weights.main(["--device", "cpu", "--repeats", "1"]) == 0
    (last,) = capsys.readouterr().out.strip().rpartition("\n\n")[2].splitlines()
    assert re.search(r"push .* GB/s, memcpy .* GB/s, ratio to two copies .* not enforced: a dry run", last)


def copied(nbytes: int, count: int) -> str:
    """In a rank."""
    platform.activate(Device.cpu)
    return copies.measured(torch.device("cpu"), nbytes, count)


def test_the_benchmark_of_copies_rehearses_on_the_cpu(rank_pool: RankPool) -> None:
    (printed,) = rank_pool.run(copied, world_size=1, nbytes=70_000_000, count=20)
    *large, small = printed.splitlines()
    assert [line.partition(":")[0] for line in large] == [
        "0.07 GB into pinned memory",
        "0.07 GB into a mapped file",
        "0.07 GB into a mapped file, through two pinned buffers",
    ]
    assert re.fullmatch(r"20 copies of 256 KiB: \S+ us each, \S+ us in one call, \S+ us as one copy", small)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("benchmark", [copies, engine, weights])
def test_without_a_gpu_a_benchmark_names_the_rehearsal(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main([]) == 1
    assert "--device cpu" in capsys.readouterr().out
