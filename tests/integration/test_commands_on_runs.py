"""Run every command on every kind of run.

Each either works, with a result that is checked, or is refused in one line that says what to do. tests/soak asks
for the kinds of run that need SGLang or images.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from rich.console import Console
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from examples.shapes import prepare
from megarl.cli.main import main
from megarl.cli.run import eval as evaluation
from megarl.cli.run import replay, session
from megarl.cli.run.context import RunContext
from megarl.config.schema import Device
from megarl.controller.resource_pool import ResourcePoolManager
from tests.docs.pages import RECIPES, recipe
from tests.integration.test_preferences import save_pairs
from tests.integration.tiny_run import (
    SYMBOLS,
    placed_pools,
    save_inputs,
    save_policy,
)

PROMPT = "1+1="
NUM_TOKENS = 8


class Kind(NamedTuple):
    """A kind of run.

    Attributes:
        file: The configuration, in the folder of the inputs, or that of an example. Those of the inputs are files on
        the pages, made tiny.
        overrides: What differs from it.
        evaluation: Options that `megarl eval` needs, because the run has no prompts or no reward.
        needs: What it says without them.
        base: The model of adapters.
    """

    file: str
    overrides: tuple[str, ...] = ()
    evaluation: tuple[str, ...] = ()
    needs: str = "give the evaluation data with --data FILE"
    base: str | None = None


ALL_RUNS = ("trainer.total_steps=2", "tracking.record_batches=3", "checkpoint.at_end=true")
MORE_STEPS = "trainer.total_steps=3"
ADAPTERS = ("actor.lora.rank=2", "actor.lora.modules_to_save=[]", "actor.optim.lr=2e-2")
ALONE = "algorithm.kl.where=none"  # without a reference
GRPO = ("algorithm=grpo", ALONE)
ONE_RANK = "actor.parallel.data_parallel_size=1"
AHEAD = ("rollout.max_staleness=1", "algorithm.rollout_correction.level=token")
SGLANG = ("rollout.engine=sglang", "rollout.max_concurrency=8")
TEACHER = (
    "algorithm.advantage.estimator=distillation",
    ALONE,
    "teacher.path={inputs}/teacher",
    "teacher.parallel.tensor_parallel_size=1",
    "reward.functions=[]",
    "data.val_files=[]",
    "trainer.validate_every_steps=0",
)
SUMS = ("--data", "{inputs}/validation.parquet", "--reward", "{inputs}/reward.py:compute_score")
PROMPTS = (*SUMS, "--max-tokens", str(NUM_TOKENS))
PROMPTS += ("--temperature", "0", "data.max_prompt_length=8", "device=cpu")
SHAPES = (
    "model.path={inputs}/shapes/model",
    "data.train_files=[{inputs}/shapes/data/train.parquet]",
    "data.val_files=[{inputs}/shapes/data/validation.parquet]",
    "tracking.loggers=[jsonl]",
    "trainer.prompts_per_step=4",
)

# What the files on the pages get instead of their models, data, devices and sizes.
TINY: dict[str, Any] = {
    "model": {"path": "policy", "dtype": "float32"},
    "checkpoint": {"at_end": False},
    "tracking": {"loggers": ["jsonl"]},
    "device": "cpu",
}
TINY_SFT = {
    "data": {"train_files": ["sft.parquet"], "val_files": ["sft_validation.parquet"], "max_length": 16},
    "actor": {"micro_batch": {"max_tokens": 32}, "optim": {"lr": 1e-2}},
    "trainer": {"samples_per_step": 7},
}
PAIRS = ("DPO", "reward model")
TINY_PAIRS = {
    "data": {"train_files": ["pairs.parquet"], "val_files": ["held_out.parquet"], "max_length": 16},
    "actor": {
        "parallel": {"data_parallel_size": 2},
        "micro_batch": {"max_tokens": 48},
        "optim": {"lr": 3e-3},
    },
    "trainer": {"pairs_per_step": 7},
}
ONE_DEVICE = {
    **{f"{axis}_parallel_size": 1 for axis in ("tensor", "data", "context", "expert")},
    "sequence_parallel": False,
}
TINY_RL = {
    "data": {
        "train_files": ["train.parquet"],
        "val_files": ["validation.parquet"],
        "max_prompt_length": 8,
        "max_response_length": 8,
    },
    "actor": {"parallel": ONE_DEVICE, "micro_batch": {"max_tokens": 128}, "optim": {"lr": 5e-3}},
    "critic": {"parallel": ONE_DEVICE, "micro_batch": {"max_tokens": 128}, "optim": {"lr": 1e-2}},
    "reference": {"micro_batch": {"max_tokens": 128}},
    "rollout": {
        "engine": "hf",
        "num_replicas": 1,
        "tensor_parallel_size": 1,
        "expert_parallel_size": 1,
        "n": 4,
        "sglang": {"server_args": {}},
    },
    "reward": {"functions": [{"path": "reward.py"}], "num_processes": 1},
    "placement": {
        "strategy": "split_collocate",
        "num_nodes": 1,
        "devices_per_node": None,
        "device_memory_gb": None,
    },
    "trainer": {"prompts_per_step": 4, "updates_per_step": 1, "critic_warmup_steps": 0},
}

KINDS = {
    "sft": Kind("supervised fine-tuning.yaml", (), PROMPTS),
    "sft of experts": Kind("supervised fine-tuning.yaml", ("model.path={inputs}/experts",), PROMPTS),
    "reward model": Kind("reward model.yaml", (ONE_RANK,), PROMPTS),
    "dpo of adapters": Kind("DPO.yaml", (*ADAPTERS, ONE_RANK), PROMPTS, base="policy"),
    "ppo": Kind("PPO.yaml", (ALONE,)),
    "grpo ahead": Kind("GRPO.yaml", (*GRPO, *AHEAD)),
    "grpo of adapters": Kind("LoRA.yaml", (*GRPO, *ADAPTERS), base="policy"),
    "distillation": Kind("distillation.yaml", TEACHER, SUMS),
}
if "MEGARL_SOAK" in os.environ:
    KINDS |= {
        "sft of adapters": Kind("supervised fine-tuning.yaml", ADAPTERS, PROMPTS, base="policy"),
        "reward model of adapters": Kind("reward model.yaml", ADAPTERS, PROMPTS, base="policy"),
        "dpo": Kind("DPO.yaml", (), PROMPTS),
        "images": Kind("examples/shapes/grpo.yaml", SHAPES),
        "grpo of experts": Kind("mixture of experts.yaml", (*GRPO, *SGLANG, "model.path={inputs}/experts")),
        "grpo of served adapters": Kind(
            "LoRA.yaml",
            (*GRPO, *SGLANG, *ADAPTERS, "actor.lora.sync=adapter", "model.path={inputs}/untied"),
            base="untied",
        ),
        "grpo with fp8 rollout": Kind(
            "FP8.yaml",
            (
                *(*GRPO, *SGLANG, "model.path={inputs}/blocks", "rollout.dtype=fp8"),
                *("algorithm.rollout_correction.level=token", "resharding.max_log_prob_difference=1"),
            ),
            ("rollout.dtype=model",),
            "use rollout.dtype=model",
        ),
    }

NO_STATUS = "this run has ended and left no status.json; see `megarl report {run}`"
NO_REWARD = "which this command does not support; give the configuration of a reinforcement learning run"
NO_TEXT = "is a critic or a reward model, which cannot generate text; give a language model"
WITH_EXPERTS = "{run} --data FILE rollout.engine=sglang`"
# What a command says that does not apply to a kind of run, whose name begins with the first word.
REFUSED = {
    ("sft", "status"): NO_STATUS,
    ("sft", "score"): NO_REWARD,
    ("sft of experts", "generate"): WITH_EXPERTS,
    ("sft of experts", "eval"): "does not support mixture-of-experts models such as",
    ("dpo", "status"): NO_STATUS,
    ("dpo", "score"): NO_REWARD,
    ("reward model", "status"): NO_STATUS,
    ("reward model", "score"): NO_REWARD,
    ("reward model", "generate"): NO_TEXT,
    ("reward model", "eval"): NO_TEXT,
    ("grpo of experts", "generate"): WITH_EXPERTS,
    ("distillation", "score"): "there is no such file",  # without validations, no samples of them
}


class Run(NamedTuple):
    kind: Kind
    name: str
    inputs: Path
    folder: Path
    train: list[str]  # the command

    @property
    def policy(self) -> Path:
        return self.folder / "huggingface"

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def refusal(self, command: str) -> str | None:
        names = [name for name, each in REFUSED if each == command and self.name.startswith(name)]
        return REFUSED[max(names, key=len), command].format(run=self.folder) if names else None


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_inputs(folder := tmp_path_factory.mktemp("inputs"), num_layers=2)
    save_pairs(folder)
    save_policy(folder / "experts", with_experts=True, num_layers=2)
    save_policy(folder / "teacher", seed=3, num_layers=2)
    for task in RECIPES:
        _save_recipe(task, folder)
    if "MEGARL_SOAK" in os.environ:
        _save_more(folder)
    return folder


def _save_recipe(task: str, folder: Path) -> None:
    """Write the file of a task on its page, and one that makes it tiny."""
    (folder / "page").mkdir(exist_ok=True)
    (folder / "page" / f"{task}.yaml").write_text(recipe(task).text)
    smaller = TINY_PAIRS if task in PAIRS else TINY_SFT if task == "supervised fine-tuning" else TINY_RL
    (folder / f"{task}.yaml").write_text(yaml.safe_dump({"base": f"page/{task}.yaml", **TINY, **smaller}))


def _save_more(folder: Path) -> None:
    """Save the models that SGLang serves, and the images."""
    sizes = {"vocab_size": len(SYMBOLS), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "max_position_embeddings": 64}
    for name in ("blocks", "untied"):
        save_policy(folder / name)
        torch.manual_seed(0)
        config = Qwen3Config(**sizes, **heads, **tokens, tie_word_embeddings=False, initializer_range=0.1)
        Qwen3ForCausalLM(config).float().save_pretrained(folder / name)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prepare, "NUM_TRAIN", 16)
        patched.setattr(prepare, "NUM_VALIDATION", 8)
        prepare.prepare(folder / "shapes", seed=0)


@pytest.fixture(scope="module", autouse=True)
def on_the_ray_that_is_there(ray_cluster: None) -> Iterator[None]:
    """Use the current Ray cluster instead of starting one per command."""

    @contextmanager
    def ray_processes(context: RunContext, console: Console) -> Iterator[tuple[Device, ResourcePoolManager]]:
        with placed_pools(context.config) as pools:
            yield Device.cpu, pools

    with pytest.MonkeyPatch.context() as patched:
        for module in (evaluation, replay, session):
            patched.setattr(module, "ray_processes", ray_processes)
        yield


@pytest.fixture(scope="module", params=KINDS)
def run(inputs: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    kind = KINDS[request.param]
    folder = tmp_path_factory.mktemp("run") / "out"
    file = inputs / kind.file if (inputs / kind.file).exists() else Path(kind.file)
    overrides = [each.format(inputs=inputs) for each in (*ALL_RUNS, *kind.overrides)]
    train = ["train", str(file), f"trainer.output_dir={folder}", *overrides]
    assert main(train) == 0
    return Run(kind, request.param, inputs, folder, train)


def greedy(folder: Path, prompts: list[str]) -> list[str]:
    """Return the answers of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reads_images = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    kind = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32)
    texts = []
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS
        )
        texts.append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


