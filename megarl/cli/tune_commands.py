"""The options of `megarl tune`."""

from __future__ import annotations

from megarl.cli.parser_parts import Commands, add_run_command, starts


def add_tune(commands: Commands) -> None:
    summary = "choose placement, layouts and engines of a run for the shortest predicted step"
    tune = add_run_command(commands, "tune", summary, starts("inspect.tune"))

    tune.add_argument(
        "--device",
        metavar="NAME",
        help="a device file: a shipped name such as h100_80gb, or a path; by default "
        "placement.device_profile, or else h100_80gb. The memory and the nodes of the device replace those "
        "of the file, unless they are set on the command line",
    )

    tune.add_argument(
        "--from-run",
        metavar="RUN_DIR",
        help="fit the device to the phases that a run has measured, and search with the result",
    )
    tune.add_argument(
        "--device-output",
        metavar="FILE",
        help="with --from-run: write the fitted device, for placement.device_profile",
    )

    sizes = tune.add_mutually_exclusive_group()
    sizes.add_argument(
        "--nodes", metavar="N", type=int, help="number of nodes; by default placement.num_nodes"
    )
    sizes.add_argument(
        "--devices",
        metavar="N,N,...",
        help="compare clusters of these numbers of devices, for each max_staleness up to the limit",
    )

    tune.add_argument(
        "--max-staleness",
        metavar="K",
        type=int,
        default=0,
        help="the highest rollout.max_staleness to consider (0 by default: no asynchronous training)",
    )
    tune.add_argument(
        "--objective",
        choices=("step_s", "tokens_per_gpu"),
        default="step_s",
        help="with --devices: choose the cluster by its step time, or by its tokens/s per device",
    )

    tune.add_argument(
        "--lengths",
        metavar="PROMPT,RESPONSE",
        help="mean tokens of a prompt and of a response; by default a quarter and half of the longest",
    )
    tune.add_argument(
        "--pin",
        metavar="KEY",
        action="append",
        default=[],
        help="keep a key or a section as in CONFIG; can be repeated. Overrides are kept too",
    )

    tune.add_argument(
        "--top", metavar="K", type=int, default=5, help="number of results to print (5 by default)"
    )
    tune.add_argument(
        "--output", metavar="FILE", help="write the best result to a YAML file that inherits CONFIG"
    )
    tune.add_argument("--json", metavar="FILE", help="write all results to a JSON file")

    tune.add_argument(
        "--plot",
        metavar="FILE",
        help="draw the predicted step, or with --devices its time on each cluster, to a .svg or .png file",
    )
