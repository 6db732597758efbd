import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.schema import (
    DataConfig,
    HarnessConfig,
    Overlong,
    PromptColumnsConfig,
    SandboxConfig,
    SandboxProvider,
)
from megarl.data.files import DataError
from megarl.data.prompts import PromptDataset
from tests.unit.data.chats import prompt_row, user, write

FRAME = len("<user\n>\n<assistant\n")  # tokens added by the template; a special token counts as one


def dataset(files, tokenizer, max_prompt_length=40, overlong=Overlong.refuse, **changes):
    return PromptDataset(
        files, tokenizer, DataConfig(max_prompt_length=max_prompt_length, overlong=overlong, **changes)
    )


def test_rows_of_all_files_are_rendered_in_order(tmp_path, tokenizer):
    files = [
        write(tmp_path / "a.parquet", [prompt_row("2 + 3 = ?", extra_info={"index": 7}), prompt_row("bb")]),
        write(
            tmp_path / "b.parquet",
            [prompt_row("ccc", data_source="other", reward_model={"style": "rule", "ground_truth": "x"})],
        ),
    ]
    prompts = dataset(files, tokenizer)
    assert [tokenizer.decode(prompts[i].token_ids) for i in range(3)] == [
        f"<|start|>user\n{text}<|end|>\n<|start|>assistant\n" for text in ("2 + 3 = ?", "bb", "ccc")
    ]
    assert prompts.num_filtered == 0
    batch = prompts.batch([2, 0], ["u", "v"])
    assert batch.ragged["prompts"].lengths.tolist() == [FRAME + 3, FRAME + 9]
    assert batch.tensors["prompts"][0].tolist() == [tokenizer.pad_token_id] * 6 + list(prompts[2].token_ids)
    assert batch.non_tensor_batch["uid"].tolist() == ["u", "v"]
    assert batch.non_tensor_batch["messages"][1] == user("2 + 3 = ?")
    assert batch.non_tensor_batch["data_source"].tolist() == ["other", "sums"]
    assert batch.non_tensor_batch["reward_model"][0] == {"style": "rule", "ground_truth": "x"}
    assert batch.non_tensor_batch["extra_info"][1] == {"index": 7}


def test_teachers_may_see_other_prompts(tmp_path, tokenizer):
    columns = PromptColumnsConfig(teacher_prompt="with_hint")
    first = prompt_row("2 + 3 = ?", with_hint=user("2 + 3 = ? 5"))
    second = prompt_row("bb", with_hint=user("b"))
    file = write(tmp_path / "a.parquet", [first, second])
    prompts = dataset([file], tokenizer, columns=columns)
    batch = prompts.batch([1, 0], ["u", "v"])
    assert [tokenizer.decode(row) for row in batch.ragged["teacher_prompts"].each()] == [
        f"<|start|>user\n{text}<|end|>\n<|start|>assistant\n" for text in ("b", "2 + 3 = ? 5")
    ]
    assert [tokenizer.decode(row) for row in batch.ragged["prompts"].each()] == [
        f"<|start|>user\n{text}<|end|>\n<|start|>assistant\n" for text in ("bb", "2 + 3 = ?")
    ]
    assert prompts.has_teacher_prompts

    # A run that is resumed must have the same hints; without hints, nothing changes.
    changed = write(tmp_path / "b.parquet", [first, second | {"with_hint": user("c")}])
    without = write(tmp_path / "c.parquet", [prompt_row("2 + 3 = ?"), prompt_row("bb")])
    plain = dataset([without], tokenizer)
    assert dataset([changed], tokenizer, columns=columns).identity != prompts.identity
    assert dataset([without], tokenizer, columns=columns).identity == plain.identity
    assert "teacher_prompts" not in plain.batch([0], ["u"]).columns
    assert not plain.has_teacher_prompts

    # The limit is that of both prompts.
    with pytest.raises(DataError, match=re.escape(f"{FRAME + 11} tokens; 1 of 2 rows have more than")):
        dataset([file], tokenizer, FRAME + 10, columns=columns)
    with pytest.raises(DataError, match=re.escape("c.parquet has no column 'with_hint'")):
        dataset([file, without], tokenizer, columns=columns)
    answered = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    wrong = write(tmp_path / "d.parquet", [prompt_row("bb", with_hint=answered)])
    with pytest.raises(DataError, match="'with_hint'.*would answer its own answer"):
        dataset([wrong], tokenizer, columns=columns)


