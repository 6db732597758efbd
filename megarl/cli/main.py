"""The command `megarl`: reads the command line, starts the subcommand, and turns how it ends into an exit status.

0: good. 2: something that the user can mend, said in a message. 1: something failed while running, shown by failure_report.py.
A subcommand's module is imported when it is asked for, so that `megarl check` and `megarl --help` need no torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from megarl import __version__
from megarl.cli.run.context import RunContext, RunFailedError
from megarl.cli.run.convert import add_commands, positive
from megarl.cli.run.examples import epilog
from megarl.cli.run.termination import INTERRUPTED, ends_by_signal
from megarl.config.json_schema import ANY_RUN
from megarl.config.json_schema import KINDS as SCHEMA_KINDS
from megarl.config.load import schema_of
from megarl.config.schema import Device, PPOConfig, RunKind, SFTConfig
from megarl.machine.errors import ConfigError
from megarl.machine.reaper import end_processes_of, owned_processes
from megarl.tracking.run_files import STATUS_FILE

_OVERRIDE = re.compile(r"[A-Za-z_+~][\w.\[\]]*=")
_OVERRIDE_AS_OPTION = re.compile(r"--(?=\w+\.[\w.\[\]]+(=|$)|(kind|algorithm|device)=)")  # as other programs take them
# Commands that take overrides, with those of their options that a value follows.
_TAKE_OVERRIDES: dict[str, tuple[str, ...]] = dict.fromkeys(("train", "sft", "check", "doctor", "score", "quickstart"), ()) | {
    "plan": ("--output", "--lengths", "--from", "--training-s", "--tokens-per-s"),
    "rehearse": ("--role", "--ranks", "--json"),
    "eval": ("--config", "--data", "--reward", "--n", "--temperature", "--max-tokens", "--step", "--against", "--output"),
    "submit": ("--address",),
    "launch": (),
}
# Commands whose processes end with them. `launch` ends its node's processes itself, and a submitted job continues on its cluster.
_START_PROCESSES = ("train", "sft", "check", "rehearse", "doctor", "eval", "generate", "score", "quickstart", "init")
GOOD, FAILED, USER_ERROR = 0, 1, 2
_AS_WRITTEN = argparse.RawDescriptionHelpFormatter
_EXAMPLES = """examples:
  megarl quickstart                                        a tiny model learns sums, in minutes on two cores
  megarl init my_run --model MODEL_DIR --data rows.jsonl   what a run of your own begins with
  megarl check my_run/run.yaml                             every error at once
  megarl train my_run/run.yaml                             and again, to go on after a crash
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status, except for argparse's own exits (2 for a wrong command line)."""
    parser = build_parser()
    if not (sys.argv[1:] if arguments is None else arguments) and "_ARGCOMPLETE" not in os.environ:
        parser.print_help(sys.stderr)
        return USER_ERROR
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may come next
        importlib.import_module("megarl.cli.inspect.completion").answer(parser)
    parsed = parser.parse_args(in_argparse_order(sys.argv[1:] if arguments is None else arguments))
    try:
        with _own_processes(parsed):
            return parsed.start(parsed)
    except KeyboardInterrupt as interrupted:
        print("; ".join([f"megarl {parsed.command}: interrupted", *map(str, interrupted.args)]), file=sys.stderr)
        return INTERRUPTED
    except RunFailedError as failed:
        return _end(failed.error, parsed.command, failed.context)
    except Exception as error:  # noqa: BLE001  (the boundary of the process)
        return _end(error, parsed.command, None)


@contextmanager
def _own_processes(parsed: argparse.Namespace) -> Iterator[None]:
    """End the processes that a command starts with the command, however it ends."""
    if parsed.command not in _START_PROCESSES or getattr(parsed, "fast", False):
        yield
        return
    with owned_processes() as owner, ends_by_signal(lambda: end_processes_of(owner)):
        yield


