"""The commands and options of the command line. The module that runs a command is imported on demand."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from megarl import __version__
from megarl.cli.check_commands import add_calibrate, add_check, add_doctor, add_plan, add_rehearse
from megarl.cli.parser_parts import Commands, add_overrides, add_run_command, starts
from megarl.cli.run.convert import add_commands, positive
from megarl.cli.run.examples import epilog
from megarl.cli.sampling_commands import add_eval, add_generate
from megarl.cli.tune_commands import add_tune
from megarl.config.json_schema import ANY_RUN
from megarl.config.json_schema import KINDS as SCHEMA_KINDS
from megarl.config.schema import Device, RunKind
from megarl.tracking.run_files import STATUS_FILE

_INIT_KINDS = (RunKind.ppo.value, RunKind.sft.value)  # the kinds that `init` can write files for
_AS_WRITTEN = argparse.RawDescriptionHelpFormatter
_EXAMPLES = """examples:
  megarl quickstart                                        train a tiny model in minutes on two cores
  megarl init my_run --model MODEL_DIR --data rows.jsonl   create the files of your own run
  megarl check my_run/run.yaml                             report all configuration errors
  megarl train my_run/run.yaml                             train; the same command resumes
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    description = "Reinforcement learning of large language models on Megatron-Core and Ray."
    parser = argparse.ArgumentParser(
        prog="megarl", description=description, epilog=_EXAMPLES, formatter_class=_AS_WRITTEN
    )
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)

    summaries = {action.dest: action.help for action in commands._choices_actions}

    # Give all commands the same help format, with their examples.
    for name, command in commands.choices.items():
        command.description = command.description or summaries[name]
        command.formatter_class = _AS_WRITTEN
        command.epilog = epilog(name)

    return parser


# ---- runs


def _add_train(commands: Commands) -> None:
    summary = "train with reinforcement learning, or as the configuration's `kind` specifies"
    _add_verbose(add_run_command(commands, "train", summary, starts("run.train")))


def _add_sft(commands: Commands) -> None:
    _add_verbose(add_run_command(commands, "sft", "supervised fine-tuning", starts("run.sft")))


def _add_verbose(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--verbose",
        action="store_true",
        help="print all tables of `megarl check` before the run starts",
    )


def _add_submit(commands: Commands) -> None:
    summary = "run `megarl train` as a job of an existing Ray cluster, and follow it"
    submit = add_run_command(commands, "submit", summary, starts("submit", "megarl.launch"))
    submit.add_argument(
        "--address",
        metavar="URL",
        help="address of the job server, http://HEAD:8265; the default is RAY_API_SERVER_ADDRESS",
    )


def _add_launch(commands: Commands) -> None:
    summary = "run `megarl train` on several nodes; torchrun starts this command on each of them"
    add_run_command(commands, "launch", summary, starts("torchrun_node", "megarl.launch"))


# ---- inspecting runs


def _add_status(commands: Commands) -> None:
    summary = "show the status of a run: step, prompts by state, replicas, tokens per second, idle time"
    status = commands.add_parser(
        "status", help=summary, description=f"{summary}; reads only its {STATUS_FILE}"
    )
    status.add_argument("run_dir", metavar="RUN_DIR", help="the run's trainer.output_dir")
    status.add_argument("--watch", action="store_true", help="refresh until the run ends, or Ctrl-C")
    status.set_defaults(start=starts("inspect.status"))


def _add_replay(commands: Commands) -> None:
    summary = "repeat the updates of a recorded step, and find the first tensor that differs"
    replay = commands.add_parser(
        "replay", help=summary, description=f"{summary} in another layout or version", allow_abbrev=False
    )

    replay.add_argument("run_dir", metavar="RUN_DIR", help="the run's trainer.output_dir")
    replay.add_argument("step", metavar="STEP", type=positive, help="a step of tracking.record_batches")
    add_overrides(replay, "such as actor.parallel.tensor_parallel_size=2")

    replay.add_argument(
        "--against",
        metavar="DIR",
        help="compare with this trace, such as RUN_DIR/replays/step_00000003/original of another version",
    )
    replay.add_argument(
        "--tolerance", metavar="X", type=float, default=1e-5, help="relative tolerance; the default is 1e-5"
    )

    replay.add_argument(
        "--rows",
        dest="num_rows",
        metavar="N",
        type=positive,
        default=64,
        help="number of samples, about, whose hidden states are compared; the default is 64",
    )

    replay.set_defaults(start=starts("run.replay"))


def _add_scale(commands: Commands) -> None:
    summary = "change the number of rollout replicas of a running job"
    scale = commands.add_parser(
        "scale", help=summary, description=f"{summary}, which checks between two steps"
    )

    scale.add_argument("run_dir", metavar="RUN_DIR", help="the run's trainer.output_dir")
    scale.add_argument(
        "--replicas",
        dest="num_replicas",
        metavar="N",
        type=int,
        required=True,
        help="number of engines, each with a full copy of the model",
    )

    scale.set_defaults(start=starts("run.scale"))


def _add_plot(commands: Commands) -> None:
    plot = commands.add_parser("plot", help="draw a run's curves to a PNG file")
    plot.add_argument("run_dir", metavar="RUN_DIR", help="the run's trainer.output_dir")
    plot.set_defaults(start=starts("inspect.plot"))


def _add_report(commands: Commands) -> None:
    summary = (
        "write an HTML report of one or several runs: curves, samples, timeline, configuration, failures"
    )
    report = commands.add_parser("report", help=summary, description=summary)
    report.add_argument(
        "run_dirs", metavar="RUN_DIR", nargs="+", help="trainer.output_dir of each run; several are overlaid"
    )

    report.add_argument("--output", metavar="FILE", help="the default is report.html in the first folder")
    report.add_argument(
        "--live",
        dest="is_live",
        action="store_true",
        help="serve the report on this machine and follow the runs, until Ctrl-C",
    )
    report.add_argument(
        "--port", metavar="PORT", type=int, default=0, help="port of --live; the default is any free port"
    )

    report.set_defaults(start=starts("inspect.report"))


