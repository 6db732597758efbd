"""The engine on transformers with images: the same tokens as forward passes of the whole row without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, PreTrainedModel

from megarl.data.images import decode
from megarl.rollout.hf.engine import HFEngine
from megarl.rollout.interface import SamplingParameters, plan_requests
from tests.images import IMAGE_TOKEN, image_file, image_tokens, save_processor
from tests.unit.rollout.models import engine_for, push, random_model

GREEDY = SamplingParameters(max_new_tokens=5, seed=0, temperature=0.0)
WIDE = image_file(16, 8, seed=1)  # 4 x 2 tokens
SQUARE = image_file(8, 8, seed=2)  # 2 x 2 tokens
OTHER = image_file(8, 8, seed=3)
# Two images, one, none, and the tokens of the second with another image.
PROMPTS = [
    ([5, *image_tokens(8), 6, 7, *image_tokens(4), 11], (WIDE, SQUARE)),
    ([3, *image_tokens(4), 9, 10, 12], (SQUARE,)),
    ([20, 21, 22], ()),
    ([3, *image_tokens(4), 9, 10, 12], (OTHER,)),
]


def reference(model: PreTrainedModel, folder: Path, prompt: list[int], images: tuple[bytes, ...]) -> Any:
    """Return greedy tokens and their log-probs, by transformers' own processor and positions."""
    arguments: dict[str, torch.Tensor] = {}
    if images:
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        arguments = dict(processor(images=[decode(data) for data in images], return_tensors="pt"))

    token_ids: list[int] = []
    log_probs = []
    for _ in range(GREEDY.max_new_tokens):
        ids = torch.tensor([prompt + token_ids])
        kinds = {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()} if images else {}
        with torch.no_grad():
            scores = model(ids, **arguments, **kinds).logits[0, -1].log_softmax(-1)
        token_ids.append(int(scores.argmax()))
        log_probs.append(float(scores.max()))
    return token_ids, log_probs


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_images_are_read_as_transformers_reads_them(tmp_path: Path, family: str) -> None:
    model = random_model(family, vocab_size=199, num_layers=3)
    save_processor(tmp_path)
    engine: HFEngine = engine_for(model, tmp_path)
    push(model, engine)
    ids = [prompt for prompt, _ in PROMPTS]
    requests = plan_requests(ids, GREEDY, images=[images for _, images in PROMPTS])
    engine.submit(requests)
    samples = dict(engine.collect(0))

    for number, (prompt, images) in enumerate(PROMPTS):
        token_ids, log_probs = reference(model, tmp_path, prompt, images)
        assert samples[number].token_ids.tolist() == token_ids
        assert samples[number].log_probs.tolist() == pytest.approx(log_probs, abs=1e-5)

    # Prompts that differ in their images only are different prompts.
    assert samples[1].log_probs.tolist() != samples[3].log_probs.tolist()


def test_images_for_a_model_that_reads_none_are_refused(tmp_path: Path) -> None:
    model = random_model()
    engine = engine_for(model, tmp_path)
    push(model, engine)
    with pytest.raises(ValueError, match="the request has images, but the model reads none"):
        engine.submit(plan_requests([[1, 2]], GREEDY, images=[(SQUARE,)]))
