"""The parts of the command line: a command as a row of a table, and the options that commands share."""

from __future__ import annotations

import argparse
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

# An override. The signs are Hydra's, which a message explains.
OVERRIDE = re.compile(r"[A-Za-z_+~][\w.\[\]]*=")
Adds = Callable[[argparse._ActionsContainer], object]  # adds an argument, or several, to a parser


def argument(*names: str, **settings: Any) -> Adds:
    """Return what adds an argument, given as for `add_argument` of argparse."""
    return lambda parser: parser.add_argument(*names, **settings)


def positive(text: str) -> int:
    """Read the value of an option that is a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive integer")
    return int(text)


def overrides(help_text: str) -> Adds:
    """Return what adds the positional arguments `key=value`."""
    # Without a default, argparse's errors name them as required.
    return argument("overrides", metavar="key=value", nargs="*", default=[], help=help_text)


def group(title: str, *arguments: Adds) -> Adds:
    """Return what adds arguments under a title in the help."""
    return lambda parser: _add(arguments, parser.add_argument_group(title))


def one_of(*arguments: Adds) -> Adds:
    """Return what adds arguments of which only one may be given."""
    return lambda parser: _add(arguments, parser.add_mutually_exclusive_group())


def _add(arguments: tuple[Adds, ...], parser: argparse._ActionsContainer) -> None:
    for add in arguments:
        add(parser)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command. Its module is imported when it runs.

    Attributes:
        group: The heading in `megarl --help`, one of commands.GROUPS.
        module: The module whose function `run` runs the command, or MODULE:FUNCTION. Its parameters are the
            options. It returns an exit code, or None for 0.
        parts: Options that select another function instead, by their names in the parsed command line. A
            function gets the options that are its parameters, and any other one is refused.
        first: The function, MODULE:FUNCTION, that reports wrong options before the others' modules are
            imported, which may take seconds. It gets the options that are its parameters.
        summary: The line in `megarl --help`.
        arguments: What add the arguments, in the order of the help.
        examples: Command lines for the help and the documentation. A test parses all of them.
        description: The first lines of the help; None: the summary.
        abbreviates: Whether options may be abbreviated.
        owns_processes: Whether the processes that the command starts end with it.
        owns_none_with: Options with which it starts no processes, or only ones that continue.
    """

    group: str
    module: str
    parts: Mapping[str, str] = MappingProxyType({})
    first: str | None = None
    summary: str
    arguments: tuple[Adds, ...] = ()
    examples: tuple[str, ...]
    description: str | None = None
    abbreviates: bool = False
    owns_processes: bool = False
    owns_none_with: tuple[str, ...] = ()

    def add_to(self, commands: argparse._SubParsersAction, name: str) -> None:
        """Add the parser of the command, under its name."""
        parser = commands.add_parser(
            name,
            help=self.summary,
            description=self.description or self.summary,
            allow_abbrev=self.abbreviates,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog="\n".join(["examples:", *(f"  {line}" for line in self.examples)]),
        )
        _add(self.arguments, parser)
        parser.set_defaults(start=partial(self._start, parser))

    def _start(self, parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
        """Run the command's function, or those of the selected parts, and return the highest exit code.

        Raises:
            ValueError: An option applies to none of the functions, or to several of them.
        """
        options = {name: value for name, value in vars(parsed).items() if name not in ("command", "start")}
        if self.first is not None:
            check, own = self._call(self.first, options)
            check(**own)
        selected = [name for name in self.parts if options[name] not in (None, False)]
        calls = [self._call(self.parts[name], options) for name in selected] or [
            self._call(self.module, options)
        ]
        names = {action.dest: _name(action) for action in parser._actions}
        positional = {action.dest for action in parser._actions if not action.option_strings}

        for option in options:
            if option in selected or options[option] == parser.get_default(option):
                continue
            takers = [names[part] for part, (_, own) in zip(selected, calls, strict=False) if option in own]
            if len(takers) > 1 and option not in positional:
                raise ValueError(f"{names[option]} applies to {' and to '.join(takers)}; give one of them")
            if not any(option in own for _, own in calls):
                raise ValueError(f"{names[option]} {self._remedy(option, selected, names)}")

        return max(run(**own) or 0 for run, own in calls)

    def _remedy(self, option: str, selected: Sequence[str], names: Mapping[str, str]) -> str:
        """Say what an option needs that none of the selected functions takes."""
        places = self.parts.items()
        owners = [names[part] for part, place in places if option in self._call(place, {option: 0})[1]]
        if owners and option not in self._call(self.module, {option: 0})[1]:
            return f"requires {' or '.join(owners)}"
        return f"does not apply to {' and '.join(names[part] for part in selected)}; remove it"

    def _call(
        self, place: str, options: Mapping[str, Any]
    ) -> tuple[Callable[..., int | None], dict[str, Any]]:
        """Return the function at a place, MODULE or MODULE:FUNCTION, and the options that it takes."""
        run = pkgutil.resolve_name(place if ":" in place else f"{place}:run")
        parameters = inspect.signature(run).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        return run, {
            name: value
            for name, value in options.items()
            if name in parameters or (takes_all and name not in self.parts)
        }


def _name(action: argparse.Action) -> str:
    """Return how an argument is written in the usage."""
    return action.option_strings[-1] if action.option_strings else str(action.metavar)


# ---- options of the commands that have many, or that share them

CONFIG = argument(
    "config_path",
    metavar="CONFIG",
    help="a YAML file; configs/quickstart.yaml and others are included in megarl",
)
RUN = (CONFIG, overrides("such as trainer.total_steps=10 or algorithm=grpo"))
MAYBE_RUN = (
    argument("config_path", metavar="CONFIG", nargs="?", help="a run's YAML file"),
    overrides("as for `megarl train`"),
)
RUN_DIR = argument("run_dir", metavar="RUN_DIR", help="the run's trainer.output_dir")
VERBOSE = argument(
    "--verbose",
    action="store_true",
    help="print all tables of `megarl check` before the run starts",
)

PLAN = (
    argument("--output", metavar="FILE", help="draw to a .svg or .png file"),
    argument(
        "--lengths",
        metavar="MEAN,MAX",
        help="for --simulate: log-normal response tokens; MAX is data.max_response_length by default",
    ),
    argument(
        "--training-s",
        metavar="S",
        type=float,
        help="for --simulate: training seconds per step, as configured",
    ),
    argument(
        "--tokens-per-s",
        metavar="N",
        type=float,
        help="for --simulate: an engine's generation speed of one sample",
    ),
    argument(
        "--from",
        dest="run_dir",
        metavar="RUN_DIR",
        help="for --simulate: the folder of a run with max_staleness 0 that has measured these values",
    ),
)

DRY_RUN = (
    argument(
        "--role",
        dest="role_name",
        metavar="ROLE",
        default="actor",
        help="actor (the default), reference, teacher, critic or reward_model",
    ),
    argument(
        "--ranks",
        metavar="RANKS",
        default="distinct",
        help="distinct (one rank each of the first, a middle and the last stage), all, or a list such as 0,8",
    ),
    argument(
        "--json",
        dest="json_path",
        metavar="FILE",
        help="write all results to a file, with the source line of each collective and sync",
    ),
)

TUNE = (
    argument(
        "--calibrate",
        dest="device_file",
        metavar="FILE",
        help="instead, measure this machine's devices for the run's model, and write them to a device file. "
        "Without CONFIG, a run that is included in megarl gives the shapes",
    ),
    argument(
        "--device",
        metavar="NAME",
        help="a device file: a shipped name such as h100_80gb, or a path; by default "
        "placement.device_profile, or else h100_80gb. The memory and the nodes of the device replace those "
        "of the file, unless they are set on the command line. With --calibrate: the nearest device file; by "
        "default that of the GPU, or cpu",
    ),
    argument(
        "--from-run",
        metavar="RUN_DIR",
        help="fit the device to the phases that a run has measured, and search with the result",
    ),
    argument(
        "--device-output",
        metavar="FILE",
        help="with --from-run: write the fitted device, for placement.device_profile",
    ),
    one_of(
        argument("--nodes", metavar="N", type=int, help="number of nodes; by default placement.num_nodes"),
        argument(
            "--devices",
            metavar="N,N,...",
            help="compare clusters of these numbers of devices, for each max_staleness up to the limit",
        ),
    ),
    argument(
        "--max-staleness",
        metavar="K",
        type=int,
        default=0,
        help="the highest rollout.max_staleness to consider (0 by default: no asynchronous training)",
    ),
    argument(
        "--objective",
        choices=("step_s", "tokens_per_gpu"),
        default="step_s",
        help="with --devices: choose the cluster by its step time, or by its tokens/s per device",
    ),
    argument(
        "--lengths",
        metavar="PROMPT,RESPONSE",
        help="mean tokens of a prompt and of a response; by default a quarter and half of the longest",
    ),
    argument(
        "--pin",
        metavar="KEY",
        action="append",
        default=[],
        help="keep a key or a section as in CONFIG; can be repeated. Overrides are kept too",
    ),
    argument("--top", metavar="K", type=int, default=5, help="number of results to print (5 by default)"),
    argument("--output", metavar="FILE", help="write the best result to a YAML file that inherits CONFIG"),
    argument("--json", metavar="FILE", help="write all results to a JSON file"),
    argument(
        "--plot",
        metavar="FILE",
        help="draw the predicted step, or with --devices its time on each cluster, to a .svg or .png file",
    ),
)

# A model to sample from.
MODEL = (
    argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face folder or hub name, a run's trainer.output_dir, or a run's checkpoint",
    ),
    argument(
        "--step",
        metavar="STEP",
        default="latest",
        help="which of a run's checkpoints: latest, best, or a number",
    ),
)