def test_extra_info_may_be_absent_or_null(tmp_path, tokenizer):
    row = prompt_row()
    del row["extra_info"]
    absent = write(tmp_path / "a.parquet", [row])
    null = write(tmp_path / "b.parquet", [prompt_row(), prompt_row(extra_info=None)])
    prompts = dataset([absent, null], tokenizer)
    assert [prompts[i].extra_info for i in range(3)] == [{}, {"index": 0}, {}]


def test_mappings_may_be_json_text_as_in_csv_files(tmp_path, tokenizer):
    file = tmp_path / "rows.csv"
    file.write_text(
        "prompt,data_source,reward_model,extra_info\n"
        '2 + 3 = ?,sums,"{""style"": ""rule"", ""ground_truth"": [2]}","{""index"": 7}"\n'
        'ccc,sums,"{""ground_truth"": 3}",\n'
    )
    prompts = dataset([file], tokenizer)
    assert [prompts[i].extra_info for i in range(2)] == [{"index": 7}, {}]
    assert [prompts[i].reward_model["ground_truth"] for i in range(2)] == [[2], 3]


def test_rows_without_answers_have_null_ground_truths(tmp_path, tokenizer):
    row = prompt_row()
    del row["reward_model"]
    files = [write(tmp_path / "a.parquet", [row])]
    prompts = dataset(files, tokenizer, columns=PromptColumnsConfig(reward_model=None))
    assert prompts[0].reward_model["ground_truth"] is None
    with pytest.raises(DataError, match="data.columns.reward_model=null for rows without answers"):
        dataset(files, tokenizer)


def test_overlong_prompts_are_refused_with_the_numbers(tmp_path, tokenizer):
    file = write(tmp_path / "a.parquet", [prompt_row("a"), prompt_row("a" * 9), prompt_row("a" * 5)])
    limit = FRAME + 4
    message = (
        rf"a.parquet, row 1: {FRAME + 9} tokens; 2 of 3 rows have more than data.max_prompt_length={limit} "
        rf"tokens, the longest "
        rf"{FRAME + 9}. Raise data.max_prompt_length to {FRAME + 9}, or set data.overlong=filter"
    )
    with pytest.raises(DataError, match=message):
        dataset([file], tokenizer, limit)


def test_overlong_prompts_are_filtered_and_counted_and_never_cut(tmp_path, tokenizer, caplog):
    file = write(tmp_path / "a.parquet", [prompt_row("a"), prompt_row("a" * 9), prompt_row("a" * 4)])
    prompts = dataset([file], tokenizer, FRAME + 4, Overlong.filter)
    assert (len(prompts), prompts.num_filtered) == (2, 1)
    assert [len(prompts[i].token_ids) for i in range(2)] == [FRAME + 1, FRAME + 4]
    assert "1 of 3 rows" in caplog.text
    with pytest.raises(DataError, match="no row is left after filtering"):
        dataset([file], tokenizer, 3, Overlong.filter)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            prompt_row() | {"prompt": 5},
            r"row 0, column 'prompt': found int 5, expected a text or a list of chat messages such as "
            r"\[\{'role'",
        ),
        (prompt_row() | {"prompt": " "}, "row 0, column 'prompt': all of its messages are empty"),
        (prompt_row() | {"prompt": []}, "row 0, column 'prompt': the list of messages is empty"),
        (
            prompt_row() | {"prompt": [*user("a"), {"role": "assistant", "content": "b"}]},
            "row 0, column 'prompt': the last message is the assistant's.*end the prompt with the message to "
            "be answered",
        ),
        (
            prompt_row("How many?"),
            r"row 0, column 'prompt': the tokenizer loses text: it cannot encode .*data.lossy=allow",
        ),
        (
            prompt_row() | {"prompt": [{"role": "user", "content": 5}]},
            "row 0, column 'prompt': message 0 is dict .*role and content as strings",
        ),
        (
            prompt_row() | {"prompt": [{"role": "robot", "content": "x"}]},
            "message 0 has role 'robot', expected one of .*'user'",
        ),
        (
            prompt_row() | {"prompt": [{"role": "tool", "content": "x"}]},
            "row 0, column 'prompt': the chat template refuses.*no tools here",
        ),
        (
            prompt_row() | {"reward_model": "5"},
            "row 0, column 'reward_model': found str '5', expected dict such as .*ground_truth",
        ),
        (
            prompt_row() | {"reward_model": {"style": "rule"}},
            "column 'reward_model': it has no 'ground_truth', only",
        ),
        (prompt_row() | {"data_source": 3}, "row 0, column 'data_source': found int 3, expected str"),
        (
            prompt_row() | {"extra_info": "{'a': 1}"},
            "row 0, column 'extra_info': found the text .* is not JSON",
        ),
        (prompt_row() | {"extra_info": '{"a": 1, "a": 2}'}, "row 0, column 'extra_info': .*json.dumps"),
        (prompt_row() | {"extra_info": "x"}, "row 0, column 'extra_info': found str 'x', expected dict"),
    ],
)
def test_a_bad_row_is_named(tmp_path, tokenizer, row, message):
    with pytest.raises(DataError, match=message):
        dataset([write(tmp_path / "bad.parquet", [row])], tokenizer)


