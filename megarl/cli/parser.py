"""The command line's commands and options. Each command names the module that runs it, which is imported when
it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from megarl import __version__
from megarl.cli.check_commands import add_check, add_doctor, add_plan, add_rehearse
from megarl.cli.parser_parts import Commands, add_run_command, run_of
from megarl.cli.run.convert import add_commands, positive
from megarl.cli.run.examples import epilog
from megarl.cli.sampling_commands import add_eval, add_generate
from megarl.config.json_schema import ANY_RUN
from megarl.config.json_schema import KINDS as SCHEMA_KINDS
from megarl.config.schema import Device, RunKind
from megarl.tracking.run_files import STATUS_FILE

_AS_WRITTEN = argparse.RawDescriptionHelpFormatter
_EXAMPLES = """examples:
  megarl quickstart                                        a tiny model learns sums, in minutes on two cores
  megarl init my_run --model MODEL_DIR --data rows.jsonl   what a run of your own begins with
  megarl check my_run/run.yaml                             every error at once
  megarl train my_run/run.yaml                             and again, to continue after a crash
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

    # Give all commands the same form of help, with their examples.
    for name, command in commands.choices.items():
        command.description = command.description or summaries[name]
        command.formatter_class = _AS_WRITTEN
        command.epilog = epilog(name)

    return parser


# ---- runs


def _add_train(commands: Commands) -> None:
    summary = "train: by reinforcement learning, or as the file's `kind` says"
    train = add_run_command(
        commands,
        "train",
        summary,
        lambda parsed: run_of("run.train")(parsed.config, parsed.overrides, parsed.verbose),
    )
    _add_verbose(train)


def _add_sft(commands: Commands) -> None:
    summary = "fine-tune on demonstrations"
    sft = add_run_command(
        commands,
        "sft",
        summary,
        lambda parsed: run_of("run.sft")(parsed.config, parsed.overrides, parsed.verbose),
    )
    _add_verbose(sft)


def _add_verbose(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--verbose",
        action="store_true",
        help="print all that is known before the run starts, as `megarl check` does",
    )


def _add_submit(commands: Commands) -> None:
    summary = "run `megarl train` as a job of an existing Ray cluster, and follow it"
    submit = add_run_command(
        commands,
        "submit",
        summary,
        lambda parsed: run_of("submit", "megarl.launch")(parsed.config, parsed.overrides, parsed.address),
    )
    submit.add_argument(
        "--address",
        metavar="URL",
        help="of the job server, http://HEAD:8265; the default is RAY_API_SERVER_ADDRESS",
    )


def _add_launch(commands: Commands) -> None:
    summary = (
        "run `megarl train` on the nodes of a torchrun, as the command that torchrun starts on each node"
    )
    add_run_command(
        commands,
        "launch",
        summary,
        lambda parsed: run_of("torchrun_node", "megarl.launch")(parsed.config, parsed.overrides),
    )


# ---- looking at runs


def _add_status(commands: Commands) -> None:
    summary = "where a run is right now: step, prompts by state, replicas, tokens a second, who waits"
    status = commands.add_parser(
        "status", help=summary, description=f"{summary}; reads its {STATUS_FILE} only"
    )
    status.add_argument("run_dir", metavar="RUN_DIR", help="the run's trainer.output_dir")
    status.add_argument("--watch", action="store_true", help="again and again, until the run ends or Ctrl-C")
    status.set_defaults(start=lambda parsed: run_of("inspect.status")(parsed.run_dir, parsed.watch))


def _add_scale(commands: Commands) -> None:
    summary = "change the number of rollout replicas of a running job"
    scale = commands.add_parser("scale", help=summary, description=f"{summary}; it looks between two steps")
    scale.add_argument("run_dir", metavar="RUN_DIR", help="the run's trainer.output_dir")
    scale.add_argument(
        "--replicas",
        metavar="N",
        type=int,
        required=True,
        help="engines, each with a whole copy of the model",
    )
    scale.set_defaults(start=lambda parsed: run_of("run.scale")(parsed.run_dir, parsed.replicas))


def _add_plot(commands: Commands) -> None:
    plot = commands.add_parser("plot", help="draw a run's curves to a PNG")
    plot.add_argument("run_dir", metavar="RUN_DIR", help="the run's trainer.output_dir")
    plot.set_defaults(start=lambda parsed: run_of("inspect.plot")(parsed.run_dir))


def _add_report(commands: Commands) -> None:
    summary = "write a page of one or several runs: curves, samples, timeline, configuration, failures"
    report = commands.add_parser("report", help=summary, description=summary)
    report.add_argument(
        "run_dirs", metavar="RUN_DIR", nargs="+", help="runs' trainer.output_dir; several are overlaid"
    )
    report.add_argument("--output", metavar="FILE", help="without it, report.html in the first folder")
    report.add_argument(
        "--live", action="store_true", help="serve it on this machine and follow the runs, until Ctrl-C"
    )
    report.add_argument(
        "--port", metavar="PORT", type=int, default=0, help="for --live; without it, any that is free"
    )
    report.set_defaults(
        start=lambda parsed: run_of("inspect.report")(
            parsed.run_dirs, parsed.output, parsed.live, parsed.port
        )
    )


# ---- models and rewards


