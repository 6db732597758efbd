"""`megarl generate`: what it writes is what transformers writes, from prompts of every kind."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.cli.main import main
from tests.integration.tiny_run import save_policy

PROMPTS = ["1+1=", "7", "30+4+2="]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_policy(folder := tmp_path_factory.mktemp("policy"))
    return folder


def greedy(model: Path, prompts: list[str], num_tokens: int) -> list[str]:
    """Generate greedily with transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    texts = []

    for prompt in prompts:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        written = policy.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens
        )
        texts.append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))

    return texts


def generate(capsys: pytest.CaptureFixture[str], model: Path, *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["generate", str(model), *arguments, "--max-tokens", "12", "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_text_is_that_of_transformers(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = greedy(model, PROMPTS, 12)
    assert len(set(expected)) == len(PROMPTS)
    assert [answer["text"] for answer in generate(capsys, model, *PROMPTS)] == expected
    assert main(["generate", str(model), PROMPTS[0], "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out == expected[0] + "\n"


def test_samples_with_their_log_probs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampled = ["--n", "3", "--temperature", "1", "--log-probs"]
    answers = generate(capsys, model, *PROMPTS[:2], *sampled, "--seed", "5")
    assert [(answer["messages"][0]["content"], answer["sample"]) for answer in answers] == [
        (prompt, sample) for prompt in PROMPTS[:2] for sample in range(3)
    ]
    assert answers == generate(capsys, model, *PROMPTS[:2], *sampled, "--seed", "5")
    assert answers != generate(capsys, model, *PROMPTS[:2], *sampled, "--seed", "6")
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    first = answers[0]
    prompt = tokenizer.apply_chat_template(first["messages"], add_generation_prompt=True, return_dict=False)
    logits = policy(torch.tensor([prompt + first["token_ids"]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(first["token_ids"])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(first["log_probs"]), expected, rtol=1e-4, atol=1e-5)


def test_a_stop_text_ends_an_answer(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (whole,) = generate(capsys, model, PROMPTS[0], "--log-probs")
    stop = whole["text"][4:6]
    (answer,) = generate(capsys, model, PROMPTS[0], "--log-probs", "--stop", stop)
    end = whole["text"].index(stop)
    assert (answer["text"], answer["finish_reason"]) == (whole["text"][:end], "stop")
    assert answer["token_ids"] == whole["token_ids"][: end + 2]  # a token is a character here


def test_prompts_of_the_input(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n\n7\n"))
    assert [answer["messages"][0]["content"] for answer in generate(capsys, model, "--lines")] == [
        "1+1=",
        "7",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("7\n"))
    (answer,) = generate(capsys, model, "--system", "12")
    assert [message["content"] for message in answer["messages"]] == ["12", "7"]
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert main(["generate", str(model)]) == 2
    assert "no prompt is given, and standard input is empty" in capsys.readouterr().err


def test_a_chat_keeps_earlier_turns_until_an_empty_line(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second answer follows the first; an empty line forgets both."""
    lines = iter(["1+1=", "7", "", "7"])

    def typed(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", typed)
    assert main(["generate", str(model), "--max-tokens", "4"]) == 0
    first, second, alone, _ = capsys.readouterr().out.splitlines()
    assert [first, alone] == greedy(model, ["1+1=", "7"], 4)
    assert second != alone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}", "1", "--n", "2"], "--n is 2, but greedy samples of a prompt are identical"),
        (["{model}", "1", "--temperature", "-1"], "temperature is -1.0"),
        (["{model}", "1", "--max-tokens", "80"], "exceed the model's limit of 64"),
        (["{model}", "what is it?"], "cannot encode"),
        (["{model}/nowhere", "1"], "there is no such folder"),
        (["{model}", "1", "--step", "3"], "is not the folder of a run"),
    ],
)
def test_mistakes_are_one_line(
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.delattr("megarl.cli.run.generate.HFEngine")
    assert main(["generate", *(argument.format(model=model) for argument in arguments)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_mixture_of_experts_is_refused_before_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_policy(tmp_path / "experts", with_experts=True, num_layers=1)
    for options in ([], ["--tool", "calculator"]):
        capsys.readouterr()
        assert main(["generate", str(tmp_path / "experts"), PROMPTS[0], *options]) == 2
        said = capsys.readouterr().err
        assert "is a mixture-of-experts model, which `megarl generate` does not support; use" in said
        assert f"`megarl eval {tmp_path / 'experts'} --data FILE rollout.engine=sglang`" in said
