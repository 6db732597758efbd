"""The shapes example without its run: the images, the model as a run loads it, and the configuration."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.shapes import prepare, reward
from megarl.cli.main import main
from megarl.config.schema import DataConfig
from megarl.data.images import ImageProcessor
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer

CONFIG = Path(__file__).parents[3] / "examples" / "shapes" / "grpo.yaml"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prepare, "NUM_TRAIN", 64)
    monkeypatch.setattr(prepare, "NUM_VALIDATION", 2)
    prepare.prepare(tmp_path, seed=1)
    return tmp_path


@pytest.mark.parametrize("num_shapes", [1, 4])
def test_an_image_has_as_many_fields_with_a_shape(num_shapes: int) -> None:
    pixels = np.asarray(Image.open(io.BytesIO(prepare.draw(random.Random(3), num_shapes))))
    size = prepare.FIELD
    fields = pixels.reshape(prepare.FIELDS, size, prepare.FIELDS, size, 3).any((1, 3, 4))
    assert fields.sum() == num_shapes
    assert reward.compute_score("shapes", str(num_shapes), str(num_shapes), {}) == 1
    assert reward.compute_score("shapes", f"{num_shapes}?", str(num_shapes), {}) == 0


def test_a_prompt_has_a_token_for_each_field(made: Path) -> None:
    model = str(made / "model")
    tokenizer = load_tokenizer(model)
    images = ImageProcessor.of_folder(model)
    assert images is not None
    data = DataConfig(max_prompt_length=16)
    prompts = PromptDataset([str(made / "data" / "train.parquet")], tokenizer, data, None, images)
    expected = "<user><vision_start>" + "<image_pad>" * 9 + "<vision_end>?<assistant>"
    assert tokenizer.decode(prompts[0].token_ids) == expected
    assert {int(prompts[row].reward_model["ground_truth"]) for row in range(64)} == {1, 2, 3, 4}


def test_the_configuration_is_good(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: f"[{made}/data/{name}.parquet]" for name in ("train", "validation")}
    given = [
        f"model.path={made}/model",
        f"data.train_files={files['train']}",
        f"data.val_files={files['validation']}",
        f"trainer.output_dir={made}/run",
    ]
    assert main(["check", str(CONFIG), *given]) == 0, capsys.readouterr().err