def _add_score(commands: Commands) -> None:
    summary = "run the reward functions of a configuration on a file of responses"
    score = commands.add_parser("score", help=summary, description=summary, allow_abbrev=False)
    score.add_argument("config", metavar="CONFIG", help="a YAML file with reward.functions")
    score.add_argument(
        "rows",
        metavar="ROWS",
        help=".parquet, .jsonl or .csv with response, data_source and ground truth, as a run's "
        "generations.jsonl",
    )
    score.add_argument("overrides", metavar="key=value", nargs="*", help="such as reward.time_limit_s=2")
    score.add_argument(
        "--ground-truth", action="store_true", help="score each row's ground truth instead of a response"
    )
    score.set_defaults(
        start=lambda parsed: run_of("run.score")(
            parsed.config, parsed.overrides, parsed.rows, parsed.ground_truth
        )
    )


def _add_quickstart(commands: Commands) -> None:
    summary = "create a tiny model and its data, and train it: minutes on two cores"
    quickstart = commands.add_parser("quickstart", help=summary, description=summary)
    quickstart.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="of configs/quickstart.yaml, such as trainer.total_steps=10",
    )
    quickstart.set_defaults(start=lambda parsed: run_of("run", "megarl.recipes.quickstart")(parsed.overrides))


def _add_completion(commands: Commands) -> None:
    summary = "print what makes a shell complete commands, files and keys"
    completion = commands.add_parser("completion", help=summary, description=summary)
    completion.add_argument(
        "shell", choices=("bash", "zsh", "fish"), help='as in: eval "$(megarl completion bash)"'
    )
    completion.set_defaults(start=lambda parsed: run_of("inspect.completion")(parsed.shell))


def _add_convert(commands: Commands) -> None:
    summary = "convert, inspect and compare checkpoints, between Hugging Face and Megatron"
    add_commands(commands.add_parser("convert", help=summary, description=summary))


def _add_init(commands: Commands) -> None:
    summary = "write what a run of your own begins with: configuration, reward, data script"
    init = commands.add_parser(
        "init", help=summary, description=f"{summary}; what is not given is asked, on a terminal"
    )
    init.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        default=".",
        help="where to; the current one where none is given",
    )
    init.add_argument(
        "--model", metavar="DIR", help="the model to train: a Hugging Face folder, or a name on its hub"
    )
    init.add_argument(
        "--data",
        metavar="FILE",
        help="questions and answers: .jsonl, .csv or .parquet; without it, sums are made",
    )
    init.add_argument(
        "--val",
        metavar="FILE",
        help="held-out questions and answers; without it, some of --data are held out",
    )
    init.add_argument(
        "--kind",
        choices=[kind.value for kind in RunKind],
        help="ppo: reinforcement learning (the default); or sft",
    )
    init.add_argument(
        "--algorithm",
        metavar="NAME",
        help="of reinforcement learning: a preset, such as grpo (the default) or ppo",
    )
    init.add_argument(
        "--device",
        choices=[device.value for device in Device],
        help="auto: GPUs where there are any (the default)",
    )
    init.add_argument(
        "--devices", metavar="N", type=positive, help="GPUs, or processes on a CPU: 1 where not given"
    )
    init.set_defaults(start=_start_init)


def _add_schema(commands: Commands) -> None:
    summary = "print the JSON Schema of a configuration file, with which an editor completes and checks it"
    schema = commands.add_parser("schema", help=summary, description=summary)
    kinds = "run: any run, by its `kind` (the default); ppo or sft: one kind; algorithm: a preset"
    schema.add_argument("kind", metavar="KIND", nargs="?", choices=SCHEMA_KINDS, default=ANY_RUN, help=kinds)
    schema.set_defaults(start=lambda parsed: run_of("inspect.schema")(parsed.kind))


def _start_init(parsed: argparse.Namespace) -> int:
    module = importlib.import_module("megarl.cli.run.init")
    asks = sys.stdin.isatty()

    # What is not given is asked on a terminal; elsewhere the default is taken.
    def wish(name: str, question: str, default: str | None, choices: tuple[str, ...] = ()) -> str:
        given = getattr(parsed, name)
        if given is None and asks:
            return str(module.ask(question, default, choices))
        if given is None and default is None:
            raise ValueError(f"--{name} is missing: {question}")
        return str(default if given is None else given)

    model = wish("model", "the model to train, a Hugging Face folder or a name on its hub", None)
    data = wish("data", "a file of questions and answers (nothing: sums are made)", "")
    kind = RunKind(wish("kind", "what to do", RunKind.ppo.value, tuple(each.value for each in RunKind)))
    wishes = module.Wishes(
        folder=Path(parsed.folder),
        model=model,
        data=data or None,
        validation=parsed.val,
        kind=kind,
        algorithm=wish("algorithm", "by which algorithm", "grpo") if kind is RunKind.ppo else "",
        device=Device(
            wish("device", "on which devices", Device.auto.value, tuple(each.value for each in Device))
        ),
        num_devices=positive(wish("devices", "how many of them", "1")),
    )

    return int(module.run(wishes))


# In the order of `megarl --help`.
_COMMANDS = (
    _add_train,
    _add_sft,
    add_check,
    add_plan,
    add_rehearse,
    _add_submit,
    _add_launch,
    add_doctor,
    add_eval,
    add_generate,
    _add_status,
    _add_scale,
    _add_plot,
    _add_report,
    _add_score,
    _add_quickstart,
    _add_init,
    _add_schema,
    _add_completion,
    _add_convert,
)
