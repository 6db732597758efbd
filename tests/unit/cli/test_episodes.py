"""`megarl generate --tool`: a model that calls, real tools, and the conversation that comes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.cli.main import main
from tests.unit.agents.calling_model import CALL, save_calling_model

PROMPT = "ab?"
TOOLS = """
def price(item: str, task) -> str:
    assert task.messages[0]["content"] == "ab?"
    return "42"
def cost(item: str) -> str:
    return "42"
class Price:
    async def start(self, task):
        self.is_open = True
    async def respond(self, turn):
        from megarl.agents.protocol import Reply
        assert self.is_open and not turn.text.startswith("1")
        return Reply(messages=[{"role": "tool", "content": "42"}], reward=0.5, is_done=not turn.calls)
    async def close(self):
        self.is_open = False
class Broken(Price):
    async def respond(self, turn):
        return 1 / 0
class Silent(Price):
    async def respond(self, turn):
        from megarl.agents.protocol import Reply
        return Reply()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_calling_model(folder := tmp_path_factory.mktemp("calling"))
    (folder / "tools.py").write_text(TOOLS)
    return folder


def generate(capsys: pytest.CaptureFixture[str], model: Path, *arguments: str, status: int = 0) -> str:
    capsys.readouterr()
    assert main(["generate", str(model), PROMPT, *arguments]) == status
    printed = capsys.readouterr()
    return printed.out if status == 0 else printed.err