def in_argparse_order(arguments: Sequence[str]) -> list[str]:
    """Options first, then what has a place, then overrides: argparse takes what has no name in one run only, and people put it anywhere.
    `--key.sub=value` and `--key.sub value` are overrides as well."""
    if not arguments or arguments[0] not in _TAKE_OVERRIDES:
        return list(arguments)
    arguments = _with_plain_overrides(arguments)
    options: list[str] = []
    others: list[str] = []
    overrides: list[str] = []
    for before, each in pairwise(arguments):
        is_option = each.startswith("-") or before in _TAKE_OVERRIDES[arguments[0]]
        kind = options if is_option else overrides if _OVERRIDE.match(each) else others
        kind.append(each)
    return [arguments[0], *options, *others, *overrides]


def _with_plain_overrides(arguments: Sequence[str]) -> list[str]:
    plain: list[str] = []
    waiting: str | None = None  # a key that was written as an option without "=": its value comes next
    for each in arguments:
        if waiting is not None:
            plain.append(f"{waiting}={each}")
            waiting = None
        elif (match := _OVERRIDE_AS_OPTION.match(each)) is None:
            plain.append(each)
        elif "=" in each:
            plain.append(each[match.end() :])
        else:
            waiting = each[match.end() :]
    return [*plain, waiting] if waiting is not None else plain


def _end(error: Exception, command: str, context: RunContext | None) -> int:
    can_be_mended = isinstance(error, ConfigError) or (isinstance(error, ValueError) and _raised_by_megarl(error))
    if can_be_mended and (context is None or not context.is_under_way):
        print(f"megarl {command}: {error}", file=sys.stderr)
        return USER_ERROR
    importlib.import_module("megarl.cli.run.failure_report").print_failure(error, command, context)
    print(f"megarl {command}: failed while running; the cause is shown above", file=sys.stderr)
    return USER_ERROR if can_be_mended else FAILED


