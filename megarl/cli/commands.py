"""The commands of `megarl`, in the order of `megarl --help`."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.cli.convert_options import CONVERT
from megarl.cli.options import (
    DRY_RUN,
    EVAL,
    GENERATE,
    MAYBE_RUN,
    MODEL,
    PLAN,
    RUN,
    RUN_DIR,
    TUNE,
    VERBOSE,
    Command,
    argument,
    group,
    overrides,
    positive,
)
from megarl.config.json_schema import ANY_RUN
from megarl.config.json_schema import KINDS as SCHEMA_KINDS
from megarl.config.kinds import Hub
from megarl.config.migration import FRAMEWORKS
from megarl.config.schema import Device
from megarl.tracking.run_files import STATUS_FILE

START = "Start"
BEFORE = "Before a run"
RUNNING = "Run"
AFTER = "After a run"
SETUP = "Setup"
GROUPS = (START, BEFORE, RUNNING, AFTER, SETUP)
# The commands that a newcomer needs, in the order of their use.
FIRST = ("init", "check", "train", "eval", "generate", "report")

# The processes that `launch` starts end with its node, and a submitted job continues on its cluster.
COMMANDS: Mapping[str, Command] = {
    "quickstart": Command(
        group=START,
        module="megarl.recipes.quickstart.run",
        summary="create a tiny model and its data, and train it, in minutes on two cores",
        arguments=(overrides("overrides of configs/quickstart.yaml, such as trainer.total_steps=10"),),
        examples=("megarl quickstart", "megarl quickstart trainer.total_steps=10"),
        abbreviates=True,
        owns_processes=True,
    ),
    "init": Command(
        group=START,
        module="megarl.cli.run.init",
        summary="create the files of your own run: configuration, reward, data script",
        description="create the files of your own run: configuration, reward, data script; on a terminal, "
        "it asks for missing options",
        arguments=(
            argument(
                "folder",
                metavar="FOLDER",
                nargs="?",
                default=".",
                help="output folder; the default is the current folder",
            ),
            overrides("columns of --data with names of your own, such as data.columns.prompt=ticket"),
            argument(
                "--model",
                metavar="DIR",
                help="the model to train: a Hugging Face folder, or a name on the hub",
            ),
            argument(
                "--data",
                metavar="FILE",
                help="questions and answers, chats, or pairs of answers: .jsonl, .csv or .parquet; by "
                "default, sums are generated",
            ),
            argument(
                "--val",
                metavar="FILE",
                help="held-out rows; by default, part of --data is held out",
            ),
            argument(
                "--kind",
                choices=("ppo", "sft", "dpo", "reward_model", "distillation", "agent", "judge"),
                help="ppo: reinforcement learning (the default); sft: supervised fine-tuning; dpo and "
                "reward_model: training on pairs of answers; distillation, agent and judge: a ppo run with a "
                "teacher, with tools, or with the scores of a language model",
            ),
            argument(
                "--algorithm",
                metavar="NAME",
                help="preset for reinforcement learning, such as grpo (the default) or ppo",
            ),
            argument(
                "--teacher",
                metavar="DIR",
                help="distillation: the teacher, a Hugging Face folder or a name on the hub",
            ),
            argument(
                "--judge-url",
                metavar="URL",
                help="judge: base URL of a server with OpenAI's chat completions API",
            ),
            argument("--judge-model", metavar="NAME", help="judge: the name of the model on that server"),
            argument(
                "--device",
                choices=[device.value for device in Device],
                help="auto (the default): GPUs if available",
            ),
            argument(
                "--devices",
                metavar="N",
                type=positive,
                help="number of GPUs, or of processes on CPU; the default is 1",
            ),
        ),
        examples=(
            "megarl init my_run --model MODEL_DIR --data rows.jsonl",
            "megarl init my_run --model MODEL_DIR --data rows.csv data.columns.prompt=ticket "
            "data.columns.ground_truth=category",
            "megarl init my_run --model MODEL_DIR --kind sft",
            "megarl init my_run --model MODEL_DIR --kind dpo --data pairs.jsonl",
            "megarl init my_run --model MODEL_DIR --kind distillation --teacher TEACHER_DIR",
        ),
        abbreviates=True,
        owns_processes=True,
    ),
    "data": Command(
        group=START,
        module="megarl.cli.run.hub_data",
        summary="write rows of an environment of a hub, such as reasoning_gym/basic_arithmetic",
        arguments=(
            argument("environment", metavar="HUB/NAME", help=f"one of {', '.join(Hub)}, and a name there"),
            argument(
                "arguments",
                metavar="key=value",
                nargs="*",
                default=[],
                help="as in agent.environment.arguments, such as min_terms=2",
            ),
            argument("--size", metavar="N", type=positive, default=1000, help="rows; the default is 1,000"),
            argument("--seed", metavar="N", type=int, default=0, help="of the rows; the default is 0"),
            argument("--output", metavar="FILE", required=True, help="the file to write: .jsonl"),
            argument(
                "--python",
                metavar="PROGRAM",
                help="the Python that has the hub's package; by default, that of megarl",
            ),
        ),
        examples=(
            "megarl data reasoning_gym/basic_arithmetic min_terms=2 max_terms=2 --size 5000 --output "
            "train.jsonl",
            "megarl data verifiers/my_taskset --python hubs/verifiers/bin/python --output train.jsonl",
        ),
        owns_processes=True,
    ),
    "recipes": Command(
        group=START,
        module="megarl.cli.inspect.recipes",
        summary="list, print or copy the configurations that are included in megarl",
        arguments=(
            argument(
                "action",
                metavar="show|copy",
                nargs="?",
                choices=("show", "copy"),
                help="print a file, or copy it; without it, all files are listed",
            ),
            argument("name", metavar="NAME", nargs="?", help="a name of the list, such as qwen3_32b_grpo"),
            argument(
                "file",
                metavar="FILE",
                nargs="?",
                help="the copy, which must not exist; by default NAME.yaml in the current folder",
            ),
        ),
        examples=(
            "megarl recipes",
            "megarl recipes show algorithm/grpo",
            "megarl recipes copy qwen2.5_7b_grpo my_run.yaml",
        ),
    ),
    "migrate": Command(
        group=START,
        module="megarl.cli.run.migrate",
        summary="convert a run of verl, slime, TRL or NeMo RL to a configuration",
        description="convert a command script or a configuration of verl, slime, TRL or NeMo RL to a "
        "configuration, whose comments say where each key comes from. Nothing of a script is executed",
        arguments=(
            argument(
                "source",
                metavar="SOURCE",
                help="a shell script, a Python file that configures a trainer of TRL, or a YAML file",
            ),
            argument("--output", metavar="FILE", help="a new file; by default, the text is printed"),
            argument(
                "--from",
                dest="framework",
                choices=tuple(FRAMEWORKS),
                help="the framework, if its settings alone do not tell",
            ),
        ),
        examples=(
            "megarl migrate run_qwen2-7b_math_megatron.sh --output run.yaml",
            "megarl migrate grpo.yaml --from trl",
        ),
    ),
    "check": Command(
        group=BEFORE,
        module="megarl.cli.inspect.check",
        parts={
            "plan": "megarl.cli.inspect.check:show_plan",
            "simulate": "megarl.cli.inspect.simulate",
            "machine": "megarl.cli.inspect.doctor",
            "dry_run": "megarl.cli.inspect.rehearse",
        },
        summary="report every error in a configuration, and print what the run would do",
        arguments=(
            *RUN,
            argument(
                "--fast",
                action="store_true",
                help="check within a second: no tokenizers, data, weights, reward functions or weight-sync "
                "plan",
            ),
            argument(
                "--all",
                dest="shows_all",
                action="store_true",
                help="print all tables instead of the summary: models, arithmetic, placement, memory, weight "
                "sync, checkpoints",
            ),
            group(
                "parts: select one or several instead of the default check",
                argument(
                    "--plan",
                    action="store_true",
                    help="print the placement of all roles, the memory of each device and the predicted step",
                ),
                argument(
                    "--simulate",
                    action="store_true",
                    help="estimate step time and idle time for several values of max_staleness and splits of "
                    "the devices",
                ),
                argument(
                    "--machine",
                    action="store_true",
                    help="check this machine, the cluster and the inputs of the run, as `megarl doctor`",
                ),
                argument(
                    "--dry-run",
                    action="store_true",
                    help="run one role on fake devices, without a GPU: memory, collectives and "
                    "synchronizations of each rank",
                ),
            ),
            group("with --plan or --simulate", *PLAN),
            group("with --dry-run", *DRY_RUN),
        ),
        examples=(
            "megarl check run.yaml",
            "megarl check --fast run.yaml trainer.updates_per_step=2",
            "megarl check run.yaml --machine --plan --output placement.svg",
            "megarl check run.yaml --simulate --lengths 900,4096 --training-s 60 --tokens-per-s 40",
            "megarl check configs/llama3_70b_ppo.yaml --dry-run --role critic --ranks 0,8",
        ),
        owns_processes=True,
        owns_none_with=("fast",),
    ),
    "tune": Command(
        group=BEFORE,
        module="megarl.cli.inspect.tune",
        parts={"device_file": "megarl.cli.inspect.calibrate"},
        summary="choose placement, layouts and engines for the shortest predicted step",
        description="choose placement, layouts and engines of a run for the shortest predicted step, or "
        "measure this machine for such predictions",
        arguments=(
            *MAYBE_RUN,
            *TUNE,
        ),
        examples=(
            "megarl tune configs/qwen3_32b_grpo.yaml --nodes 4 --device h100_80gb --output tuned.yaml",
            "megarl tune run.yaml algorithm=async_grpo --devices 8,16,32,64 --max-staleness 1 --plot "
            "sizes.svg",
            "megarl tune run.yaml --calibrate my_device.yaml",
        ),
        owns_processes=True,
    ),
    "doctor": Command(
        group=BEFORE,
        module="megarl.cli.inspect.doctor",
        summary="check this machine, the cluster and the inputs of a run, with hints",
        arguments=(
            argument(
                "config_path",
                metavar="CONFIG",
                nargs="?",
                help="the run to check; by default only the machine is checked",
            ),
            overrides("as for `megarl train`"),
            argument("--json", dest="as_document", action="store_true", help="print one JSON document"),
        ),
        examples=("megarl doctor", "megarl doctor run.yaml --json"),
        owns_processes=True,
    ),
    "config": Command(
        group=BEFORE,
        module="megarl.cli.inspect.config",
        parts={"kind": "megarl.cli.inspect.config:schema"},
        summary="print a configuration with its base, presets and overrides merged",
        description="print a configuration as YAML, with its base, presets and overrides merged, or the JSON "
        "Schema of configuration files",
        arguments=(
            *MAYBE_RUN,
            argument(
                "--changed", action="store_true", help="print only the keys that differ from their defaults"
            ),
            argument(
                "--schema",
                dest="kind",
                metavar="KIND",
                nargs="?",
                choices=SCHEMA_KINDS,
                const=ANY_RUN,
                help="instead, print the JSON Schema, for completion and checks in an editor. run: any run, "
                "by its `kind` (the default); ppo, sft, dpo or reward_model: one kind; algorithm: a preset",
            ),
        ),
        examples=(
            "megarl config run.yaml trainer.total_steps=10",
            "megarl config run.yaml --changed",
            "megarl config --schema",
        ),
    ),
    "explain": Command(
        group=BEFORE,
        module="megarl.cli.inspect.config:explain",
        summary="describe a configuration key: type, range, default, and where it is set",
        arguments=(
            argument("key", metavar="KEY", help="a key or a section, such as rollout.n or actor.optim"),
            argument(
                "config_path",
                metavar="CONFIG",
                nargs="?",
                help="a run whose value of the key is shown, with the file that sets it",
            ),
            overrides("as for `megarl train`"),
        ),
        examples=(
            "megarl explain actor.optim.min_lr",
            "megarl explain rollout.n run.yaml algorithm=grpo",
        ),
    ),
    "train": Command(
        group=RUNNING,
        module="megarl.cli.run.train",
        parts={"address": "megarl.cli.launch.submit"},
        first="megarl.cli.run.first:train",
        summary="train as the configuration's `kind` specifies; the same command resumes",
        description="train with reinforcement learning, or as the configuration's `kind` specifies",
        arguments=(
            *RUN,
            VERBOSE,
            argument(
                "--submit",
                dest="address",
                metavar="URL",
                help="train as a job of an existing Ray cluster, and follow it. The URL is that of its job "
                "server, http://HEAD:8265; `auto` is that of RAY_API_SERVER_ADDRESS",
            ),
        ),
        examples=(
            "megarl train run.yaml",
            "megarl train run.yaml trainer.total_steps=10 algorithm=grpo",
            "megarl train run.yaml --submit http://HEAD:8265",
        ),
        owns_processes=True,
        owns_none_with=("address",),
    ),
    "launch": Command(
        group=RUNNING,
        module="megarl.cli.launch.torchrun_node",
        summary="train on several nodes; torchrun starts this command on each of them",
        arguments=(*RUN,),
        examples=("torchrun --nnodes 2 --nproc-per-node 1 -m megarl launch run.yaml",),
    ),
    "status": Command(
        group=RUNNING,
        module="megarl.cli.inspect.status",
        summary="show the step, prompts, replicas, speed and idle time of a run",
        description="show the status of a run: step, prompts by state, replicas, tokens per second, idle "
        f"time; reads only its {STATUS_FILE}",
        arguments=(
            RUN_DIR,
            argument("--watch", action="store_true", help="refresh until the run ends, or Ctrl-C"),
        ),
        examples=("megarl status outputs/run", "megarl status outputs/run --watch"),
        abbreviates=True,
    ),
    "scale": Command(
        group=RUNNING,
        module="megarl.cli.inspect.status:scale",
        summary="change the number of rollout replicas of a running job",
        description="change the number of rollout replicas of a running job, which checks between two steps",
        arguments=(
            RUN_DIR,
            argument(
                "--replicas",
                dest="num_replicas",
                metavar="N",
                type=int,
                required=True,
                help="number of engines, each with a full copy of the model",
            ),
        ),
        examples=("megarl scale outputs/run --replicas 4",),
        abbreviates=True,
    ),
    "stop": Command(
        group=RUNNING,
        module="megarl.cli.inspect.status:stop",
        summary="ask a run to save a checkpoint and end after its step",
        description="ask a run to save a checkpoint and end after its step, by SIGTERM to its process; a "
        "second time, it ends immediately",
        arguments=(RUN_DIR,),
        examples=("megarl stop outputs/run",),
    ),
    "report": Command(
        group=AFTER,
        module="megarl.cli.inspect.report",
        parts={"png": "megarl.cli.inspect.plot"},
        summary="write an HTML report of one or several runs",
        description="write an HTML report of one or several runs: curves, samples, timeline, configuration, "
        "failures",
        arguments=(
            argument(
                "run_dirs",
                metavar="RUN_DIR",
                nargs="+",
                help="trainer.output_dir of each run; several are overlaid",
            ),
            argument(
                "--output",
                metavar="FILE",
                help="the default is report.html in the run's folder, or in the current one for several runs",
            ),
            argument(
                "--live",
                dest="is_live",
                action="store_true",
                help="serve the report on this machine and follow the runs, until Ctrl-C",
            ),
            argument(
                "--port",
                metavar="PORT",
                type=int,
                default=0,
                help="port of --live; the default is any free port",
            ),
            argument(
                "--png",
                action="store_true",
                help="instead, draw the curves of each run to curves.png in its folder",
            ),
        ),
        examples=(
            "megarl report outputs/run",
            "megarl report outputs/run outputs/other --live",
            "megarl report outputs/run --png",
        ),
        abbreviates=True,
    ),
    "eval": Command(
        group=AFTER,
        module="megarl.cli.run.eval",
        parts={"rows_path": "megarl.cli.run.score"},
        first="megarl.cli.run.first:evaluate",
        summary="sample from a model on a data file and score it: mean and pass@k",
        description="sample from a model on a data file and score it: mean and pass@k with standard errors; "
        "saves every sample",
        arguments=(
            *MODEL,
            overrides("such as rollout.engine=sglang or data.columns.prompt=question"),
            *EVAL,
        ),
        examples=(
            "megarl eval outputs/run",
            "megarl eval MODEL_DIR --data test.jsonl --reward reward.py:compute_score --n 8 --temperature "
            "0.6",
            "megarl eval MODEL_DIR --data qa.csv --reward reward.py:compute_score "
            "data.columns.prompt=question data.columns.ground_truth=answer data.columns.data_source=null",
            "megarl eval run.yaml --rows outputs/run/generations.jsonl",
            "megarl eval run.yaml --rows train.jsonl --ground-truth",
        ),
        owns_processes=True,
    ),
    "generate": Command(
        group=AFTER,
        module="megarl.cli.run.generate",
        first="megarl.cli.run.first:generate",
        summary="generate from prompts, or chat, with a model folder or a checkpoint",
        arguments=(
            *MODEL,
            *GENERATE,
        ),
        examples=(
            'megarl generate outputs/run "12 + 30"',
            "megarl generate MODEL_DIR --lines --json --n 4 --temperature 1",
        ),
        owns_processes=True,
    ),
    "replay": Command(
        group=AFTER,
        module="megarl.cli.run.replay",
        first="megarl.cli.run.first:replay",
        summary="repeat a recorded step, and find the first tensor that differs",
        description="repeat the updates of a recorded step, and find the first tensor that differs in "
        "another layout or version",
        arguments=(
            RUN_DIR,
            argument("step", metavar="STEP", type=positive, help="a step of tracking.record_batches"),
            overrides("such as actor.parallel.tensor_parallel_size=2"),
            argument(
                "--against",
                metavar="DIR",
                help="compare with this trace, such as RUN_DIR/replays/step_00000003/original of another "
                "version",
            ),
            argument(
                "--tolerance",
                metavar="X",
                type=float,
                default=1e-05,
                help="relative tolerance; the default is 1e-5",
            ),
            argument(
                "--rows",
                dest="num_rows",
                metavar="N",
                type=positive,
                default=64,
                help="number of samples, about, whose hidden states are compared; the default is 64",
            ),
        ),
        examples=(
            "megarl replay outputs/run 3 actor.parallel.tensor_parallel_size=2",
            "megarl replay outputs/run 3 --against other/replays/step_00000003/original",
        ),
        owns_processes=True,
    ),
    "convert": Command(
        group=AFTER,
        module="megarl.cli.run.convert",
        parts={"inspect": "megarl.cli.run.convert:inspect", "verify": "megarl.cli.run.convert:verify"},
        summary="convert, inspect and compare models of Hugging Face and Megatron",
        description="convert a model between Hugging Face and Megatron, in the direction that follows from "
        "SOURCE; merge an adapter; or inspect and compare models",
        arguments=CONVERT,
        examples=(
            "megarl convert HF_DIR CHECKPOINT_DIR --tensor-parallel-size 2",
            "megarl convert outputs/run/checkpoints HF_DIR --dtype fp8",
            "megarl convert ADAPTER_DIR MERGED_DIR --base HF_DIR",
            "megarl convert outputs/run/checkpoints --inspect",
            "megarl convert A B --verify",
        ),
        abbreviates=True,
    ),
    "completion": Command(
        group=SETUP,
        module="megarl.cli.inspect.completion",
        summary="print the shell code for completion of commands, files and keys",
        arguments=(
            argument(
                "shell", choices=("bash", "zsh", "fish"), help='usage: eval "$(megarl completion bash)"'
            ),
        ),
        examples=('eval "$(megarl completion bash)"',),
        abbreviates=True,
    ),
}
