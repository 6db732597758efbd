"""The commands of `megarl`, in the order of `megarl --help`."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.cli.options import (
    DRY_RUN,
    EVAL,
    GENERATE,
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
from megarl.cli.run.convert import add_commands
from megarl.config.json_schema import ANY_RUN
from megarl.config.json_schema import KINDS as SCHEMA_KINDS
from megarl.config.schema import Device
from megarl.tracking.run_files import STATUS_FILE

# The processes that `launch` starts end with its node, and a submitted job continues on its cluster.
COMMANDS: Mapping[str, Command] = {
    "train": Command(
        module="megarl.cli.run.train",
        summary="train with reinforcement learning, or as the configuration's `kind` specifies",
        arguments=(
            *RUN,
            VERBOSE,
        ),
        examples=("megarl train run.yaml", "megarl train run.yaml trainer.total_steps=10 algorithm=grpo"),
        owns_processes=True,
    ),
    "sft": Command(
        module="megarl.cli.run.supervised",
        summary="supervised fine-tuning",
        arguments=(
            *RUN,
            VERBOSE,
        ),
        examples=(
            "megarl sft sft.yaml",
            "megarl sft configs/quickstart_sft.yaml trainer.total_steps=10 actor.optim.lr=1e-4",
        ),
        owns_processes=True,
    ),
    "check": Command(
        module="megarl.cli.inspect.check",
        summary="report every error in a configuration, and print what the run would do",
        arguments=(
            *RUN,
            argument(
                "--fast",
                action="store_true",
                help="check within a second: no tokenizers, data, weights, reward functions or weight-sync "
                "plan",
            ),
            group(
                "parts: select one or several instead of the default check",
                argument("--plan", action="store_true", help="print the placement, as `megarl plan`"),
                argument(
                    "--simulate",
                    action="store_true",
                    help="estimate the step time, as `megarl plan --simulate`",
                ),
                argument(
                    "--machine",
                    action="store_true",
                    help="check this machine and the cluster, as `megarl doctor`",
                ),
                argument(
                    "--dry-run", action="store_true", help="dry run on fake devices, as `megarl rehearse`"
                ),
            ),
            group("with --plan or --simulate", *PLAN),
            group("with --dry-run", *DRY_RUN),
        ),
        examples=(
            "megarl check run.yaml",
            "megarl check --fast run.yaml trainer.updates_per_step=2",
            "megarl check run.yaml --machine --plan --output placement.svg",
        ),
        owns_processes=True,
    ),
    "plan": Command(
        module="megarl.cli.inspect.plan",
        summary="print or draw the placement of all roles and the memory of each device",
        arguments=(
            *RUN,
            argument(
                "--simulate",
                action="store_true",
                help="estimate step time and idle time for several values of max_staleness and splits of "
                "the devices",
            ),
            *PLAN,
        ),
        examples=(
            "megarl plan configs/qwen2.5_7b_grpo.yaml --output placement.svg",
            "megarl plan run.yaml --simulate --lengths 900,4096",
        ),
    ),
    "rehearse": Command(
        module="megarl.cli.inspect.rehearse",
        summary="dry run on fake devices: memory, collectives and synchronizations of each rank, without a "
        "GPU",
        arguments=(
            *RUN,
            *DRY_RUN,
        ),
        examples=(
            "megarl rehearse configs/qwen2.5_7b_grpo.yaml",
            "megarl rehearse configs/llama3_70b_ppo.yaml --role critic --ranks 0,8 --json ranks.json",
        ),
        owns_processes=True,
    ),
    "tune": Command(
        module="megarl.cli.inspect.tune",
        summary="choose placement, layouts and engines of a run for the shortest predicted step",
        arguments=(
            *RUN,
            *TUNE,
        ),
        examples=(
            "megarl tune configs/qwen3_32b_grpo.yaml --nodes 4 --device h100_80gb --output tuned.yaml",
            "megarl tune run.yaml algorithm=async_grpo --devices 8,16,32,64 --max-staleness 1 --plot "
            "sizes.svg",
        ),
    ),
    "calibrate": Command(
        module="megarl.cli.inspect.calibrate",
        summary="measure this machine's devices for a run's model, and write them to a device file",
        arguments=(
            argument(
                "config_path",
                metavar="CONFIG",
                nargs="?",
                help="the run whose shapes and dtype are measured; by default one that is included in megarl",
            ),
            overrides("as for `megarl train`"),
            argument("--output", metavar="FILE", required=True, help="the YAML file to write"),
            argument(
                "--device",
                metavar="NAME",
                help="the nearest device file: a shipped name or a path; by default that of the GPU, or cpu",
            ),
        ),
        examples=(
            "megarl calibrate --output my_device.yaml",
            "megarl calibrate run.yaml --output my_device.yaml --device h100_80gb",
        ),
        owns_processes=True,
    ),
    "submit": Command(
        module="megarl.cli.launch.submit",
        summary="run `megarl train` as a job of an existing Ray cluster, and follow it",
        arguments=(
            *RUN,
            argument(
                "--address",
                metavar="URL",
                help="address of the job server, http://HEAD:8265; the default is RAY_API_SERVER_ADDRESS",
            ),
        ),
        examples=("megarl submit run.yaml --address http://HEAD:8265",),
    ),
    "launch": Command(
        module="megarl.cli.launch.torchrun_node",
        summary="run `megarl train` on several nodes; torchrun starts this command on each of them",
        arguments=(*RUN,),
        examples=("torchrun --nnodes 2 --nproc-per-node 1 -m megarl launch run.yaml",),
    ),
    "doctor": Command(
        module="megarl.cli.inspect.doctor",
        summary="check this machine, the cluster and the inputs of a run; warnings and errors have a hint",
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
    "eval": Command(
        module="megarl.cli.run.eval",
        summary="sample from a model on a data file and score it: mean and pass@k with standard errors; "
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
        ),
        owns_processes=True,
    ),
    "generate": Command(
        module="megarl.cli.run.generate",
        summary="generate from prompts, or chat, with a model folder or a run's checkpoint",
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
    "status": Command(
        module="megarl.cli.inspect.status",
        summary="show the status of a run: step, prompts by state, replicas, tokens per second, idle time",
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
        module="megarl.cli.run.scale",
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
    "replay": Command(
        module="megarl.cli.run.replay",
        summary="repeat the updates of a recorded step, and find the first tensor that differs",
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
    "plot": Command(
        module="megarl.cli.inspect.plot",
        summary="draw a run's curves to a PNG file",
        arguments=(RUN_DIR,),
        examples=("megarl plot outputs/run",),
        abbreviates=True,
    ),
    "report": Command(
        module="megarl.cli.inspect.report",
        summary="write an HTML report of one or several runs: curves, samples, timeline, configuration, "
        "failures",
        arguments=(
            argument(
                "run_dirs",
                metavar="RUN_DIR",
                nargs="+",
                help="trainer.output_dir of each run; several are overlaid",
            ),
            argument("--output", metavar="FILE", help="the default is report.html in the first folder"),
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
        ),
        examples=("megarl report outputs/run", "megarl report outputs/run outputs/other --live"),
        abbreviates=True,
    ),
    "score": Command(
        module="megarl.cli.run.score",
        summary="run the reward functions of a configuration on a file of responses",
        arguments=(
            argument("config_path", metavar="CONFIG", help="a YAML file with reward.functions"),
            argument(
                "rows_path",
                metavar="ROWS",
                help=".parquet, .jsonl or .csv file with response, data_source and ground truth, such as a "
                "run's generations.jsonl",
            ),
            overrides("such as reward.time_limit_s=2"),
            argument(
                "--ground-truth",
                dest="of_ground_truth",
                action="store_true",
                help="score each row's ground truth instead of a response",
            ),
        ),
        examples=(
            "megarl score run.yaml outputs/run/generations.jsonl",
            "megarl score run.yaml train.jsonl --ground-truth",
        ),
        owns_processes=True,
    ),
    "quickstart": Command(
        module="megarl.recipes.quickstart.run",
        summary="create a tiny model and its data, and train it, in minutes on two cores",
        arguments=(overrides("overrides of configs/quickstart.yaml, such as trainer.total_steps=10"),),
        examples=("megarl quickstart", "megarl quickstart trainer.total_steps=10"),
        abbreviates=True,
        owns_processes=True,
    ),
    "init": Command(
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
            argument(
                "--model",
                metavar="DIR",
                help="the model to train: a Hugging Face folder, or a name on the hub",
            ),
            argument(
                "--data",
                metavar="FILE",
                help="questions and answers: .jsonl, .csv or .parquet; by default, sums are generated",
            ),
            argument(
                "--val",
                metavar="FILE",
                help="held-out questions and answers; by default, part of --data is held out",
            ),
            argument(
                "--kind", choices=("ppo", "sft"), help="ppo: reinforcement learning (the default); or sft"
            ),
            argument(
                "--algorithm",
                metavar="NAME",
                help="preset for reinforcement learning, such as grpo (the default) or ppo",
            ),
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
            "megarl init my_run --model MODEL_DIR --kind sft",
        ),
        abbreviates=True,
        owns_processes=True,
    ),
    "schema": Command(
        module="megarl.cli.inspect.schema",
        summary="print the JSON Schema of configuration files, for completion and checks in an editor",
        arguments=(
            argument(
                "kind",
                metavar="KIND",
                nargs="?",
                choices=SCHEMA_KINDS,
                default=ANY_RUN,
                help="run: any run, by its `kind` (the default); ppo, sft, dpo or reward_model: one kind; "
                "algorithm: a preset",
            ),
        ),
        examples=("megarl schema", "megarl schema algorithm"),
        abbreviates=True,
    ),
    "completion": Command(
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
    "convert": Command(
        module="megarl.cli.run.convert",
        summary="convert, inspect and compare models of Hugging Face and Megatron",
        extend=add_commands,
        examples=("megarl convert hf-to-megatron --help",),
        abbreviates=True,
    ),
}
