"""Test that SGLang and transformers read a folder that was converted to Megatron's format and back."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megarl.checkpoints.convert.distributed_writer import write_distributed
from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.role_folder import Layout
from megarl.rollout.interface import SamplingParameters
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.weights.manifest import manifest_of
from tests.unit.rollout.models import push
from tests.unit.rollout.sglang_engines import server_model

PROMPTS = [[5, 6, 14, 8], [9], [20, 21, 22, 23, 24, 25]]
GREEDY = SamplingParameters(max_new_tokens=16, seed=0, temperature=0, ignore_eos=True)


def test_sglang_writes_what_transformers_does(sglang_server: SGLangEngine, tmp_path: Path) -> None:
    """The model has several files, so that SGLang needs the index."""
    server_model(seed=11).save_pretrained(tmp_path / "original")
    layout = Layout(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        virtual_pipeline_parallel_size=None,
        data_parallel_size=1,
    )
    write_distributed(open_model(tmp_path / "original"), tmp_path / "megatron", layout)
    write_hugging_face(open_model(tmp_path / "megatron"), tmp_path / "converted", max_shard_bytes=30_000)
    assert len(list((tmp_path / "converted").glob("*.safetensors"))) > 1
    source = open_model(tmp_path / "converted")

    try:
        sglang_server.begin_weight_update(manifest_of(source.architecture, source.dtype))
        sglang_server.load_folder(tmp_path / "converted")
        sglang_server.end_weight_update(version=11)
        samples = sglang_server.generate(PROMPTS, GREEDY)
    finally:
        # the next test syncs its own weights
        push(server_model(), sglang_server, version=0)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=torch.float32)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        tokens = list(prompt)
        for _ in range(GREEDY.max_new_tokens):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert sample.token_ids.tolist() == tokens[len(prompt) :]