EVAL = (
    argument(
        "--config",
        metavar="FILE",
        help="a run's configuration; the default is that of the run that produced the model, if any",
    ),
    argument(
        "--data",
        metavar="FILE",
        action="append",
        help="file of prompts, as for training; the default is data.val_files",
    ),
    argument(
        "--reward",
        metavar="FILE.py:NAME",
        help="a reward function to use instead of the configuration's functions, judges and reward model",
    ),
    argument("--n", metavar="N", type=int, help="samples per prompt (rollout.validation.n)"),
    argument("--temperature", metavar="T", type=float, help="0 is greedy (rollout.validation.temperature)"),
    argument(
        "--max-tokens",
        metavar="N",
        type=int,
        help="maximum tokens of a response (data.max_response_length)",
    ),
    argument(
        "--against",
        metavar="DIR",
        help="the folder of another evaluation of the same prompts to compare with",
    ),
    argument(
        "--output",
        metavar="DIR",
        help="folder for the results; the default is a new folder in the run's folder, or in outputs",
    ),
    argument("--json", action="store_true", help="print the results as one JSON document"),
    argument(
        "--rows",
        dest="rows_path",
        metavar="FILE",
        help="instead, run the rewards of a configuration, given as MODEL, on a .parquet, .jsonl or .csv "
        "file with response, data_source and ground truth, such as generations.jsonl of a run",
    ),
    argument(
        "--ground-truth",
        dest="of_ground_truth",
        action="store_true",
        help="with --rows: score each row's ground truth instead of a response",
    ),
)

