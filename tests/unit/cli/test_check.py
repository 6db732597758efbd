"""`megarl check`: what a user sees and the exit status, for good and for broken configurations."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megarl.cli.main import build_parser, commands_of, main
from megarl.cli.tables.summary import print_summary, title_of, write_plan
from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.doctor.checks import load_for_plan
from megarl.machine.errors import ConfigError
from tests.unit.config.folders import model_folder, pair_values, ppo_values, sft_values, write_yaml

ROOT = Path(__file__).parents[3]


@pytest.fixture
def ppo(tmp_path: Path) -> str:
    return write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))


def as_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_good_file_prints_models_arithmetic_and_places(
    ppo: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["check", "--fast", "--all", ppo]) == 0
    out = capsys.readouterr().out
    rows = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert "samples 48 12 prompts x 4" in rows
    assert "mini-batches 3 x 16 rows 48 samples" in rows
    assert [row for row in rows if row.startswith(("ranks", "replicas ", "rows per", "micro", "updates"))][
        :7
    ] == [
        "ranks 4 4 2",
        "replicas 2 2 1",
        "rows per pass 16 48 16",
        "rows per replica 8 24 16",
        "micro-batches 1 to 4 1 6",
        "updates per step 6 - 6",
        "updates 36 - 60",
    ]
    assert "actor actor 0-3 actor + reference 0 0-3" in rows
    assert "critic reward 0 reward 0 cpu" in rows
    assert "engine hf rollout.engine" in rows
    assert "replicas 1 x 1 device separate devices" in rows
    assert "OK (8 processes, 7 devices; planned for a CPU in bfloat16)" in out
    assert "Weight sync" not in out
    assert main(["check", "--plan", ppo, "resharding.delta=true"]) == 0
    rows = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "transport group resharding.transport=auto" in rows
    assert any(
        row.startswith("kept in host memory per trainer rank 0.")
        and row.endswith("the last weights of the engines: resharding.delta=true")
        for row in rows
    )
    layer = 2 * 48 * 48 + 2 * 48 * 24 + (48 + 2 * 24) + 3 * 48 * 96 + 2 * 48
    size = 2 * (2 * 101 * 48 + 4 * layer + 48) / 2**20
    assert f"received per engine rank {size:.2f} MiB 1 rank, only their own shards" in rows
    assert any(row.startswith("sent per trainer rank 0.") and row.endswith(" MiB 4 ranks") for row in rows)
    assert "rounds 1 at most 512.00 MiB per rank: resharding.bucket_mb=512" in rows
    assert "verification first resharding.verify" in rows


def test_at_80_columns_no_word_or_number_is_broken(
    ppo: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is longer than the window is on its own line, also a path.

    The lines of a table have the content of a wide window's.
    """
    monkeypatch.setattr(
        "megarl.cli.tables.run.free_bytes", lambda path: 2**40
    )  # others write at the same time
    words = {}
    overrides = ["placement.strategy=hybrid", "rollout.engine=sglang"]
    for columns in ("80", "300"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["check", "--fast", "--all", ppo, *overrides]) == 0
        words[columns] = sorted(re.findall(r"[^\s\u2500]+", capsys.readouterr().out))

    assert words["80"] == words["300"]


