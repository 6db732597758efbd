"""Data files of all formats give the same rows, and each kind of damage is reported in one line with the file
and the row."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.schema import ChatColumnsConfig, DataConfig, LossyText, PromptColumnsConfig, SFTDataConfig
from megarl.data.files import DataError, open_file
from megarl.data.prompts import PromptDataset
from megarl.data.sft import SFTDataset
from megarl.data.tables import read_rows
from tests.unit.data.chats import character_tokenizer, prompt_row, user, write

ROWS = [{"question": "2 + 3 = ?", "answer": "5"}, {"question": 'a "b",\nc', "answer": "007"}]
COLUMNS = PromptColumnsConfig(prompt="question", ground_truth="answer", data_source=None)


def save_to_disk(folder, rows, num_files=2):
    """Save a data set like `datasets`: Arrow streams in several files, named in state.json."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    names = [f"data-{number:05d}-of-{num_files:05d}.arrow" for number in range(num_files)]
    size = -(-len(rows) // num_files)

    for number, name in enumerate(names):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table.slice(number * size, size))

    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"})
    )
    return str(folder)


def every_format(folder):
    # with a byte-order mark, as written by spreadsheets
    with (folder / "sums.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)

    (folder / "sums.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    (folder / "sums.json").write_text("\n".join(json.dumps(row) for row in ROWS))
    saved = save_to_disk(folder / "sums", ROWS)

    return [
        write(folder / "sums.parquet", ROWS),
        *(str(folder / f"sums.{ending}") for ending in ("csv", "jsonl", "json")),
        saved,
    ]


def test_every_format_has_the_same_rows(tmp_path):
    for path in every_format(tmp_path):
        rows = list(read_rows([path], ["question", "answer"]))
        assert [row.values for row in rows] == ROWS, path
        assert [row.number for row in rows] == [0, 1]
        assert open_file(path, []).columns == ["question", "answer"]


def test_columns_of_other_names_and_texts_with_a_system_prompt(tmp_path):
    tokenizer = character_tokenizer(vocabulary_extra='"[],')
    data = DataConfig(columns=COLUMNS, system_prompt="answer\nwith a number", max_prompt_length=99)
    fingerprints = set()

    for path in every_format(tmp_path):
        prompts = PromptDataset([path], tokenizer, data)
        assert tokenizer.decode(prompts[0].token_ids) == (
            "<|start|>system\nanswer\nwith a number<|end|>\n<|start|>user\n2 + 3 = "
            "?<|end|>\n<|start|>assistant\n"
        )
        assert prompts[1].reward_model == {"style": "rule", "ground_truth": "007"}
        assert (prompts[0].data_source, prompts[0].extra_info) == ("sums", {})
        fingerprints.add(prompts.identity)

    assert len(fingerprints) == 1
    own = [{"role": "system", "content": "be kind"}, *user("a")]
    kept = PromptDataset(
        [write(tmp_path / "own.parquet", [prompt_row(prompt=own)])],
        tokenizer,
        DataConfig(system_prompt="not this"),
    )
    assert kept[0].messages == own


def test_prompt_and_answer_of_two_columns_are_a_chat(tmp_path):
    data = SFTDataConfig(columns=ChatColumnsConfig(prompt="question", answer="answer"), max_length=99)
    tokenizer = character_tokenizer(vocabulary_extra='",')

    for path in every_format(tmp_path):
        example = SFTDataset([path], tokenizer, data)[1]
        assert tokenizer.decode([*example.prompt_ids, *example.response_ids]) == (
            '<|start|>user\na "b",\nc<|end|>\n<|start|>assistant\n007<|end|>'
        )


def corrupt_page(folder):
    """Change a byte of a compressed page."""
    path = folder / "page.parquet"
    pq.write_table(
        pa.table({"prompt": [f"{number}" * 50 for number in range(500)]}),
        path,
        compression="snappy",
        use_dictionary=False,
    )
    content = bytearray(path.read_bytes())
    content[60:400] = b"\xff" * 340
    path.write_bytes(content)

    return path


def corrupt_footer(folder):
    path = folder / "footer.parquet"
    write(path, ROWS)
    content = bytearray(path.read_bytes())
    content[-30:-10] = b"\xff" * 20
    path.write_bytes(content)
    return path


def text(name, content):
    def make(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder / name

    return make


def saved(state):
    def make(folder):
        save_to_disk(folder / "saved", ROWS)
        (folder / "saved" / "state.json").write_text(json.dumps(state))
        return folder / "saved"

    return make


def splits(folder):
    (folder / "dict").mkdir()
    (folder / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return folder / "dict"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (corrupt_page, "page.parquet, row 0 or after it: the file is damaged"),
        (corrupt_footer, "footer.parquet: not a parquet file"),
        (text("a.parquet", '{"prompt": "a"}\n'), "a.parquet: not a parquet file"),
        (text("a.jsonl", '{"prompt": "a"}\n{"prompt": \n'), "a.jsonl, line 2: is not JSON"),
        (
            text("a.jsonl", '{"prompt": "a"}\n{"answer": "5"}\n'),
            r"a.jsonl, row 1, column 'prompt': is missing; the row has \['answer'\]",
        ),
        (text("a.jsonl", "[" * 100_000 + "\n"), "a.jsonl, line 1: is not JSON"),
        (
            text("a.json", '[\n{"prompt": "a"}\n]\n'),
            "a.json, line 1: is not JSON .*one JSON document over many lines",
        ),
        (
            text("a.json", '[{"prompt": "a"}]'),
            "a.json, line 1: is list, expected an object .*each line is one row",
        ),
        (text("a.jsonl", b'{"prompt": "\xff"}\n'), "a.jsonl, line 1: is not JSON"),
        (text("a.jsonl", ""), "a.jsonl: the file has no rows"),
        (
            text("a.csv", "prompt,answer\na,5\nb,6,7\n"),
            "a.csv, row 1: has 3 values, but the file has 2 columns .*quote texts",
        ),
        (text("a.csv", 'prompt,answer\n"a,5\n'), "a.csv, line 3 or near it: not CSV in UTF-8"),
        (text("a.csv", b"prompt\n\xff\n"), "a.csv, line . or near it: not CSV in UTF-8"),
        (text("a.csv", "prompt,prompt\na,b\n"), "a.csv, line 1: the name 'prompt' occurs 2 times"),
        (
            text("a.csv", "prompt;answer\na;b\n"),
            r"column 'prompt' is missing; the file has \['prompt;answer'\]",
        ),
        (text("a.csv", "prompt\n"), "a.csv: the file has no rows"),
        (
            text("README.md", "# Data\n"),
            r"README.md: not a data file; its name must end in .parquet, .jsonl, .json, .csv",
        ),
        (
            saved({"_data_files": [{"filename": "../elsewhere.arrow"}]}),
            "state.json: _data_files is .*must name the files of this folder",
        ),
        (
            saved({"_data_files": [{"filename": "absent.arrow"}]}),
            "absent.arrow: not an Arrow file written by `datasets`",
        ),
        (saved([]), "state.json: is list, expected an object"),
        (
            splits,
            r"dict: contains the splits \['train', 'test'\]; name the folder of one of them, such as "
            r"'.*dict/train'",
        ),
    ],
)
def test_damage_is_one_line(tmp_path, make, said):
    with pytest.raises(DataError, match=said) as caught:
        list(read_rows([str(make(tmp_path))], ["prompt"]))
    assert "\n" not in str(caught.value)


def test_a_column_that_is_named_must_be_there(tmp_path):
    file = write(tmp_path / "a.parquet", [prompt_row()])
    tokenizer = character_tokenizer()
    with pytest.raises(DataError, match="column 'info' is missing"):
        PromptDataset([file], tokenizer, DataConfig(columns=PromptColumnsConfig(extra_info="info")))

    with pytest.raises(
        DataError, match="column 'answer' is missing; .*data.columns sets which columns are read"
    ):
        PromptDataset([file], tokenizer, DataConfig(columns=PromptColumnsConfig(ground_truth="answer")))


def test_a_column_of_ground_truths_is_found_by_itself(tmp_path):
    """The column is detected in each format and for each file separately.

    If there is a mapping, it is used.
    """
    tokenizer = character_tokenizer()
    row = {"prompt": "a", "data_source": "sums"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"ground_truth": "5"}) + "\n")
    files = [
        str(tmp_path / "rows.jsonl"),
        write(
            tmp_path / "mapping.parquet",
            [row | {"reward_model": {"ground_truth": "6"}, "ground_truth": "no"}],
        ),
        write(tmp_path / "column.parquet", [row | {"ground_truth": "7"}]),
    ]
    data = PromptDataset(files, tokenizer, DataConfig())
    assert [data[number].reward_model["ground_truth"] for number in range(3)] == ["5", "6", "7"]
    with pytest.raises(DataError, match="column 'reward_model' is missing"):
        PromptDataset([write(tmp_path / "none.parquet", [row])], tokenizer, DataConfig())


def test_text_that_is_lost_may_be_allowed(tmp_path):
    """Whitespace and case removed by a tokenizer's own normalizer do not count as lost."""
    file = write(tmp_path / "a.parquet", [prompt_row("how many? \u00e9")])
    tokenizer = character_tokenizer()

    with pytest.raises(
        DataError,
        match=r"row 0, column 'prompt': the tokenizer loses text: it cannot encode '\u00e9', and the model",
    ):
        PromptDataset([file], tokenizer, DataConfig())

    assert len(PromptDataset([file], tokenizer, DataConfig(lossy=LossyText.allow))) == 1
    spaced = character_tokenizer()
    spaced.backend_tokenizer.decoder = None  # inserts a space between tokens
    assert (
        len(PromptDataset([write(tmp_path / "b.parquet", [prompt_row("2 + 3")])], spaced, DataConfig())) == 1
    )
