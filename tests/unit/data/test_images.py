"""Images of prompts: read from files or bytes, checked, counted in tokens, and sent once per prompt."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoImageProcessor, PreTrainedTokenizerBase

from megarl.batch.data_proto import DataProto
from megarl.batch.token_rows import IMAGE_BYTES, IMAGE_GRIDS, IMAGE_SIZES, PIXEL_VALUES
from megarl.config.schema import DataConfig, Overlong, PromptColumnsConfig
from megarl.data.files import DataError
from megarl.data.images import ImageProcessor, decode, refuse_image_columns, row_files, with_patches
from megarl.data.prompts import PromptDataset
from tests.families import example_architecture
from tests.images import image_file, save_processor
from tests.unit.data.chats import character_tokenizer

# One special token before, for and after an image, as in the templates of Qwen.
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
WIDE = image_file(16, 8, seed=1)  # 4 x 2 tokens
SQUARE = image_file(8, 8, seed=2, kind="JPEG")  # 2 x 2 tokens


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    made: PreTrainedTokenizerBase = character_tokenizer(TEMPLATE)
    made.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    return made


@pytest.fixture
def processor(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor:
    save_processor(tmp_path)
    vision = example_architecture("qwen3_vl").vision
    assert vision is not None
    token = tokenizer.convert_tokens_to_ids("<|image|>")
    return ImageProcessor(str(tmp_path), replace(vision, image_token_id=int(token)))


def row(prompt: str, images: Any) -> dict[str, Any]:
    return {"prompt": prompt, "images": images, "data_source": "shapes", "ground_truth": "3"}


def written(folder: Path, *rows: dict[str, Any], name: str = "train.parquet") -> str:
    if name.endswith(".jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(list(rows)), folder / name)
    return str(folder / name)


def dataset(
    file: str, tokenizer: PreTrainedTokenizerBase, processor: ImageProcessor | None, **changes: Any
) -> PromptDataset:
    data = DataConfig(**{"max_prompt_length": 60, "overlong": Overlong.refuse, **changes})
    return PromptDataset([file], tokenizer, data, None, processor)


def test_images_are_read_in_every_form(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, processor: ImageProcessor
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "wide.png").write_bytes(WIDE)
    image = {"bytes": SQUARE, "path": None}
    of_datasets = written(
        tmp_path, row("<image>a<image>b", [{"bytes": None, "path": "pictures/wide.png"}, image]), row("c", [])
    )
    prompts = dataset(of_datasets, tokenizer, processor)
    assert [prompts[0].images, prompts[1].images] == [(WIDE, SQUARE), ()]

    # The placeholder of an image stands for all of its tokens, which count for the limit.
    token = processor.tower.image_token_id
    ids = prompts[0].token_ids
    assert [ids.count(token), prompts[1].token_ids.count(token)] == [8 + 4, 0]
    first = ids.index(token)
    assert ids[first : first + 9] == (*[token] * 8, tokenizer.convert_tokens_to_ids("a"))
    assert prompts[0].messages == [{"role": "user", "content": "<image>a<image>b"}]

    # A single image needs no list, and its path is relative to the folder of the data file.
    by_path = written(tmp_path, row("<image>", "pictures/wide.png"), name="paths.jsonl")
    assert dataset(by_path, tokenizer, processor)[0].images == (WIDE,)
    as_bytes = written(tmp_path, row("<image>", SQUARE), name="bytes.parquet")
    assert dataset(as_bytes, tokenizer, processor)[0].images == (SQUARE,)
    with pytest.raises(DataError, match="row 0: 33 tokens; .* more than data.max_prompt_length=30"):
        dataset(of_datasets, tokenizer, processor, max_prompt_length=30)


def bomb() -> bytes:
    """Return a PNG whose header promises 60,000 x 60,000 pixels."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("prompt", "images", "problem"),
    [
        (
            "<image>",
            ["absent.png"],
            r"column 'images': image 0 \(.*absent.png\) does not exist; copy the file",
        ),
        ("<image>", [SQUARE[:-40]], r"image 0 is damaged \(OSError: .*\); copy it again"),
        ("<image>", [b"\x80\x04cposix"], r"image 0 is not an image in one of the formats PNG, JPEG"),
        (
            "<image>",
            [bomb()],
            r"image 0 has more pixels than Pillow decodes \(.*3600000000 pixels.*\); scale it down",
        ),
        (
            "<image>",
            [image_file(80, 60)],
            "image 0 has 80 x 60 = 4,800 pixels, more than the 4,000 of data.max",
        ),
        (
            "<image>",
            [WIDE + bytes(2**25)],
            r"image 0 has [\d,]+ bytes, more than the 33,554,432 that are allowed; .* raise data.max_image_pix",
        ),
        ("a", [WIDE], r"column 'prompt': the prompt has 0 placeholders '<image>' for 1 images; write one"),
        ("<image><image>", [WIDE], r"the prompt has 2 placeholders '<image>' for 1 images"),
    ],
)
def test_an_image_that_cannot_be_used_is_named(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    processor: ImageProcessor,
    prompt: str,
    images: list[Any],
    problem: str,
) -> None:
    file = written(tmp_path, row(prompt, images))
    with pytest.raises(DataError, match=rf"train.parquet, row 0, .*{problem}"):
        dataset(file, tokenizer, processor, max_image_pixels=4000)