def played(capsys: pytest.CaptureFixture[str], model: Path, *arguments: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(generate(capsys, model, "--json", *arguments))
    return values


def test_a_model_calls_a_tool_and_answers_with_its_result(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    price = f"{model / 'tools.py'}:price"
    assert (
        generate(capsys, model, "--tool", price)
        == f"assistant: {CALL}\ntool: 42\nassistant: 42\n[done: turns 2, calls 1, tokens 10]\n"
    )
    episode = played(capsys, model, "--tool", price, "--log-probs")
    assert (episode["text"], episode["end"], episode["num_turns"], episode["call_errors"]) == (
        "42",
        "done",
        2,
        {},
    )
    assert [message["role"] for message in episode["conversation"]] == ["assistant", "tool", "assistant"]

    # The engine's inputs and samples form one row, in which the tool's tokens are not sampled. The log-probs
    # equal those of one forward pass.
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert tokenizer.decode(episode["token_ids"]) == f"{CALL}<end><tool>42<end><assistant>42<end>"
    mask = episode["response_mask"]
    drawn = [token for token, is_models in zip(episode["token_ids"], mask, strict=True) if is_models]
    assert tokenizer.decode(drawn) == f"{CALL}<end>42<end>"
    prompt = tokenizer.encode(f"<system>price;<end><user>{PROMPT}<end><assistant>")
    ids = torch.tensor([prompt + episode["token_ids"]])
    expected = (
        policy(ids)
        .logits[0, len(prompt) - 1 : -1]
        .log_softmax(-1)
        .gather(-1, ids[0, len(prompt) :, None])[:, 0]
    )
    torch.testing.assert_close(
        torch.tensor(episode["log_probs"]),
        torch.where(torch.tensor(mask), expected, 0.0),
        rtol=1e-4,
        atol=1e-5,
    )


def test_failures_and_limits_are_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = f"{model / 'tools.py'}:cost"
    said = generate(capsys, model, "--tool", cost, "--max-turns", "4")
    assert "tool: tool error (unknown tool): there is no tool 'price'; there are: cost\n" in said
    assert "[done: turns 2, calls 1, 1 unknown tool, tokens " in said
    assert played(capsys, model, "--tool", cost, "--max-turns", "1")["end"] == "turns"
    assert "calculator" in generate(capsys, model, "--tool", "calculator", "--max-tokens", "80")
    assert played(capsys, model, "--tool", cost, "--max-tokens", "2")["end"] == "length"


def test_an_environment_answers_and_rewards_turns(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = f"{model / 'tools.py'}:Price"
    episode = played(capsys, model, "--environment", named, "--system", "price;")
    assert (episode["text"], episode["turn_rewards"], episode["num_calls"]) == ("42", [0.5, 0.5], 0)

    for name, said in (
        ("Broken", "Broken.respond, in turn 1: ZeroDivisionError: division by zero (tools.py:18)"),
        (
            "Silent",
            "Silent.respond, in turn 1: ValueError: the reply has no message and is_done is False",
        ),
    ):
        assert said in generate(
            capsys, model, "--environment", f"{model / 'tools.py'}:{name}", "--system", "price;", status=1
        )


def test_samples_are_those_without_tools_up_to_the_end_of_the_first_turn(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An episode of one turn is the same sample as without tools, with the same draws."""
    drawn = [
        "--system",
        "price;",
        "--n",
        "3",
        "--temperature",
        "3",
        "--seed",
        "4",
        "--max-tokens",
        "20",
        "--log-probs",
        "--json",
    ]
    samples = [json.loads(line) for line in generate(capsys, model, *drawn).splitlines()]
    environment = ["--environment", f"{model / 'tools.py'}:Price", "--max-turns", "1"]
    episodes = [json.loads(line) for line in generate(capsys, model, *drawn, *environment).splitlines()]
    assert [each["token_ids"] for each in samples] == [each["token_ids"] for each in episodes]
    for sample, episode in zip(samples, episodes, strict=True):  # which are not computed side by side
        assert sample["log_probs"] == pytest.approx(episode["log_probs"], abs=1e-5)
    assert len({str(each["token_ids"]) for each in samples}) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tool", "abacus"], "there is no built-in tool 'abacus', only calculator"),
        (
            ["--tool", "calculator", "--tool", "calculator"],
            "two tools have the same name; the names are calculator, calculator",
        ),
        (
            ["--tool", "calculator", "--environment", "a.py:Game"],
            "--tool and --environment exclude each other",
        ),
        (["--tool", "calculator", "--stop", "x"], "--stop cannot be used in an episode"),
        (
            ["--tool", "calculator", "--parser", "gpt"],
            "agent.parser is 'gpt', but SGLang has no such parser; there are: apertus",
        ),
        (
            ["--agent", "configs/quickstart.yaml"],
            "--agent configs/quickstart.yaml: its section agent has neither tools nor an environment",
        ),
        (
            ["--environment", "Game"],
            "there is no built-in environment 'Game'; write --environment FILE.py:NAME",
        ),
    ],
)
def test_mistakes_are_one_line_before_the_model_is_loaded(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    error = generate(capsys, model, *arguments, status=2)
    assert said in error
    assert error.count("\n") == 1


def test_a_run_with_an_agent_is_checked_with_its_tools_and_template(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "prompt": [{"role": "user", "content": PROMPT}],
        "data_source": "prices",
        "reward_model": {"ground_truth": "42"},
    }
    (model / "train.jsonl").write_text(2 * f"{json.dumps(row)}\n")
    (model / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    run = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "train_files": [str(model / "train.jsonl")],
            "max_prompt_length": 25,
            "max_response_length": 100,
        },
        "reward": {"functions": [{"path": str(model / "reward.py")}]},
        "agent": {"tools": [{"path": str(model / "tools.py"), "name": "price"}, {"name": "calculator"}]},
        "rollout": {"n": 4},
        "trainer": {"prompts_per_step": 2, "output_dir": str(model / "run")},
        "actor": {"micro_batch": {"max_tokens": 256}},
        "device": "cpu",
    }
    (file := model / "run.yaml").write_text(json.dumps(run))
    command = ["check", "--all", str(file), "algorithm=grpo"]
    capsys.readouterr()
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "agent: price, calculator; at most 8 turns, 1 process\n" in printed

    # a group of processes; and the prompt has room for what it says of tools, and for no token more
    assert "environment" in printed
    run["agent"] |= {"max_turn_tokens": 2}
    file.write_text(json.dumps(run))
    assert played(capsys, model, "--agent", str(file))["conversation"][1]["content"] == "42"
    file.write_text(json.dumps(run | {"agent": {**run["agent"], "max_turn_tokens": 1}}))
    assert played(capsys, model, "--agent", str(file))["end"] == "length"
    assert main([*command, "agent.tools=[abacus]"]) == 2
    assert "agent: there is no built-in tool 'abacus', only calculator" in capsys.readouterr().err