def test_the_row_number_is_that_of_the_file(tmp_path, tokenizer):
    good = write(tmp_path / "good.parquet", [prompt_row()] * 3)
    bad = write(tmp_path / "bad.parquet", [prompt_row(), prompt_row(), prompt_row(data_source=None)])
    with pytest.raises(DataError, match="bad.parquet, row 2, column 'data_source': found NoneType None"):
        dataset([good, bad], tokenizer)


def test_a_bad_file_is_named(tmp_path, tokenizer):
    with pytest.raises(DataError, match="absent.parquet: there is no such file"):
        dataset([str(tmp_path / "absent.parquet")], tokenizer)
    (tmp_path / "text.parquet").write_text("prompt\nhello\n")
    with pytest.raises(DataError, match="text.parquet: not a parquet file.*to_parquet"):
        dataset([str(tmp_path / "text.parquet")], tokenizer)
    renamed = [{"prompts": user("a"), "data_source": "s", "reward_model": {"ground_truth": "5"}}]
    with pytest.raises(DataError, match="column 'prompt' is missing; the file has .*rename 'prompts'"):
        dataset([write(tmp_path / "renamed.parquet", renamed)], tokenizer)
    empty = pa.Table.from_pylist([prompt_row()]).slice(0, 0)
    pq.write_table(empty, tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="empty.parquet: the file has no rows"):
        dataset([str(tmp_path / "empty.parquet")], tokenizer)
    with pytest.raises(DataError, match="no data file is given; set data.train_files"):
        dataset([], tokenizer)


@pytest.mark.parametrize(
    ("provider", "image", "problem"),
    [
        ("local", "/", "sandbox_image is '/', so that programs could read all files of this machine"),
        ("local", "python:3.12", "sandbox_image is 'python:3.12', but with local it is the absolute path of"),
        ("local", "/no/such/folder", "sandbox_image is '/no/such/folder', which is no folder of this"),
        ("container", "/usr", "sandbox_image is '/usr', which is no name of an image"),
        ("container", "--privileged", "is no name of an image"),
        ("container", 7, "sandbox_image is 7, of type int; give a string"),
        ("container", None, "has no sandbox_image, and agent.harness.sandbox.image is null"),
    ],
)
def test_a_row_with_an_image_that_cannot_start_is_named(tmp_path, tokenizer, provider, image, problem):
    """Another row's image works, and without a sandbox nothing is checked."""
    data = DataConfig(max_prompt_length=40)
    sandbox = SandboxConfig(provider=SandboxProvider(provider))
    harness = HarnessConfig(command=["agent"], sandbox=sandbox)
    works = "/usr" if provider == "local" else "docker.io/library/python:3.12"
    good, bad = (
        write(tmp_path / f"{number}.parquet", [prompt_row(extra_info={"sandbox_image": value, "index": 0})])
        for number, value in enumerate((works, image))
    )
    assert len(PromptDataset([good], tokenizer, data, harness=harness)) == 1
    assert len(PromptDataset([bad], tokenizer, data, harness=HarnessConfig(command=["agent"]))) == 1
    with pytest.raises(DataError, match=re.escape(problem)) as raised:
        PromptDataset([bad], tokenizer, data, harness=harness)
    assert f"{bad}, row 0, column 'extra_info': " in str(raised.value)