# ---- models and rewards


def _add_score(commands: Commands) -> None:
    summary = "run the reward functions of a configuration on a file of responses"
    score = commands.add_parser("score", help=summary, description=summary, allow_abbrev=False)

    score.add_argument("config_path", metavar="CONFIG", help="a YAML file with reward.functions")
    score.add_argument(
        "rows_path",
        metavar="ROWS",
        help=".parquet, .jsonl or .csv file with response, data_source and ground truth, such as a run's "
        "generations.jsonl",
    )

    add_overrides(score, "such as reward.time_limit_s=2")
    score.add_argument(
        "--ground-truth",
        dest="of_ground_truth",
        action="store_true",
        help="score each row's ground truth instead of a response",
    )
    score.set_defaults(start=starts("run.score"))


def _add_quickstart(commands: Commands) -> None:
    summary = "create a tiny model and its data, and train it, in minutes on two cores"
    quickstart = commands.add_parser("quickstart", help=summary, description=summary)
    add_overrides(quickstart, "overrides of configs/quickstart.yaml, such as trainer.total_steps=10")
    quickstart.set_defaults(start=starts("run", "megarl.recipes.quickstart"))


def _add_completion(commands: Commands) -> None:
    summary = "print the shell code for completion of commands, files and keys"
    completion = commands.add_parser("completion", help=summary, description=summary)
    completion.add_argument(
        "shell", choices=("bash", "zsh", "fish"), help='usage: eval "$(megarl completion bash)"'
    )
    completion.set_defaults(start=starts("inspect.completion"))


def _add_convert(commands: Commands) -> None:
    summary = "convert, inspect and compare models of Hugging Face and Megatron"
    add_commands(commands.add_parser("convert", help=summary, description=summary))


def _add_init(commands: Commands) -> None:
    summary = "create the files of your own run: configuration, reward, data script"
    init = commands.add_parser(
        "init", help=summary, description=f"{summary}; on a terminal, it asks for missing options"
    )

    init.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        default=".",
        help="output folder; the default is the current folder",
    )

    init.add_argument(
        "--model", metavar="DIR", help="the model to train: a Hugging Face folder, or a name on the hub"
    )
    init.add_argument(
        "--data",
        metavar="FILE",
        help="questions and answers: .jsonl, .csv or .parquet; by default, sums are generated",
    )
    init.add_argument(
        "--val",
        metavar="FILE",
        help="held-out questions and answers; by default, part of --data is held out",
    )

    init.add_argument(
        "--kind",
        choices=_INIT_KINDS,
        help="ppo: reinforcement learning (the default); or sft",
    )
    init.add_argument(
        "--algorithm",
        metavar="NAME",
        help="preset for reinforcement learning, such as grpo (the default) or ppo",
    )

    init.add_argument(
        "--device",
        choices=[device.value for device in Device],
        help="auto (the default): GPUs if available",
    )
    init.add_argument(
        "--devices",
        metavar="N",
        type=positive,
        help="number of GPUs, or of processes on CPU; the default is 1",
    )

    init.set_defaults(start=_start_init)


def _add_schema(commands: Commands) -> None:
    summary = "print the JSON Schema of configuration files, for completion and checks in an editor"
    schema = commands.add_parser("schema", help=summary, description=summary)
    kinds = "run: any run, by its `kind` (the default); ppo, sft, dpo or reward_model: one kind; "
    kinds += "algorithm: a preset"
    schema.add_argument("kind", metavar="KIND", nargs="?", choices=SCHEMA_KINDS, default=ANY_RUN, help=kinds)
    schema.set_defaults(start=starts("inspect.schema"))


def _start_init(parsed: argparse.Namespace) -> int:
    module = importlib.import_module("megarl.cli.run.init")
    asks = sys.stdin.isatty()

    # Ask for missing options on a terminal; otherwise use the defaults.
    def wish(name: str, question: str, default: str | None, choices: tuple[str, ...] = ()) -> str:
        given = getattr(parsed, name)
        if given is None and asks:
            return str(module.ask(question, default, choices))
        if given is None and default is None:
            raise ValueError(f"--{name} is required: {question}")
        return str(default if given is None else given)

    model = wish("model", "the model to train, a Hugging Face folder or a name on the hub", None)
    data = wish("data", "a file of questions and answers (empty: sums are generated)", "")
    kind = RunKind(wish("kind", "kind of run", RunKind.ppo.value, _INIT_KINDS))
    wishes = module.Wishes(
        folder=Path(parsed.folder),
        model=model,
        data=data or None,
        validation=parsed.val,
        kind=kind,
        algorithm=wish("algorithm", "algorithm", "grpo") if kind is RunKind.ppo else "",
        device=Device(wish("device", "device type", Device.auto.value, tuple(each.value for each in Device))),
        num_devices=positive(wish("devices", "number of devices", "1")),
    )

    return int(module.run(wishes))


# The commands in the order of `megarl --help`.
_COMMANDS = (
    _add_train,
    _add_sft,
    add_check,
    add_plan,
    add_rehearse,
    add_tune,
    add_calibrate,
    _add_submit,
    _add_launch,
    add_doctor,
    add_eval,
    add_generate,
    _add_status,
    _add_scale,
    _add_replay,
    _add_plot,
    _add_report,
    _add_score,
    _add_quickstart,
    _add_init,
    _add_schema,
    _add_completion,
    _add_convert,
)
