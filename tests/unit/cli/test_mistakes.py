"""User errors, one per test.

Each has a message with the remedy and status 2, and neither a traceback nor a started process.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.cli.main import main
from megarl.config.load import dump_config
from tests.integration.tiny_run import REWARD, save_inputs, tiny_config, tiny_sft_config
from tests.unit.data.chats import prompt_row

Prepare = Callable[[Path], None]


class Mistake(NamedTuple):
    """`said`: words of the one error. `prepare`: makes it in the current folder, a copy of a good run's.
    `fast`: known without looking into files. `file`: the configuration."""

    said: str
    overrides: tuple[str, ...] = ()
    prepare: Prepare | None = None
    fast: bool = False
    command: str = "check"
    file: str = "run.yaml"


def override(*overrides: str, said: str, command: str = "check") -> Mistake:
    return Mistake(said, overrides, fast=command == "check", command=command)


def text(name: str, content: str) -> Prepare:
    return lambda folder: (folder / name).write_text(content) and None


def fields(name: str, **changes: Any) -> Prepare:
    """Change fields of a JSON object in the model's folder."""

    def prepare(folder: Path) -> None:
        file = folder / "policy" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return prepare


def gone(name: str) -> Prepare:
    return lambda folder: (folder / "policy" / name).unlink()


def rows(*changes: Mapping[str, Any]) -> Prepare:
    good = prompt_row("1+1=")
    return lambda folder: pq.write_table(
        pa.Table.from_pylist([good | change for change in changes]), folder / "train.parquet"
    )


def answers(*roles: str) -> Prepare:
    chat = [{"role": role, "content": "1"} for role in roles]
    return lambda folder: pq.write_table(
        pa.Table.from_pylist([{"messages": chat}] * 9), folder / "sft.parquet"
    )


def config_file(content: str) -> Prepare:
    return text("run.yaml", content)


def reward(body: str) -> Prepare:
    return text(
        "reward.py", f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n"
    )


def cut_off(name: str) -> Prepare:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-30]) and None


def with_token(folder: Path) -> None:
    """The tokenizer of another model: it has one more."""
    file = folder / "policy" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["!"] = 17
    file.write_text(json.dumps(content))