def test_images_of_a_model_that_reads_none_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, processor: ImageProcessor
) -> None:
    file = written(tmp_path, row("<image>", [WIDE]))
    with pytest.raises(
        DataError, match="row 0, column 'images': the row has images, but megarl reads none with this model"
    ):
        dataset(file, tokenizer, None)
    columns = PromptColumnsConfig(images="pictures")
    with pytest.raises(DataError, match="column 'pictures' is missing"):
        dataset(file, tokenizer, processor, columns=columns)


def test_conversations_with_images_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, row("<image>", [WIDE]))
    refuse_image_columns([written(tmp_path, {"messages": "a"}, name="text.parquet")])
    with pytest.raises(DataError, match="column 'images': supervised runs read no images"):
        refuse_image_columns([file])


def test_a_processor_of_another_model_is_refused(tmp_path: Path, processor: ImageProcessor) -> None:
    fields = json.loads((tmp_path / "preprocessor_config.json").read_text()) | {"patch_size": 14}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(
        ValueError, match="preprocessor_config.json has patch_size 14, but config.json implies 2"
    ):
        processor.num_tokens(WIDE)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match="copy the model's preprocessor_config.json into it"):
        ImageProcessor(str(tmp_path), processor.tower).num_tokens(WIDE)


def test_samples_of_a_prompt_share_its_files_and_patches(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, processor: ImageProcessor
) -> None:
    file = written(tmp_path, row("<image>a<image>", [WIDE, SQUARE]), row("b", []), row("<image>c", [SQUARE]))
    prompts = dataset(file, tokenizer, processor)
    batch = prompts.batch([0, 1, 2], ["u", "v", "w"]).repeat(4)
    assert row_files(batch.ragged) == [(WIDE, SQUARE)] * 4 + [()] * 4 + [(SQUARE,)] * 4

    # The bytes travel once per prompt, also for a part of the rows in another order.
    part = DataProto.from_bytes(batch[[9, 0, 2, 5]].to_bytes())
    assert len(part.ragged[IMAGE_BYTES].values) <= len(WIDE) + 2 * len(SQUARE)
    columns = with_patches({**part.ragged}, processor)
    assert not {IMAGE_BYTES, IMAGE_SIZES} & columns.keys()
    assert columns[IMAGE_GRIDS].padded().tolist() == [
        [1, 4, 4, 0, 0, 0],
        [1, 4, 8, 1, 4, 4],
        [1, 4, 8, 1, 4, 4],
        [0] * 6,
    ]
    assert columns[PIXEL_VALUES].starts[1] == columns[PIXEL_VALUES].starts[2]

    # The patches are those of transformers' processor.
    reference = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(
        images=[decode(WIDE), decode(SQUARE)], return_tensors="pt"
    )
    second = list(columns[PIXEL_VALUES].each())[1]
    assert torch.equal(second, reference["pixel_values"].flatten())
