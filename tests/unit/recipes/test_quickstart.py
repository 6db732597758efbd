"""The quickstart's model and data.

They are reproducible, held-out problems are not in the training data, and the task's own verifier scores.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from megarl.config.schema import DataConfig, SFTDataConfig
from megarl.data.prompts import PromptDataset
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import load_tokenizer, render_chat
from megarl.machine.errors import ConfigError
from megarl.recipes.quickstart import prepare as preparation
from megarl.recipes.quickstart import run as quickstart
from megarl.recipes.quickstart.prepare import make_tokenizer, prepare
from megarl.recipes.quickstart.reward import compute_score

REPOSITORY = Path(__file__).parents[3]
LONGEST_PROMPT = 9  # <user>100+100<assistant>; an answer has at most three digits and its end


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("quickstart"), seed=3)


def _digests(made):
    files = [made.model / "model.safetensors", made.model / "tokenizer.json", *made[1:]]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def _problems(path):
    rows = pyarrow.parquet.read_table(path).to_pylist()
    prompts = [row["prompt"] if "prompt" in row else row["messages"] for row in rows]
    return [prompt if isinstance(prompt, str) else prompt[0]["content"] for prompt in prompts]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(made, tmp_path):
    again = prepare(tmp_path / "again", seed=3)
    other = prepare(tmp_path / "other", seed=4)
    assert _digests(again) == _digests(made)
    differ = [one != two for one, two in zip(_digests(other), _digests(made), strict=True)]
    assert differ == [True, False, *[True] * 6]  # only the tokenizer is the same


def test_held_out_problems_are_in_no_other_file(made):
    held_out = _problems(made.validation)
    assert len(held_out) == len(set(held_out)) == preparation.NUM_VALIDATION
    for path in (made.train, made.sft_train, made.sft_validation, made.pairs_train, made.pairs_validation):
        assert not set(held_out) & set(_problems(path))
    assert not set(_problems(made.sft_validation)) & set(_problems(made.sft_train))


def test_pairs_have_a_right_and_a_wrong_answer(made):
    rows = pyarrow.parquet.read_table(made.pairs_train).to_pylist()
    sums = [sum(map(int, row["prompt"].split("+"))) for row in rows]
    assert [int(row["chosen"]) for row in rows] == sums
    errors = [int(row["rejected"]) - right for row, right in zip(rows, sums, strict=True)]
    assert 0 not in errors
    slips = sum(error in preparation.SLIPS for error in errors) / len(errors)
    assert 0.49 < slips < 0.55  # half of them, and some of the others


def test_ground_truths_are_right_and_half_of_the_demonstrations_slip(made):
    for row in pyarrow.parquet.read_table(made.train).slice(0, 300).to_pylist():
        assert str(eval(row["prompt"][0]["content"])) == row["reward_model"]["ground_truth"]
    demonstrations = pyarrow.parquet.read_table(made.sft_train).to_pylist()
    errors = [
        int(row["messages"][1]["content"]) - eval(row["messages"][0]["content"]) for row in demonstrations
    ]

    # at least 15,000 demonstrations: five standard deviations of the share are 0.02
    assert sum(error != 0 for error in errors) / len(errors) == pytest.approx(
        preparation.SLIP_SHARE, abs=0.02
    )
    assert set(errors) == {0, *preparation.SLIPS}


def test_a_prompt_is_a_token_per_character_and_an_answer_ends(made):
    tokenizer = load_tokenizer(str(made.model))
    chat = [{"role": "user", "content": "48 - 61"}, {"role": "assistant", "content": "-13"}]
    ids = render_chat(tokenizer, chat, for_generation=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<user>", *"48-61", "<assistant>", *"-13", "<end>"]
    assert render_chat(tokenizer, chat[:1], for_generation=True) == ids[:7]
    assert tokenizer.decode(ids[7:], skip_special_tokens=True) == "-13"
    assert len(make_tokenizer()) == 17


def test_the_data_sets_of_a_run_read_the_files(made):
    tokenizer = load_tokenizer(str(made.model))
    for path in (made.train, made.validation):
        prompts = PromptDataset([str(path)], tokenizer, DataConfig(max_prompt_length=LONGEST_PROMPT))
        assert len(prompts) == len(_problems(path))

    # The demonstrations of `sft_train` are made the same way, and rendering three per problem would be slow.
    examples = SFTDataset([str(made.sft_validation)], tokenizer, SFTDataConfig(max_length=LONGEST_PROMPT + 4))
    assert {examples[index].response_ids[-1] for index in range(len(examples))} == {tokenizer.eos_token_id}


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("-13", 1.0),
        ("-013", 1.0),
        ("-13.0", 1.0),
        ("13", 0.0),
        ("-13-13", 0.0),
        ("4-13", 0.0),
        ("", 0.0),
        ("--", 0.0),
    ],
)
def test_only_the_verifiers_full_score_is_rewarded(answer, score):
    assert compute_score("chain_sum", answer, "-13", {"question": "48 - 61 ="}) == score


def test_the_reward_file_loads_no_torch():
    script = "import sys, megarl.recipes.quickstart.reward; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=False).returncode == 0


def test_a_run_in_another_folder_is_the_one_that_is_shown(tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "moved"
    commands = []

    def note(stages):
        commands.extend(command[3:] for command in stages)
        run_dir.mkdir()
        (run_dir / "summary.json").write_text('{"validation": {"before": 0.5, "after": 0.75}}')
        return 0

    monkeypatch.setattr(quickstart, "run_stages", note)
    monkeypatch.setenv("MOVED", str(tmp_path))
    recipe = quickstart.SUMS._replace(output_dir=tmp_path / "default")
    moved = [f"trainer.output_dir={folder}" for folder in ("earlier", "${oc.env:MOVED}/moved")]
    assert quickstart.run_recipe(recipe, ["trainer.seed=1", *moved, "trainer.seed=2"]) == 0
    seeds = ["trainer.seed=2", "data.seed=2"]
    assert commands[1:] == [
        ["train", quickstart.SUMS.sft, *seeds],
        ["train", quickstart.SUMS.train, *seeds, "trainer.seed=1", *moved, "trainer.seed=2"],
        ["report", str(run_dir), "--png"],
        ["report", str(run_dir)],
    ]
    assert capsys.readouterr().out == "held-out accuracy: 50.0% before reinforcement learning, 75.0% after\n"


def test_wrong_overrides_remove_no_earlier_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quickstart.OUTPUT_DIR.mkdir(parents=True)
    wrong = ["rollout.nn=4", "trainer.updates_per_step=3", "actor.parallel.tensor_parallel_size=3"]
    with pytest.raises(ConfigError) as error:
        quickstart.run_recipe(quickstart.SUMS, wrong)
    assert len(error.value.problems) == 3
    assert quickstart.OUTPUT_DIR.is_dir()
