"""The options of the commands that check and plan a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megarl.cli.parser_parts import Commands, add_overrides, add_run_command, run_of, starts


def add_check(commands: Commands) -> None:
    summary = "report every error in a configuration, and print what the run would do"
    check = add_run_command(commands, "check", summary, _start_check)
    check.add_argument(
        "--fast",
        action="store_true",
        help="check within a second: no tokenizers, data, weights, reward functions or weight-sync plan",
    )

    parts = check.add_argument_group("parts: select one or several instead of the default check")
    parts.add_argument("--plan", action="store_true", help="print the placement, as `megarl plan`")
    parts.add_argument(
        "--simulate", action="store_true", help="estimate the step time, as `megarl plan --simulate`"
    )
    parts.add_argument(
        "--machine",
        action="store_true",
        help="check this machine and the cluster, as `megarl doctor`",
    )
    parts.add_argument(
        "--dry-run",
        action="store_true",
        help="dry run on fake devices, as `megarl rehearse`",
    )

    _add_plan_options(check.add_argument_group("with --plan or --simulate"))
    _add_dry_run_options(check.add_argument_group("with --dry-run"))


def _start_check(parsed: argparse.Namespace) -> int:
    chosen = [start for name, start in _PARTS.items() if getattr(parsed, name)]
    _refuse_options_without_part(parsed)
    if not chosen:
        return run_of("inspect.check")(parsed.config_path, parsed.overrides, parsed.fast)

    if parsed.fast:
        raise ValueError(
            "--fast applies to the default check only; remove it, or remove --plan, --simulate, --machine "
            "and --dry-run"
        )

    return max([start(parsed) for start in chosen])


def _refuse_options_without_part(parsed: argparse.Namespace) -> None:
    """Raise ValueError for an option of a part that is not selected.

    A drawing of two parts in one file is refused too.
    """
    # With neither part there would be no drawing, with both there would be two in one file.
    if parsed.output is not None and parsed.plan == parsed.simulate:
        raise ValueError(f"--output {parsed.output} draws either --plan or --simulate; give one of them")
    if not parsed.simulate:
        _refuse_simulation_options(parsed)

    for name, default in _DRY_RUN_DEFAULTS.items():
        if not parsed.dry_run and getattr(parsed, name) != default:
            raise ValueError(f"--{name} requires --dry-run")


def add_plan(commands: Commands) -> None:
    summary = "print or draw the placement of all roles and the memory of each device"
    plan = add_run_command(commands, "plan", summary, _start_plan_or_simulation)
    plan.add_argument(
        "--simulate",
        action="store_true",
        help="estimate step time and idle time for several values of max_staleness and splits of the devices",
    )
    _add_plan_options(plan)


def _add_plan_options(command: argparse._ActionsContainer) -> None:
    command.add_argument("--output", metavar="FILE", help="draw to a .svg or .png file")

    command.add_argument(
        "--lengths",
        metavar="MEAN,MAX",
        help="for --simulate: log-normal response tokens; MAX is data.max_response_length by default",
    )

    command.add_argument(
        "--training-s",
        metavar="S",
        type=float,
        help="for --simulate: training seconds per step, as configured",
    )

    command.add_argument(
        "--tokens-per-s",
        metavar="N",
        type=float,
        help="for --simulate: an engine's generation speed of one sample",
    )

    command.add_argument(
        "--from",
        metavar="RUN_DIR",
        dest="run_dir",
        help="for --simulate: the folder of a run with max_staleness 0 that has measured these values",
    )


def _start_plan_or_simulation(parsed: argparse.Namespace) -> int:
    if parsed.simulate:
        return _start_simulation(parsed)
    _refuse_simulation_options(parsed)
    return _start_plan(parsed)


def _start_plan(parsed: argparse.Namespace) -> int:
    return run_of("inspect.plan")(parsed.config_path, parsed.overrides, parsed.output)


def _start_simulation(parsed: argparse.Namespace) -> int:
    return run_of("inspect.simulate")(
        parsed.config_path, parsed.overrides, parsed.output, *_simulation_options(parsed)
    )


def _simulation_options(
    parsed: argparse.Namespace,
) -> tuple[str | None, str | None, float | None, float | None]:
    return parsed.lengths, parsed.run_dir, parsed.training_s, parsed.tokens_per_s


def _refuse_simulation_options(parsed: argparse.Namespace) -> None:
    if any(value is not None for value in _simulation_options(parsed)):
        raise ValueError("--lengths, --from, --training-s and --tokens-per-s require --simulate")


def add_rehearse(commands: Commands) -> None:
    summary = "dry run on fake devices: memory, collectives and synchronizations of each rank, without a GPU"
    _add_dry_run_options(add_run_command(commands, "rehearse", summary, _start_rehearse))


_DRY_RUN_DEFAULTS = {"role": "actor", "ranks": "distinct", "json": None}


def _add_dry_run_options(command: argparse._ActionsContainer) -> None:
    command.add_argument(
        "--role", metavar="ROLE", help="actor (the default), reference, teacher, critic or reward_model"
    )

    command.add_argument(
        "--ranks",
        metavar="RANKS",
        help="distinct (one rank each of the first, a middle and the last stage), all, or a list such as 0,8",
    )

    command.add_argument(
        "--json",
        metavar="FILE",
        help="write all results to a file, with the source line of each collective and sync",
    )

    command.set_defaults(**_DRY_RUN_DEFAULTS)


def _start_rehearse(parsed: argparse.Namespace) -> int:
    return run_of("inspect.rehearse")(
        parsed.config_path, parsed.overrides, parsed.role, parsed.ranks, parsed.json
    )


def add_calibrate(commands: Commands) -> None:
    summary = "measure this machine's devices for a run's model, and write them to a device file"
    calibrate = commands.add_parser("calibrate", help=summary, description=summary, allow_abbrev=False)

    calibrate.add_argument(
        "config_path",
        metavar="CONFIG",
        nargs="?",
        help="the run whose shapes and dtype are measured; by default one that is included in megarl",
    )
    add_overrides(calibrate, "as for `megarl train`")
    calibrate.add_argument("--output", metavar="FILE", required=True, help="the YAML file to write")

    calibrate.add_argument(
        "--device",
        metavar="NAME",
        help="the nearest device file: a shipped name or a path; by default that of the GPU, or cpu",
    )

    calibrate.set_defaults(start=starts("inspect.calibrate"))


def add_doctor(commands: Commands) -> None:
    summary = "check this machine, the cluster and the inputs of a run; warnings and errors have a hint"
    doctor = commands.add_parser("doctor", help=summary, description=summary, allow_abbrev=False)
    doctor.add_argument(
        "config_path",
        metavar="CONFIG",
        nargs="?",
        help="the run to check; by default only the machine is checked",
    )
    add_overrides(doctor, "as for `megarl train`")
    doctor.add_argument("--json", dest="as_document", action="store_true", help="print one JSON document")
    doctor.set_defaults(start=starts("inspect.doctor"))


# The parts of `megarl check`, in the order of the output. Each is also a command.
_PARTS: dict[str, Callable[[argparse.Namespace], int]] = {
    "plan": _start_plan,
    "simulate": _start_simulation,
    "machine": lambda parsed: run_of("inspect.doctor")(parsed.config_path, parsed.overrides),
    "dry_run": _start_rehearse,
}