def outside(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (folder / "policy" / "model.safetensors.index.json").write_text(json.dumps(index))


LOOK = {"prompt": [{"role": "user", "content": "1+1="}]}
MISTAKES: dict[str, Mistake] = {
    # the configuration
    "an unknown key": override("actor.optm.lr=1", said="did you mean actor.optim?"),
    "a key of verl's": override("actor_rollout_ref.rollout.n=4", said="rollout.n"),
    "a text for a number": override("trainer.total_steps=many", said="must be an integer"),
    "a number out of range": override("checkpoint.keep=-1", said="must be at least 0"),
    "one sample in a group": override("algorithm=grpo", "rollout.n=1", said="rollout.n"),
    "a misspelt preset": override(
        "algorithm=grop", said="algorithm=grop: there is no such preset; available:"
    ),
    "an override without a value": override("trainer.seed", said="write key.sub=value"),
    "tensor parallelism that cuts no heads": override("actor.parallel.tensor_parallel_size=3", said="use 2"),
    "stages that cut no layers": override(
        "critic.parallel.pipeline_parallel_size=3", said="use 2 or 4 stages"
    ),
    "an engine that cuts no model": override("rollout.tensor_parallel_size=2", said="rollout.engine=sglang"),
    "an unknown engine": override("rollout.engine=vllm", said="vLLM does not exist here; use sglang"),
    "an unknown device": override("device=gpu", said="must be one of auto, cpu, cuda"),
    "an option that SGLang lacks": override(
        "rollout.engine=sglang",
        "rollout.sglang.server_args={mem_frac: 0.5}",
        said="did you mean mem_fraction_static?",
    ),
    "updates that do not divide": override("trainer.updates_per_step=3", said="use updates_per_step 2 or 4"),
    "a truncated sampler": override("rollout.top_p=0.9", said="truncated sampler"),
    "a greedy sampler": override("rollout.temperature=0", said="use 1.0, the usual choice"),
    "an unknown logger": override(
        "tracking.loggers=[comet]", said="must be a list, each item one of console"
    ),
    "the root as output": override("trainer.output_dir=/", said="the root of the file system"),
    "no folder as output": override(
        "trainer.output_dir=''", said="trainer.output_dir: is '', which is not a folder"
    ),
    "a file as output": override(
        "trainer.output_dir=reward.py", said="reward.py: Not a directory; give a writable folder"
    ),
    "a folder that cannot be made": override(
        "trainer.output_dir=/proc/x", said="'/proc/x' cannot be written"
    ),
    "a checkpoint that is not there": override(
        "checkpoint.resume=nowhere",
        said="give auto, disable, or the path or URL of a checkpoint",
        command="train",
    ),
    "an empty path to resume": override(
        "checkpoint.resume=''", said="give auto, disable, or the path or URL of a checkpoint"
    ),
    "None for null": override("checkpoint.dir=None", said="write null"),
    "a reference to nothing": override(
        "data.max_prompt_length=${nothing}", said="Interpolation key 'nothing' not found"
    ),
    "a variable that is not set": override(
        "trainer.output_dir=${oc.env:NO_SUCH}", said="'NO_SUCH' not found"
    ),
    "a weight that is no number": override(
        "reward.functions=[{path: reward.py, weight: .nan}]", said="must be a finite number"
    ),
    "a huge seed": override(
        "trainer.seed=18446744073709551616", said="the largest number allowed is 1,000,000,000"
    ),
    "a section of the optimizer at the top": override(
        "optim.lr=1e-5", said="optim.lr: unknown key; use actor.optim.lr"
    ),
    "a huge learning rate": override("actor.optim.lr=1e30", said="must be in (0, 1]"),
    "validation without data": override(
        "data.val_files=[]",
        "trainer.validate_every_steps=1",
        said="has no effect with data.val_files=[]; set data.val_files=[FILE.parquet], or remove it",
    ),
    "rows beyond the model's positions": override(
        "data.max_prompt_length=60",
        "actor.micro_batch.max_tokens=99",
        "critic.micro_batch.max_tokens=99",
        "reference.micro_batch.max_tokens=99",
        said="max_position_embeddings 64 of",
    ),
    "no reward at all": override("reward.functions=[]", said="give a list such as [{path: reward.py"),
    "a reward as a text": override(
        "reward.functions=reward.py", said="must be a list of objects with the keys path, weight"
    ),
    "a reward file that is not there": override(
        "reward.functions=[{path: mine.py}]", said="there is no file", command="train"
    ),
    "a data file that is not there": override(
        "data.train_files=[mine.parquet]", said="there is no file", command="train"
    ),
    "a folder as data": override("data.train_files=[policy]", said="this is a language model ("),
    "a pattern as data": override("data.train_files=['*.parquet']", said="patterns are not expanded"),
    "a page as data": override(
        "data.train_files=[reward.py]", said="its name must end in .parquet, .jsonl, .json, .csv"
    ),
    "no data": override("data.train_files=[]", said="list at least one file"),
    "too few weights": override("data.train_weights=[1, 2]", said="there are 2 weights for 1 file"),
    "a reward model as policy": Mistake(
        "is a reward model (Qwen2ForSequenceClassification), which returns a score",
        prepare=fields("config.json", architectures=["Qwen2ForSequenceClassification"]),
        fast=True,
    ),
    "a policy as reward model": override("reward.model.path=policy", said="so this is a language model ("),
    "a tokenizer as model": Mistake(
        "this is a tokenizer without a model", prepare=gone("config.json"), fast=True
    ),
    "a model that is not there": override("model.path=nowhere", said="must be a local Hugging Face folder"),
    "a GPU that is not there": override("device=cuda", said="use device=cpu", command="train"),
    # files: the configuration
    "a folder as configuration": Mistake("is a folder; give a YAML file", file="policy", fast=True),
    "a configuration that is not there": Mistake("there is no such file", file="mine.yaml", fast=True),
    "a tab": Mistake("is not YAML", prepare=config_file("model:\n\tpath: policy\n"), fast=True),
    "a word": Mistake("must contain a mapping of sections", prepare=config_file("model\n"), fast=True),
    "a number": Mistake("must contain a mapping of sections", prepare=config_file("7\n"), fast=True),
    "a list": Mistake("must contain a mapping of sections", prepare=config_file("- model\n"), fast=True),
    "a file without a model": Mistake(
        "model.path: is required",
        prepare=config_file(
            "data: {train_files: [train.parquet]}\nreward: {functions: [{path: reward.py}]}\n"
        ),
        fast=True,
    ),
    # the model
    "another family": Mistake(
        "the supported families are", prepare=fields("config.json", model_type="gpt2"), fast=True
    ),
    "an eps that is no number": Mistake(
        "'rms_norm_eps' is nan", prepare=fields("config.json", rms_norm_eps=float("nan")), fast=True
    ),
    "a huge eps": Mistake(
        "'rms_norm_eps' is 1e+30", prepare=fields("config.json", rms_norm_eps=1e30), fast=True
    ),
    "an infinite theta": Mistake(
        "'rope_theta' is inf",
        prepare=fields("config.json", rope_parameters={"rope_type": "default", "rope_theta": float("inf")}),
        fast=True,
    ),
    "a config.json that is too deep": Mistake(
        "nested too deep", prepare=text("policy/config.json", "[" * 100_000), fast=True
    ),
    "no weights": Mistake(
        "has no weights in safetensors files", prepare=gone("model.safetensors"), command="train"
    ),
    "weights of another size": Mistake(
        "config.json implies (20, 32)", prepare=fields("config.json", vocab_size=20)
    ),
    "weights that are cut off": Mistake(
        "truncated or not a safetensors file", prepare=cut_off("policy/model.safetensors")
    ),
    "an index outside of the folder": Mistake("only files in this folder are allowed", prepare=outside),
    # tokenizer files
    "no tokenizer.json": Mistake("copy tokenizer.json into it", prepare=gone("tokenizer.json")),
    "a tokenizer that is no JSON": Mistake(
        "copy its tokenizer.json again", prepare=cut_off("policy/tokenizer.json")
    ),
    "a tokenizer of nothing": Mistake(
        "the folder's tokenizer cannot be loaded", prepare=text("policy/tokenizer.json", "{}")
    ),
    "a tokenizer's settings as a list": Mistake(
        "must contain a JSON object, not list", prepare=text("policy/tokenizer_config.json", "[]")
    ),
    "a token that the model lacks": Mistake(
        "the tokenizer has 1 token that the model lacks", prepare=with_token
    ),
    "no chat template": Mistake("put chat_template.jinja", prepare=gone("chat_template.jinja")),
    "a template that fails": Mistake(
        "fix chat_template.jinja", prepare=text("policy/chat_template.jinja", "{{ 1 / 0 }}")
    ),
    "a template of another language": Mistake(
        "fix chat_template.jinja", prepare=text("policy/chat_template.jinja", "{{ 1 + 'a' }}")
    ),
    "a template without an end": Mistake(
        "the chat template is invalid", prepare=text("policy/chat_template.jinja", "{% if %}")
    ),
    "an end token that is no number": Mistake(
        "eos_token_id is 'x'", prepare=fields("generation_config.json", eos_token_id="x")
    ),
    # data
    "no column of prompts": Mistake(
        "column 'prompt' is missing",
        prepare=lambda folder: pq.write_table(pa.table({"question": ["1"] * 9}), folder / "train.parquet"),
    ),
    "no ground truth": Mistake("it has no 'ground_truth'", prepare=rows({"reward_model": {"style": "rule"}})),
    "an empty prompt": Mistake("the list of messages is empty", prepare=rows({"prompt": []}, LOOK)),
    "a prompt of blanks": Mistake(
        "all of its messages are empty", prepare=rows({"prompt": [{"role": "user", "content": " "}]})
    ),
    "a role of another format": Mistake(
        "has role 'human'", prepare=rows({"prompt": [{"role": "human", "content": "1"}]})
    ),
    "keys of another format": Mistake(
        "expected role and content as strings", prepare=rows({"prompt": [{"from": "human", "value": "1"}]})
    ),
    "an assistant's last word": Mistake(
        "end the prompt with the message to be answered",
        prepare=rows({"prompt": [*LOOK["prompt"], {"role": "assistant", "content": "2"}]}),
    ),
    "text that cannot be written": Mistake(
        "the tokenizer loses text", prepare=rows({"prompt": [{"role": "user", "content": "one+1="}]})
    ),
    "a prompt that is too long": Mistake(
        "set data.max_prompt_length=12 or more", prepare=rows(*[{"prompt": "1+1=1+1=1+"}] * 9)
    ),
    "no rows": Mistake(
        "the file has no rows",
        prepare=lambda folder: pq.write_table(
            pq.read_table(folder / "train.parquet").slice(0, 0), folder / "train.parquet"
        ),
    ),
    "JSON lines called parquet": Mistake(
        "not a parquet file", prepare=text("train.parquet", '{"prompt": "1"}\n')
    ),
    "a parquet file that is cut off": Mistake("not a parquet file", prepare=cut_off("train.parquet")),
    "more prompts than rows": Mistake("use 32 or less, or more rows", ("trainer.prompts_per_step=64",)),
    "rows of CSV with other lengths": Mistake(
        "row 1: has 2 values",
        ("data.train_files=[a.csv]", "data.columns.ground_truth=answer", "data.val_files=[]"),
        text("a.csv", "prompt,data_source,answer\n1+1=,sums,2\n1+1=,2\n"),
    ),
    "a chat without an answer": Mistake(
        "as its last message, the assistant's answer", prepare=answers("user"), file="sft.yaml"
    ),
    # rewards
    "a reward of other arguments": Mistake(
        "cannot be called with the keywords",
        prepare=text("reward.py", "def compute_score(completions):\n    return 0\n"),
    ),
    "a reward that is no Python": Mistake("SyntaxError", prepare=text("reward.py", "def compute_score(:\n")),
    "a reward that lacks a package": Mistake(
        "ModuleNotFoundError", prepare=text("reward.py", "import a_module_that_is_not_there\n")
    ),
    "a reward that is a coroutine": Mistake(
        "is a coroutine function", prepare=text("reward.py", f"async {REWARD}")
    ),
    "a loss that is misspelt": Mistake(
        "policy loss 'my_los' is not in",
        ("algorithm.policy_loss.function=own.py:my_los",),
        prepare=text("own.py", "def my_loss(a, b): ...\n"),
    ),
    "a reward of another name": Mistake(
        "set reward.functions' path", prepare=text("reward.py", REWARD.replace("compute", "my"))
    ),
    "a reward that gives nothing": Mistake(
        "and nothing else scores the sample", prepare=reward("return None")
    ),
    "a reward that raises": Mistake(
        "compute_score raised KeyError", prepare=reward("return extra_info['weight']")
    ),
    "a reward that ends its process": Mistake(
        "compute_score raised SystemExit", prepare=reward("raise SystemExit(3)")
    ),
    "a reward that never ends": Mistake(
        "took more than reward.time_limit_s=0.5 s",
        ("reward.time_limit_s=0.5",),
        reward("import time; time.sleep(1000)"),
    ),
    "a ground truth that is null": Mistake(
        "train.parquet: row 1: the ground truth None: it is null, and compute_score reads it; provide the "
        "right answer, or remove the row",
        prepare=rows({}, {"reward_model": {"style": "rule", "ground_truth": None}}, *[{}] * 6),
    ),
    "a metric to keep that the reward does not make": Mistake(
        "checkpoint.keep_best.metric: no validation of this run measures 'val/maj@2', which requires reward "
        "functions that return an 'answer'",
        (
            "rollout.validation.n=2",
            "rollout.validation.temperature=1",
            "checkpoint.keep_best.metric=val/maj@2",
            "trainer.validate_every_steps=1",
        ),
    ),
    "a metric to keep that is misspelt": Mistake(
        "checkpoint.keep_best.metric: no validation of this run measures 'val/cuont/score/mean'; did you "
        "mean val/count/score/mean",
        ("checkpoint.keep_best.metric=val/cuont/score/mean", "trainer.validate_every_steps=1"),
    ),
    # what train refuses by the same code, before a process starts
    "training with a ground truth that is null": Mistake(
        "train.parquet: row 1: the ground truth None: it is null, and compute_score reads it",
        prepare=rows({}, {"reward_model": {"style": "rule", "ground_truth": None}}, *[{}] * 6),
        command="train",
    ),
    "training with a reward of other arguments": Mistake(
        "cannot be called with the keywords",
        prepare=text("reward.py", "def compute_score(completions):\n    return 0\n"),
        command="train",
    ),
    "training with weights of another size": Mistake(
        "config.json implies (20, 32)", prepare=fields("config.json", vocab_size=20), command="train"
    ),
    "training on too few rows": Mistake(
        "use 32 or less, or more rows", ("trainer.prompts_per_step=64",), command="train"
    ),
    "training on lost text": Mistake(
        "the tokenizer loses text",
        prepare=rows({"prompt": [{"role": "user", "content": "one+1="}]}),
        command="train",
    ),
    "resuming from a model": override(
        "checkpoint.resume=policy", said="checkpoint.resume: is 'policy', which is neither a checkpoint"
    )._replace(fast=False),
    "training without tokenizer.json": Mistake(
        "copy tokenizer.json", prepare=gone("tokenizer.json"), command="train", file="sft.yaml"
    ),
}


ENDED_BY_THE_POOL = "a reward that never ends"


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files that name their neighbors."""
    folder = tmp_path_factory.mktemp("good")
    save_inputs(folder)

    for name, config in (("run", tiny_config), ("sft", tiny_sft_config)):
        dump_config(config(folder, folder / "out"), folder / f"{name}.yaml")
        (folder / f"{name}.yaml").write_text((folder / f"{name}.yaml").read_text().replace(f"{folder}/", ""))

    return folder


@pytest.fixture
def folder(good_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(shutil.copytree(good_run, tmp_path / "mine"))
    return tmp_path / "mine"


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("file", ["run.yaml", "sft.yaml"])
def test_without_a_mistake_all_is_good(folder: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", file]) == 0
    out, err = capsys.readouterr()
    assert (err, "warning" in out) == ("", False)


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("name", [name for name in MISTAKES if name != ENDED_BY_THE_POOL])
def test_a_mistake_is_one_error_with_what_to_change(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_error(MISTAKES[name], folder, capsys)


def test_a_function_that_never_ends_is_one_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its process is a fresh one, which the pool can end."""
    one_error(MISTAKES[ENDED_BY_THE_POOL], folder, capsys)


def one_error(mistake: Mistake, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if mistake.prepare is not None:
        mistake.prepare(folder)
    options = ["--fast"] if mistake.fast and mistake.command == "check" else []
    assert main([mistake.command, *options, mistake.file, *mistake.overrides]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"megarl {mistake.command}: ")
    assert mistake.said in err
    assert "Traceback" not in out + err
    problems = [line for line in err.splitlines() if line.startswith("  - ")]
    assert len(problems) == ("1 problem\n" in err), err
    assert len(err.splitlines()) == 1 + len(problems), err
    assert out == ""
    assert not (folder / "out").exists()


def test_the_table_has_sixty_mistakes() -> None:
    assert len(MISTAKES) >= 60


def test_all_that_is_wrong_is_said_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A number, a model, its data, a reward: one line each."""
    cut_off("policy/model.safetensors")(folder)
    rows({"prompt": []}, LOOK)(folder)
    reward("return None")(folder)
    assert main(["check", "run.yaml", "trainer.updates_per_step=3"]) == 2
    err = capsys.readouterr().err
    assert "4 problems" in err or "3 problems" in err  # without a row there is no sample to score
    for said in ("updates_per_step", "truncated", "the list of messages is empty"):
        assert said in err


def test_ends_that_differ_are_warned_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields("generation_config.json", eos_token_id=[0])(folder)
    assert main(["check", "run.yaml"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "the end token of the tokenizer is '<end>' (1), but that of the model's generation_config.json or "
        "config.json is '<pad>' (0)" in said
    )