# ---- the results of commands, given what they printed and the folder for their results


def check_generate(run: Run, said: str, folder: Path) -> None:
    """The checkpoint writes what the exported model does."""
    prompt = "?" if run.name == "images" else PROMPT
    assert [json.loads(line)["text"] for line in said.splitlines()] == greedy(run.policy, [prompt])


def check_eval(run: Run, said: str, folder: Path) -> None:
    """The score is that of the run's last validation, and the samples are those of the exported model."""
    report = json.loads((folder / "eval" / "results.json").read_text())
    (result,) = report["results"].values()
    samples = [json.loads(line) for line in (folder / "eval" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 8
    logged = run.metrics()[-1].get("val/score/mean")
    if logged is not None and run.kind.evaluation == ():
        assert result["metrics"]["score/mean"]["value"] == pytest.approx(logged)
    if run.name != "images":
        prompts = [sample["messages"][0]["content"] for sample in samples]
        assert [sample["response"] for sample in samples] == greedy(run.policy, prompts)


def check_convert(run: Run, said: str, folder: Path) -> None:
    """The folder is the exported model, or the adapter that makes it of its base model."""
    converted = folder / "converted"
    if run.kind.base is not None:
        base = run.inputs / run.kind.base
        assert (converted / "adapter_config.json").is_file()
        merge = ["convert", "merge-adapter", "--input", str(converted), "--base", str(base)]
        converted = folder / "merged"
        assert main([*merge, "--output", str(converted)]) == 0
        assert main(["convert", "verify", str(converted), str(base)]) == 1
    assert main(["convert", "verify", str(converted), str(run.policy)]) == 0


def check_status(run: Run, said: str, folder: Path) -> None:
    assert "the run is complete" in said
    assert f"after step {run.metrics()[-1]['step']}" in said


def check_report(run: Run, said: str, folder: Path) -> None:
    """The page has the metrics of every step."""
    page = (run.folder / "report.html").read_text()
    assert "report written to" in said
    (part,) = re.findall(r'id="part/0/metrics">([^<]+)<', page)
    steps = json.loads(gzip.decompress(base64.b64decode(part)))["steps"]
    assert steps == [line["step"] for line in run.metrics()]


def check_replay(run: Run, said: str, folder: Path) -> None:
    models = ["actor", "critic"] if run.name == "ppo" else ["actor"]
    assert said.count("/grad_norm: agrees") == len(models)
    assert "differs" not in said


def check_score(run: Run, said: str, folder: Path) -> None:
    rows = [json.loads(line) for line in (run.folder / "generations.jsonl").read_text().splitlines()]
    mean = sum(row["score"] for row in rows) / len(rows)
    assert f"{len(rows)} rows scored: mean {mean:.4g}" in said


def check_resume(run: Run, said: str, folder: Path) -> None:
    """The run trains one more step, and the same command again none."""
    assert "after step 2, loaded in" in said
    assert main([*run.train, MORE_STEPS]) == 0
    assert [line["step"] for line in run.metrics() if line["step"]] == [1, 2, 3]


class Command(NamedTuple):
    arguments: tuple[str, ...]
    check: Callable[[Run, str, Path], None]


COMMANDS: Mapping[str, Command] = {
    "status": Command(("status", "{run}"), check_status),
    "report": Command(("report", "{run}"), check_report),
    "generate": Command(
        ("generate", "{run}", "{prompt}", "--max-tokens", str(NUM_TOKENS), "--json"), check_generate
    ),
    "convert": Command(
        (
            *("convert", "megatron-to-hf", "--input", "{run}/checkpoints", "--output"),
            "{folder}/converted",
        ),
        check_convert,
    ),
    "score": Command(("eval", "{run}/config.yaml", "--rows", "{run}/generations.jsonl"), check_score),
    "eval": Command(("eval", "{run}", "--output", "{folder}/eval"), check_eval),
    "replay": Command(("replay", "{run}", "2"), check_replay),
    "resume": Command((MORE_STEPS,), check_resume),
}


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    (line,) = (each for each in said.err.splitlines() if each.startswith(f"megarl {arguments[0]}: "))
    assert says in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_works_or_says_what_to_do(
    run: Run, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = COMMANDS[name]
    prompt = "?" if run.name == "images" else PROMPT
    places = {"run": run.folder, "folder": tmp_path, "inputs": run.inputs, "prompt": prompt}
    arguments = [each.format(**places) for each in command.arguments]
    options = [each.format(**places) for each in run.kind.evaluation] if name == "eval" else []
    if name == "resume":
        arguments = [*run.train, *arguments]
    capsys.readouterr()

    if (refusal := run.refusal(name)) is not None:
        refused(capsys, [*arguments, *options], refusal)
        return
    if options:
        refused(capsys, arguments, run.kind.needs)
    assert main([*arguments, *options]) == 0
    command.check(run, capsys.readouterr().out, tmp_path)