def test_the_summary_is_short_and_begins_with_the_verdict(
    ppo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", ppo, "model.dtype=float32", "--fast", "placement.device_memory_gb=40"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].endswith("run.yaml: OK (8 processes, 7 devices; planned for a CPU in float32)")
    labels = [line.split()[0] for line in lines[1:] if not line.startswith(" ")]
    assert labels == ["MODELS", "BATCH", "MEMORY", "LAYOUT", "DISK", "REWARD", "SYNC", "more:"]
    assert len(lines) < 25
    assert "BATCH   PPO: 10 steps x 48 samples (12 prompts x 4), in 3 mini-batches of 16 rows; " in out
    assert "fullest device of the pool actor, budget 40 GiB: " in out
    assert "actor, reference: TP 2 x DP 2 on 4 devices (pool actor)" in out
    assert "rollout: hf on 1 x 1 device, separate devices" in out
    assert "SYNC    weights by group\n" in out


def test_the_summary_plans_the_weight_sync_and_the_time_of_a_step(ppo: str, tmp_path: Path) -> None:
    overrides = ["algorithm=grpo", "trainer.critic_warmup_steps=0", "placement.device_profile=cpu"]
    config = load_for_plan(PPOConfig, ppo, overrides).config
    print_summary(config, console := Console(file=io.StringIO(), width=80), with_push=True, is_here=False)
    said = console.file.getvalue()
    assert "GRPO: 10 steps x 48 samples (12 prompts x 4), in 3 mini-batches of 16 rows; " in said
    assert "        KL: in the loss, k3 x 0.001\n" in said
    assert " MiB for each engine rank in 1 round; verification: first\n" in said
    assert re.search(r"^TIME +[\d.,]+ s per step are predicted on ", said, re.MULTILINE)
    without = config.with_sections(placement=replace(config.placement, device_profile=None))
    print_summary(without, console, with_push=True, is_here=False)
    assert "of a step is not predicted: set placement.device_profile" in console.file.getvalue()
    write_plan(config, tmp_path)
    assert "Work of each role" in (tmp_path / "plan.txt").read_text()


@pytest.mark.parametrize(("kind", "title"), [("dpo", "DPO"), ("reward_model", "REWARD MODEL")])
def test_the_summary_of_a_run_on_pairs_counts_them(
    kind: str, title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_yaml(tmp_path / "run.yaml", {"kind": kind} | pair_values(tmp_path))
    assert main(["check", "--fast", path, "trainer.pairs_per_step=6", "trainer.total_steps=5"]) == 0
    said = capsys.readouterr().out
    assert f"BATCH   {title}: 5 steps x 12 samples (6 pairs x 2), in 1 mini-batch of 12 rows; " in said


def test_settings_of_functions_may_stay_when_a_reward_model_scores(
    ppo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = Path(ppo).parent / "judge"
    model_folder(judge, architectures=["Qwen2ForSequenceClassification"], num_labels=1)
    (judge / "chat_template.jinja").write_text("{{ messages }}")
    scored = ["reward.functions=[]", f"reward.model.path={judge}", "reward.model.micro_batch.max_tokens=40"]
    unread = ["reward.num_processes=1", "reward.time_limit_s=3"]
    assert main(["check", "--fast", ppo, *scored, *unread]) == 0, capsys.readouterr().err
    assert "no effect" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("algorithm", "title"),
    [
        ("ppo", "PPO"),
        ("grpo", "GRPO"),
        ("dapo", "DAPO"),
        ("dr_grpo", "Dr. GRPO"),
        ("gspo", "GSPO"),
        ("cispo", "CISPO"),
        ("rloo", "RLOO"),
    ]
    + [("remax", "ReMax"), ("reinforce_pp", "REINFORCE++")],
)
def test_a_run_has_the_name_of_its_algorithm(algorithm: str, title: str) -> None:
    assert title_of(load_config(PPOConfig, "configs/quickstart.yaml", [f"algorithm={algorithm}"])) == title


def test_a_reward_model_is_shown_with_its_place_and_its_limit(
    ppo: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward model is on the critic's two devices, after the policy's four."""
    monkeypatch.setenv("COLUMNS", "200")
    judge = Path(ppo).parent / "judge"
    model_folder(judge, architectures=["Qwen2ForSequenceClassification"], num_labels=1)
    (judge / "chat_template.jinja").write_text("{{ messages }}")
    sizes = "reward.model.parallel.data_parallel_size=2"
    assert (
        main(
            [
                "check",
                "--fast",
                "--all",
                ppo,
                f"reward.model.path={judge}",
                sizes,
                "reward.model.micro_batch.max_tokens=40",
            ]
        )
        == 0
    )
    rows = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert any(row.startswith(f"reward_model: {judge} (qwen2, bfloat16, ") for row in rows)
    assert [row.split()[-1] for row in rows if row.startswith(("ranks", "rows per pass "))] == ["2", "48"]
    assert "micro-batches 1 to 4 1 6 2 to 24" in rows
    assert "critic reward_model 0-1 reward_model 0 4-5" in rows
    assert (
        f"reward: 1 x {judge}; conversations of at most 40 of its own tokens, longer ones are refused" in rows
    )
    assert (
        f"reward: 1 x compute_score in {Path(ppo).parent / 'reward.py'}; 2 processes, 10 s per sample" in rows
    )


def test_the_disk_that_checkpoints_take_is_counted(
    ppo: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has 101 x 48 embeddings, an output layer or a value head, and four layers.

    Each parameter has 12 float32 bytes in addition to the bfloat16 weights. Trained models have the rows of
    the vocabulary up to a multiple of 128 x the tensor-parallel size, 2 of the actor and 1 of the critic.
    The exported policy is not padded.
    """
    monkeypatch.setenv("COLUMNS", "200")
    assert (
        main(["check", "--fast", "--all", ppo, "checkpoint.every_steps=3", "checkpoint.dir=/large/disk"]) == 0
    )
    out = capsys.readouterr().out
    rows = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    layer = 2 * 48 * 48 + 2 * 48 * 24 + (48 + 2 * 24) + 3 * 48 * 96 + 2 * 48
    exported, actor, critic = (
        rows_of_vocabulary * 48 + 4 * layer + 48 + output
        for rows_of_vocabulary, output in ((101, 101 * 48), (256, 256 * 48), (128, 48))
    )
    size = (14 * (actor + critic) + 2 * exported) / 2**20
    assert "checkpoints in /large/disk" in rows
    assert "saved every 3 steps and at the end checkpoint.every_steps" in rows
    assert f"size {size:.2f} MiB weights, master weights, moments, Hugging Face policy" in rows
    assert f"maximum on disk {3 * size:.2f} MiB 3 checkpoints" in rows
    assert "lower checkpoint.keep" not in out
    monkeypatch.setattr("megarl.cli.tables.run.free_bytes", lambda path: int(2.9 * size * 2**20))
    assert main(["check", "--fast", ppo, "checkpoint.every_steps=3"]) == 0
    assert "lower checkpoint.keep" in capsys.readouterr().out
    assert main(["check", "--fast", ppo, "checkpoint.every_steps=5"]) == 0  # two in ten steps
    assert "lower checkpoint.keep" not in capsys.readouterr().out


def test_what_saves_and_what_is_kept_is_said(
    ppo: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    held_out = Path(ppo).parent / "held_out.parquet"
    held_out.touch()
    best = [
        f"data.val_files=[{held_out}]",
        "trainer.validate_every_steps=2",
        "checkpoint.keep_best.metric=val/score/mean",
    ]
    assert main(["check", "--fast", "--all", ppo, *best, "checkpoint.every_minutes=30"]) == 0
    rows = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "saved every 30 min, after the best validation and at the end checkpoint.every_minutes" in rows
    assert any("the newest 2" in row and "val/score/mean checkpoint.keep" in row for row in rows)


def test_options_that_sglang_does_not_know_are_refused_with_all_else_that_is_wrong(ppo: str) -> None:
    overrides = [
        "rollout.engine=sglang",
        "rollout.sglang.server_args={mem_fraction_statik: 0.5, chunked_prefill_size: 64, tp_size: 2}",
        "trainer.updates_per_step=5",
    ]
    with pytest.raises(ConfigError) as caught:
        load_for_plan(PPOConfig, ppo, overrides)
    own = [problem for problem in caught.value.problems if "server_args.tp_size" in problem]
    assert own
    assert "rollout.tensor_parallel_size" in own[0]
    assert any("trainer.updates_per_step" in problem for problem in caught.value.problems)

    with pytest.raises(ConfigError) as caught:
        load_for_plan(
            PPOConfig,
            ppo,
            [
                "rollout.engine=sglang",
                "rollout.sglang.server_args={mem_fraction_statik: 0.5, chunked_prefill_size: 64}",
            ],
        )

    assert len(caught.value.problems) == 1
    assert "mem_fraction_statik is not an option" in caught.value.problems[0]
    assert "did you mean mem_fraction_static" in caught.value.problems[0]
    load_for_plan(
        PPOConfig, ppo, ["rollout.engine=sglang", "rollout.sglang.server_args={chunked_prefill_size: 64}"]
    )


def test_engines_on_the_devices_of_the_actor(
    ppo: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    overrides = [
        "placement.strategy=hybrid",
        "rollout.engine=sglang",
        "rollout.num_replicas=2",
        "rollout.tensor_parallel_size=2",
    ]
    assert main(["check", "--fast", "--all", ppo, *overrides]) == 0
    out = capsys.readouterr().out
    rows = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert "engine sglang rollout.engine" in rows
    assert "rollout.sglang: {mode: engine, server_args: {}}" in rows
    assert "replicas 2 x 2 devices devices shared with actor, reference" in rows
    assert "actor rollout 0-1 rollout 0 0-1; 2-3" in rows
    assert "OK (9 processes, 6 devices; planned for a CPU in bfloat16)" in out
    assert main(["check", "--plan", ppo, *overrides]) == 0
    rows = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "transport device resharding.transport=auto" in rows
    assert any(row.startswith("sent to other devices 0.") for row in rows)
    assert "rounds 1 at most 256.00 MiB per rank: resharding.bucket_mb=512, less on CPU" in rows


def test_a_file_says_its_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_yaml(tmp_path / "sft.yaml", values := sft_values(tmp_path))
    assert main(["check", "--fast", path, "kind=sft", "trainer.total_steps=7"]) == 0
    assert "7 steps x 8" in capsys.readouterr().out
    assert main(["check", "--fast", path, "trainer.total_steps=7"]) == 2
    assert "write `kind: sft` into the file, or kind=sft on the command line" in capsys.readouterr().err
    write_yaml(tmp_path / "sft.yaml", {"kind": "sft"} | values)
    assert main(["check", "--fast", path]) == 0
    assert main(["eval", path, "--rows", "rows.jsonl"]) == 2
    assert (
        "kind is 'sft', which this command does not support; give the configuration of a reinforcement "
        "learning run" in capsys.readouterr().err
    )
    assert main(["check", "--fast", path, "kind=rl"]) == 2
    assert "kind: is 'rl', but must be one of ppo, sft" in capsys.readouterr().err


BROKEN = [
    ("actor.optm.lr=1", "did you mean actor.optim?"),
    ("model.dtype=fp16", "must be one of auto, float32, bfloat16"),
    ("trainer.total_steps=many", "must be an integer"),
    ("model.path=nowhere", "there is no folder 'nowhere'"),
    ("trainer.updates_per_step=5", "cannot be divided into updates_per_step 5"),
    ("actor.parallel.tensor_parallel_size=4", "num_key_value_heads 2"),
    ("critic.parallel.pipeline_parallel_size=3", "num_hidden_layers 4"),
    ("data.max_response_length=100", "max_position_embeddings 64"),
    ("rollout.top_p=0.9", "truncated sampler"),
    ("reward.functions=[]", "reward.functions, reward.model.path: "),
    ("placement.devices_per_node=2", "the roles need 7"),
    ("rollout.num_replicas=0", "must be in [1, 10000]"),
    ("algorithm=nothing", "algorithm=nothing: there is no such preset"),
    ("trainer.seed", "write key.sub=value"),
    ("checkpoint.resume=''", "there is no folder ''; give auto, disable, or the path or URL of a checkpoint"),
    ("checkpoint.keep=-1", "must be at least 0"),
]


@pytest.mark.parametrize(("override", "said"), BROKEN)
def test_a_broken_configuration_is_one_clear_error(
    ppo: str, override: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (
        [override, "actor.micro_batch.max_tokens=128"] if "max_response_length" in override else [override]
    )
    assert main(["check", "--fast", ppo, *overrides]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert "1 problem" in err
    assert err.startswith("megarl check: ")
    assert "Traceback" not in err
    assert out == ""


def test_a_missing_value_names_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--fast", write_yaml(tmp_path / "run.yaml", {"data": {"train_files": ["x"]}})]) == 2
    assert "model.path: is required; set it in the file or as model.path=..." in capsys.readouterr().err


def test_a_way_for_the_weights_that_does_not_exist(ppo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--fast", ppo, "resharding.transport=device"]) == 2
    assert (
        "resharding.transport, placement.strategy: is device, but in the placement 'split_collocate'"
        in capsys.readouterr().err
    )


def test_weights_through_files_are_said_to_be(
    ppo: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert (
        main(["check", "--plan", ppo, "resharding.transport=folder", "trainer.output_dir=outputs/far"]) == 0
    )
    rows = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "transport folder resharding.transport=folder" in rows
    assert "medium files in trainer.output_dir, which all nodes must see" in rows
    layer = 2 * 48 * 48 + 2 * 48 * 24 + (48 + 2 * 24) + 3 * 48 * 96 + 2 * 48
    size = 2 * (2 * 101 * 48 + 4 * layer + 48) / 2**20
    assert f"written, and read by each engine {size:.2f} MiB model.dtype" in rows
    assert not any(row.startswith("rounds") for row in rows)


def test_schema_rules_and_placement_are_listed_together(ppo: str) -> None:
    with pytest.raises(ConfigError, match="3 problems"):
        load_for_plan(
            PPOConfig,
            ppo,
            ["rollout.temperature=0", "tracking.loggers=[swanlab]", "placement.devices_per_node=2"],
        )
    with pytest.raises(ConfigError, match="1 problem\n"):  # no placement can be counted with this
        load_for_plan(PPOConfig, ppo, ["placement.num_nodes=0"])


@pytest.mark.parametrize("override", ["trainer.updates_per_step=5", "actor.optm.lr=1", "model.path=nowhere"])
def test_the_command_ends_with_status_2_and_a_message(ppo: str, override: str) -> None:
    ended = as_command("check", "--fast", ppo, override)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert ended.stderr.startswith(f"megarl check: {ppo}: 1 problem")


WITHOUT_INPUTS = (
    ["--help"],
    ["train", "--help"],
    ["check", "--fast", "RUN"],
    # Arguments of the engine are checked by the names in its source.
    ["check", "--fast", "configs/qwen3_32b_grpo.yaml"],
    ["recipes"],
    ["config", "RUN", "--changed"],
    ["explain", "rollout.n", "RUN"],
)
WRONG = "actor.optm.lr=1"
WRONG_KEYS = (
    ["check", "RUN", WRONG],
    ["check", "--fast", "configs/qwen3_32b_grpo.yaml", WRONG],
    ["check", "RUN", "--plan", WRONG],
    ["check", "RUN", "--simulate", WRONG],
    ["check", "RUN", "--dry-run", WRONG],
    ["tune", "RUN", WRONG],
    ["tune", "RUN", WRONG, "--calibrate", "FOLDER/device.yaml"],
    ["config", "RUN", WRONG],
    ["explain", "rollout.n", "RUN", WRONG],
    ["train", "RUN", WRONG],
    ["train", "RUN", WRONG, "--submit", "http://127.0.0.1:1"],
    ["launch", "RUN", WRONG],
    ["eval", "FOLDER/model", "--config", "RUN", WRONG],
    ["eval", "FOLDER/model", "--data", "rows.jsonl", WRONG],
    ["eval", "RUN", "--rows", "rows.jsonl", WRONG],
    ["generate", "FOLDER/model", "1", "--agent", "FOLDER/wrong.yaml"],
    ["replay", "FOLDER", "1", WRONG],
    ["quickstart", WRONG],
)


def test_a_wrong_key_is_reported_before_torch_is_imported(ppo: str, tmp_path: Path) -> None:
    """One process runs all commands. It cannot import the libraries that take seconds."""
    program = """import json, os, sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "ray", "transformers", "numpy", "pyarrow", "megatron"):
            raise RuntimeError(f"{name} is imported")
sys.meta_path.insert(0, Refusing())
from megarl.cli.main import build_parser, commands_of, main
for words in json.loads(sys.argv[1]):
    print("$", *words, file=sys.stderr, flush=True)
    if words[0] == "launch":
        os.environ |= {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "1", "RANK": "0"}
    else:
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
    try:
        status = main(words)
    except SystemExit as ended:
        status = ended.code
    print(status, file=sys.stderr, flush=True)
"""
    text = Path(ppo).read_text()
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "plan.txt").touch()
    (tmp_path / "wrong.yaml").write_text(f"{text}\nwrong: 1\n")
    commands = [
        [word.replace("RUN", ppo).replace("FOLDER", str(tmp_path)) for word in words]
        for words in (*WITHOUT_INPUTS, *WRONG_KEYS)
    ]
    ended = subprocess.run(
        [sys.executable, "-c", program, json.dumps(commands)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    said = ended.stderr.split("$ ")[1:]
    good, wrong = said[: len(WITHOUT_INPUTS)], said[len(WITHOUT_INPUTS) :]
    assert [each for each in good if each.splitlines()[-1] != "0"] == []
    assert len(wrong) == len(WRONG_KEYS)
    assert [each for each in wrong if ": unknown key" not in each] == []
    # `launch` then meets the other nodes, which needs torch.
    assert {each.split()[0] for each in wrong if each.splitlines()[-1] != "2"} == {"launch"}


def test_every_command_with_a_configuration_is_run_with_a_wrong_key() -> None:
    """Except for `doctor`, whose report has the errors of the configuration among others, `init`, which takes
    the names of columns only, and `data`, whose arguments are those of an environment.
    """
    parsers = commands_of(build_parser())
    names = {name for name, each in parsers.items() if "key=value" in each.format_usage()}
    assert names | {"generate"} == {words[0] for words in WRONG_KEYS} | {"doctor", "init", "data"}


def test_check_is_quick(ppo: str) -> None:
    before = os.times()
    assert as_command("check", "--fast", ppo).returncode == 0
    after = os.times()

    # CPU time of the child, which a loaded machine does not change; the promise is 2 s.
    assert (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    ) < 2.0


def test_the_shipped_configurations_are_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files that the quickstart makes are stubs, so that only faults of the configurations remain."""
    stubs = ppo_values(tmp_path)
    monkeypatch.chdir(ROOT)
    data = [f"data.{kind}_files={stubs['data']['train_files']}" for kind in ("train", "val")]
    model = f"model.path={stubs['model']['path']}"
    reward = f"reward.functions=[{{path: {tmp_path}/reward.py}}]"
    algorithms = [file.stem for file in (ROOT / "configs" / "algorithm").glob("*.yaml")]
    assert {
        "ppo",
        "grpo",
        "dr_grpo",
        "dapo",
        "rloo",
        "reinforce_pp",
        "remax",
        "gspo",
        "cispo",
        "async_grpo",
        "async_dapo",
        "async_ppo",
    } <= set(algorithms)

    for algorithm in algorithms:
        assert (
            main(
                ["check", "--fast", "configs/quickstart.yaml", f"algorithm={algorithm}", model, reward, *data]
            )
            == 0
        ), algorithm

    assert main(["check", "--fast", "configs/quickstart.yaml", model, reward, *data]) == 0
    assert main(["check", "--fast", "configs/quickstart_sft.yaml", model, *data]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["device=cpu"], "warning: bfloat16 is many times slower than float32"),
        (
            ["actor.optim.warmup_steps=60"],
            "warning: the actor warms up for 60 optimizer steps, but the run has only 36",
        ),
    ],
)
def test_what_is_allowed_but_seldom_meant_is_said(
    ppo: str, overrides: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--fast", ppo, *overrides]) == 0
    assert said in capsys.readouterr().out
    assert main(["check", "--fast", ppo, "model.dtype=auto"]) == 0
    assert "warning: " not in capsys.readouterr().out


# A 7B model on eight GPUs, with 76 GiB of activations per GPU.
UNBUDGETED = """
algorithm: grpo
model: {path: models/Qwen2.5-7B-Instruct}
data: {train_files: [train.parquet], max_prompt_length: 512, max_response_length: 1024}
actor:
  parallel: {tensor_parallel_size: 2, data_parallel_size: 4}
rollout: {engine: sglang, n: 5, num_replicas: 4, tensor_parallel_size: 2}
reward: {functions: [{path: reward.py}]}
placement: {strategy: hybrid, devices_per_node: 8}
trainer: {total_steps: 109, prompts_per_step: 1024, updates_per_step: 4}
"""


def planned(folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, str, str]:
    """Return the exit status, the first line of the output, and everything that was printed."""
    (folder / "run.yaml").write_text(UNBUDGETED)
    status = main(["check", "--fast", str(folder / "run.yaml"), *overrides])
    printed = capsys.readouterr()
    return status, printed.out.partition("\n")[0], printed.out + printed.err


def test_a_layout_of_several_gpus_is_planned_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, said = planned(tmp_path, capsys)
    assert status == 2
    assert "needs 75.92 GiB" in said
    assert "has 71.6" in said
    assert "device: planned as cuda" in said
    assert "nine tenths of H100 80 GB SXM" in said
    assert "1 problem" in said

    status, verdict, said = planned(tmp_path, capsys, "actor.recompute=full")
    assert status == 0
    assert verdict.endswith("planned for CUDA in bfloat16, 38.3 of 71.6 GiB)")
    assert "warning: device: planned as cuda" in said


@pytest.mark.parametrize(
    ("overrides", "status", "verdict"),
    [
        (["placement.device_memory_gb=76"], 0, "planned for CUDA in bfloat16, 75.9 of 76 GiB)"),
        (["placement.device_profile=h200"], 0, "planned for CUDA in bfloat16, 75.9 of 126.4 GiB)"),
        (["placement.device_profile=a100_80gb"], 2, ""),
        (["placement.over_budget=warn"], 0, "planned for CUDA in bfloat16, 75.9 MORE THAN 71.6 GiB)"),
        (
            ["device=cpu", "rollout.engine=hf", "rollout.tensor_parallel_size=1"],
            0,
            "planned for a CPU in float32)",
        ),
        (["placement.num_nodes=2", "placement.devices_per_node=4"], 2, ""),
    ],
    ids=str,
)
def test_the_verdict_says_what_was_planned(
    overrides: list[str], status: int, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, line, _ = planned(tmp_path, capsys, *overrides)
    assert (found, line.endswith(verdict)) == (status, True), line


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("???", "device: is '???', which stands for a value that is still missing"),
        ("${nothing}", "device: Interpolation key 'nothing' not found"),
        ("${oc.env:NOTHING}", "device: Environment variable 'NOTHING' not found"),
        ("${trainer.seed}", "device: is 0, but must be one of auto, cpu, cuda"),
        ("gpu", "device: is 'gpu', but must be one of auto, cpu, cuda"),
    ],
)
def test_a_device_that_is_none_is_refused_also_for_a_layout_of_many_gpus(
    device: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_yaml(
        tmp_path / "run.yaml", {"base": str(ROOT / "configs/qwen3_32b_grpo.yaml"), "device": device}
    )
    assert main(["check", "--fast", file]) == 2
    error = capsys.readouterr().err
    assert f"1 problem\n  - {said}" in error