GENERATE = (
    argument(
        "prompts",
        metavar="PROMPT",
        nargs="*",
        help="prompts; by default standard input, or a chat on a terminal",
    ),
    argument("--lines", action="store_true", help="treat each line of standard input as a prompt"),
    argument(
        "--system",
        metavar="TEXT",
        help="system message; the default is that of the model's chat template",
    ),
    argument("--n", metavar="N", type=int, default=1, help="samples per prompt"),
    argument("--temperature", metavar="T", type=float, default=0.0, help="the default is 0 (greedy)"),
    argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="nucleus sampling: probability mass of the tokens to sample from",
    ),
    argument(
        "--max-tokens",
        metavar="N",
        type=int,
        help="maximum tokens of an answer; the default is 256, or fewer if the model's context is shorter",
    ),
    argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end an answer at this string, which is removed; may be repeated",
    ),
    argument("--seed", metavar="N", type=int, default=0, help="seed of the sampling"),
    argument("--log-probs", action="store_true", help="also print each token with its log-prob"),
    argument("--json", action="store_true", help="print one JSON object per answer, each on a line"),
    argument(
        "--tool",
        metavar="TOOL",
        action="append",
        default=[],
        help="a tool: calculator, or FILE.py:NAME; may be repeated",
    ),
    argument(
        "--environment",
        metavar="FILE.py:NAME",
        help="a class that answers the model's turns, instead of tools",
    ),
    argument(
        "--parser",
        metavar="NAME",
        help="SGLang parser of tool calls, such as llama3; the default is <tool_call> JSON",
    ),
    argument(
        "--agent",
        metavar="CONFIG",
        help="configuration of a run whose tools or environment, limits and parser to use",
    ),
    argument(
        "--max-turns",
        metavar="N",
        type=positive,
        help="maximum turns of the model with tools or an environment; the default is that of --agent, or 8",
    ),
)