def _raised_by_megarl(error: ValueError) -> bool:
    """megarl's own code raises ValueError only for what a user wrote. One from a library, or from a worker, is a failure."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return module.split(".")[0] == "megarl"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    description = "Reinforcement learning of large language models on Megatron-Core and Ray."
    parser = argparse.ArgumentParser(prog="megarl", description=description, epilog=_EXAMPLES, formatter_class=_AS_WRITTEN)
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    summary = "train: by reinforcement learning, or as the file's `kind` says"
    train = _add_run(commands, "train", summary, lambda parsed: _run("run.train")(parsed.config, parsed.overrides, parsed.verbose))
    sft = _add_run(
        commands, "sft", "fine-tune on demonstrations", lambda parsed: _run("run.sft")(parsed.config, parsed.overrides, parsed.verbose)
    )
    for command in (train, sft):
        command.add_argument("--verbose", action="store_true", help="print all that is known before the run starts, as `megarl check` does")
    check = _add_run(commands, "check", "find every error in a configuration, and print what the run would do", _start_check)
    check.add_argument(
        "--fast", action="store_true", help="in a second: without tokenizers, data, weights, reward functions and the plan of a push"
    )
    plan = _add_run(commands, "plan", "print, and draw, where each role would run and what each device would hold", _start_plan)
    plan.add_argument("--output", metavar="FILE", help="draw it to a .svg or .png")
    plan.add_argument("--simulate", action="store_true", help="step time and idleness, for several max_staleness and splits of the devices")
    plan.add_argument("--lengths", metavar="MEAN,MOST", help="to simulate: tokens of a sample, log-normal; without MOST data's limit")
    plan.add_argument("--training-s", metavar="S", type=float, help="to simulate: seconds of a step's training, as configured")
    plan.add_argument("--tokens-per-s", metavar="N", type=float, help="to simulate: with which an engine writes one sample")
    plan.add_argument("--from", metavar="RUN_DIR", dest="run_dir", help="to simulate: a run at max_staleness 0 that has measured all that")
    rehearse = _add_run(
        commands,
        "rehearse",
        "dry run on fake devices: memory, collectives and synchronizations of each rank, without a GPU",
        _start_rehearse,
    )
    rehearse.add_argument("--role", metavar="ROLE", default="actor", help="actor, reference, critic or reward_model; without it the actor")
    rehearse.add_argument(
        "--ranks", metavar="RANKS", default="distinct", help="distinct (one of the first, a middle and the last stage), all, or 0,8"
    )
    rehearse.add_argument("--json", metavar="FILE", help="write everything to a file, each collective and wait with its line")
    summary = "run `megarl train` as a job of an existing Ray cluster, and follow it"
    submit = _add_run(
        commands, "submit", summary, lambda parsed: _run("submit", "megarl.launch")(parsed.config, parsed.overrides, parsed.address)
    )
    submit.add_argument("--address", metavar="URL", help="of the job server, http://HEAD:8265; the default is RAY_API_SERVER_ADDRESS")
    summary = "run `megarl train` on the nodes of a torchrun, as the command that torchrun starts on each node"
    _add_run(commands, "launch", summary, lambda parsed: _run("torchrun_node", "megarl.launch")(parsed.config, parsed.overrides))
    summary = "examine this machine, the cluster and what a run reads: each line ok, a warning or an error with the remedy"
    doctor = commands.add_parser("doctor", help=summary, description=summary, allow_abbrev=False)
    doctor.add_argument("config", metavar="CONFIG", nargs="?", help="the run to examine them for; without it the machine alone is examined")
    doctor.add_argument("overrides", metavar="key=value", nargs="*", help="as for `megarl train`")
    doctor.add_argument("--json", action="store_true", help="print one JSON document")
    doctor.set_defaults(start=_start_doctor)
    _add_eval(commands)
    _add_generate(commands)
    summary = "where a run is right now: step, prompts by state, replicas, tokens a second, who waits"
    status = commands.add_parser("status", help=summary, description=f"{summary}; reads its {STATUS_FILE} only")
    status.add_argument("run_dir", metavar="RUN_DIR", help="the run's trainer.output_dir")
    status.add_argument("--watch", action="store_true", help="again and again, until the run ends or Ctrl-C")
    status.set_defaults(start=lambda parsed: _run("inspect.status")(parsed.run_dir, parsed.watch))
    summary = "change the number of rollout replicas of a running job"
    scale = commands.add_parser("scale", help=summary, description=f"{summary}; it looks between two steps")
    scale.add_argument("run_dir", metavar="RUN_DIR", help="the run's trainer.output_dir")
    scale.add_argument("--replicas", metavar="N", type=int, required=True, help="engines, each with a whole copy of the model")
    scale.set_defaults(start=lambda parsed: _run("run.scale")(parsed.run_dir, parsed.replicas))
    plot = commands.add_parser("plot", help="draw a run's curves to a PNG")
    plot.add_argument("run_dir", metavar="RUN_DIR", help="the run's trainer.output_dir")
    plot.set_defaults(start=lambda parsed: _run("inspect.plot")(parsed.run_dir))
    report = commands.add_parser(
        "report",
        help="write a page of one or several runs: curves, samples, timeline, configuration, failures",
        description="write a page of one or several runs: curves, samples, timeline, configuration, failures",
    )
    report.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="runs' trainer.output_dir; several are overlaid")
    report.add_argument("--output", metavar="FILE", help="without it, report.html in the first folder")
    report.add_argument("--live", action="store_true", help="serve it on this machine and follow the runs, until Ctrl-C")
    report.add_argument("--port", metavar="PORT", type=int, default=0, help="for --live; without it, any that is free")
    report.set_defaults(start=lambda parsed: _run("inspect.report")(parsed.run_dirs, parsed.output, parsed.live, parsed.port))
    score = commands.add_parser(
        "score",
        help="run the reward functions of a configuration on a file of responses",
        description="run the reward functions of a configuration on a file of responses",
        allow_abbrev=False,
    )
    score.add_argument("config", metavar="CONFIG", help="a YAML file with reward.functions")
    score.add_argument(
        "rows", metavar="ROWS", help=".parquet, .jsonl or .csv with response, data_source and ground truth, as a run's generations.jsonl"
    )
    score.add_argument("overrides", metavar="key=value", nargs="*", help="such as reward.time_limit_s=2")
    score.add_argument("--ground-truth", action="store_true", help="score each row's ground truth instead of a response")
    score.set_defaults(start=lambda parsed: _run("run.score")(parsed.config, parsed.overrides, parsed.rows, parsed.ground_truth))
    quickstart = commands.add_parser(
        "quickstart",
        help="create a tiny model and its data, and train it: minutes on two cores",
        description="create a tiny model and its data, and train it: minutes on two cores",
    )
    quickstart.add_argument("overrides", metavar="key=value", nargs="*", help="of configs/quickstart.yaml, such as trainer.total_steps=10")
    quickstart.set_defaults(start=lambda parsed: _run("run", "megarl.recipes.quickstart")(parsed.overrides))
    _add_init(commands)
    _add_schema(commands)
    completion = commands.add_parser(
        "completion",
        help="print what makes a shell complete commands, files and keys",
        description="print what makes a shell complete commands, files and keys",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help='as in: eval "$(megarl completion bash)"')
    completion.set_defaults(start=lambda parsed: _run("inspect.completion")(parsed.shell))
    convert = commands.add_parser(
        "convert",
        help="convert, inspect and compare checkpoints, between Hugging Face and Megatron",
        description="convert, inspect and compare checkpoints, between Hugging Face and Megatron",
    )
    add_commands(convert)
    summaries = {action.dest: action.help for action in commands._choices_actions}
    for name, command in commands.choices.items():
        command.description = command.description or summaries[name]
        command.formatter_class = _AS_WRITTEN
        command.epilog = epilog(name)
    return parser


def _add_init(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "write what a run of your own begins with: configuration, reward, data script"
    init = commands.add_parser("init", help=summary, description=f"{summary}; what is not given is asked, on a terminal")
    init.add_argument("folder", metavar="FOLDER", nargs="?", default=".", help="where to; the current one where none is given")
    init.add_argument("--model", metavar="DIR", help="the model to train: a Hugging Face folder, or a name on its hub")
    init.add_argument("--data", metavar="FILE", help="questions and answers: .jsonl, .csv or .parquet; without it, sums are made")
    init.add_argument("--val", metavar="FILE", help="held-out questions and answers; without it, some of --data are held out")
    init.add_argument("--kind", choices=[kind.value for kind in RunKind], help="ppo: reinforcement learning (the default); or sft")
    init.add_argument("--algorithm", metavar="NAME", help="of reinforcement learning: a preset, such as grpo (the default) or ppo")
    init.add_argument("--device", choices=[device.value for device in Device], help="auto: GPUs where there are any (the default)")
    init.add_argument("--devices", metavar="N", type=positive, help="GPUs, or processes on a CPU: 1 where not given")
    init.set_defaults(start=_start_init)


def _add_schema(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "print the JSON Schema of a configuration file, with which an editor completes and checks it"
    schema = commands.add_parser("schema", help=summary, description=summary)
    kinds = "run: any run, by its `kind` (the default); ppo or sft: one kind; algorithm: a preset"
    schema.add_argument("kind", metavar="KIND", nargs="?", choices=SCHEMA_KINDS, default=ANY_RUN, help=kinds)
    schema.set_defaults(start=lambda parsed: _run("inspect.schema")(parsed.kind))


def _start_init(parsed: argparse.Namespace) -> int:
    module = importlib.import_module("megarl.cli.run.init")
    asks = sys.stdin.isatty()

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
        device=Device(wish("device", "on which devices", Device.auto.value, tuple(each.value for each in Device))),
        num_devices=positive(wish("devices", "how many of them", "1")),
    )
    return int(module.run(wishes))


def _add_run(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, start: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """A subcommand that reads a configuration."""
    command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    command.add_argument("config", metavar="CONFIG", help="a YAML file; configs/quickstart.yaml and its like ship with megarl")
    command.add_argument("overrides", metavar="key=value", nargs="*", help="such as trainer.total_steps=10 or algorithm=grpo")
    command.set_defaults(start=start)
    return command


def _add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "sample a model on a data file and score it: mean and pass@k with their errors, every sample kept"
    parser = commands.add_parser("eval", help=summary, description=summary, allow_abbrev=False)
    _add_model(parser)
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="such as rollout.engine=sglang or data.columns.prompt=question")
    parser.add_argument("--config", metavar="FILE", help="a run's configuration; without it that of the run that made the model, if any")
    parser.add_argument("--data", metavar="FILE", action="append", help="of prompts, as for training; without it data.val_files")
    parser.add_argument("--reward", metavar="FILE.py:NAME", help="a reward function instead of the configuration's")
    parser.add_argument("--n", metavar="N", type=int, help="samples per prompt: rollout.validation.n")
    parser.add_argument("--temperature", metavar="T", type=float, help="0 is greedy: rollout.validation.temperature")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="of a response: data.max_response_length")
    parser.add_argument("--against", metavar="DIR", help="the folder of another evaluation of the same prompts, to compare with")
    parser.add_argument("--output", metavar="DIR", help="for the results; without it a new folder below the run's, or below outputs")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON document")
    parser.set_defaults(start=lambda parsed: _run("run.eval")(parsed))


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "generate from prompts, or chat, with a model folder or a run's checkpoint"
    parser = commands.add_parser("generate", help=summary, description=summary, allow_abbrev=False)
    _add_model(parser)
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="without one the standard input; on a terminal, a chat")
    parser.add_argument("--lines", action="store_true", help="each line of the standard input is a prompt")
    parser.add_argument("--system", metavar="TEXT", help="comes before the prompts; without it what the model's chat template says")
    parser.add_argument("--n", metavar="N", type=int, default=1, help="samples of each prompt")
    parser.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0, greedy, where it is left out")
    parser.add_argument("--top-p", metavar="P", type=float, default=1.0, help="draw from the most likely tokens with so much probability")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="of an answer; without it 256, or as many as the model has room for")
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help="ends an answer, and is left out; may be repeated")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the draws")
    parser.add_argument("--log-probs", action="store_true", help="also each token with its log-prob")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each answer, in a line")
    parser.add_argument("--tool", metavar="TOOL", action="append", default=[], help="calculator, or FILE.py:NAME; may be repeated")
    parser.add_argument("--environment", metavar="FILE.py:NAME", help="a class that answers the model's turns, instead of tools")
    parser.add_argument(
        "--parser", metavar="NAME", help="of SGLang's, such as llama3, that reads calls; without it they are <tool_call> JSON"
    )
    parser.add_argument("--agent", metavar="CONFIG", help="of a run, whose tools or environment, their limits and their parser it takes")
    parser.add_argument(
        "--max-turns", metavar="N", type=positive, help="of the model, with tools or an environment; 8, or as --agent has it"
    )
    parser.set_defaults(start=_start_generate)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder or name, a run's trainer.output_dir, or a checkpoint of one")
    parser.add_argument("--step", metavar="STEP", default="latest", help="of a run's checkpoints: latest, best, or a number")


def _start_generate(parsed: argparse.Namespace) -> int:
    return _run("run.episodes" if parsed.tool or parsed.environment or parsed.agent else "run.generate")(parsed)


def _run(command: str, package: str = "megarl.cli") -> Callable[..., int]:
    return importlib.import_module(f"{package}.{command}").run


def _start_plan(parsed: argparse.Namespace) -> int:
    given = (parsed.lengths, parsed.run_dir, parsed.training_s, parsed.tokens_per_s)
    if parsed.simulate:
        return _run("inspect.simulate")(parsed.config, parsed.overrides, _schema(parsed), given, parsed.output)
    if any(value is not None for value in given):
        raise ValueError("--lengths, --from, --training-s and --tokens-per-s say what is simulated; add --simulate")
    return _run("inspect.plan")(parsed.config, parsed.overrides, _schema(parsed), parsed.output)


def _start_rehearse(parsed: argparse.Namespace) -> int:
    return _run("inspect.rehearse")(parsed.config, parsed.overrides, _schema(parsed), parsed.role, parsed.ranks, parsed.json)


def _start_check(parsed: argparse.Namespace) -> int:
    return _run("inspect.check")(parsed.config, parsed.overrides, _schema(parsed), parsed.fast)


def _start_doctor(parsed: argparse.Namespace) -> int:
    return _run("inspect.doctor")(parsed.config, parsed.overrides, parsed.json)


def _schema(parsed: argparse.Namespace) -> type[PPOConfig] | type[SFTConfig]:
    return schema_of(parsed.config, parsed.overrides)
