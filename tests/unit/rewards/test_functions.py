import pytest

from megarl.rewards.process import RewardFunctionError, load_reward_function
from tests.unit.rewards import functions_under_test

FILE = functions_under_test.__file__


def load(tmp_path, text):
    path = tmp_path / "reward.py"
    path.write_text(text)
    return load_reward_function(str(path), "compute_score")


def test_a_function_is_loaded_from_its_file():
    function = load_reward_function(FILE, "compute_score")
    assert function(data_source="", solution_str="right", ground_truth=None, extra_info={}) == 1.0
    assert (
        load_reward_function(FILE, "length")(
            data_source="", solution_str="abc", ground_truth=None, extra_info={}
        )
        == 3
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "compute_scores",
            r"'compute_scores' is not in .*defines compute_score, length,.*set reward.functions' path to FILE.py:NAME",
        ),
        ("not_a_function", "is a int, expected a plain function: def compute_score"),
        ("asynchronous", "is a coroutine function, expected a plain function"),
        (
            "takes_too_few",
            r"takes_too_few\(solution_str\) in .* cannot be called with the keywords data_source, "
            r"solution_str",
        ),
    ],
)
def test_a_name_that_cannot_be_used_is_explained(name, message):
    with pytest.raises(RewardFunctionError, match=message):
        load_reward_function(FILE, name)


def test_a_file_that_cannot_be_used_is_explained(tmp_path):
    with pytest.raises(RewardFunctionError, match="absent.py': there is no such file"):
        load_reward_function(str(tmp_path / "absent.py"), "compute_score")
    with pytest.raises(
        RewardFunctionError,
        match=r"cannot be run: ModuleNotFoundError: No module named 'nowhere' \(.*reward.py:2\)",
    ):
        load(tmp_path, "\nimport nowhere\n")

    with pytest.raises(RewardFunctionError, match=r"cannot be run: SyntaxError: .*\(reward.py:1\)"):
        load(tmp_path, "def compute_score(:\n")
    (tmp_path / "reward.txt").write_text("x = 1")
    with pytest.raises(RewardFunctionError, match="must end in .py"):
        load_reward_function(str(tmp_path / "reward.txt"), "compute_score")


def test_dataclasses_in_a_reward_file_work(tmp_path):
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Result:\n "
        "   value: float\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return "
        "Result(2.0).value\n"
    )
    assert load(tmp_path, text)(data_source="", solution_str="", ground_truth=None, extra_info={}) == 2.0
