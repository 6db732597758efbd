"""The options of the commands that sample a model."""

from __future__ import annotations

import argparse

from megarl.cli.parser_parts import Commands, run_of
from megarl.cli.run.convert import positive


def add_eval(commands: Commands) -> None:
    summary = (
        "sample a model on a data file and score it: mean and pass@k with their errors, every sample kept"
    )
    parser = commands.add_parser("eval", help=summary, description=summary, allow_abbrev=False)
    _add_model(parser)
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="such as rollout.engine=sglang or data.columns.prompt=question",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a run's configuration; without it that of the run that made the model, if any",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        action="append",
        help="of prompts, as for training; without it data.val_files",
    )
    parser.add_argument(
        "--reward", metavar="FILE.py:NAME", help="a reward function instead of the configuration's"
    )
    parser.add_argument("--n", metavar="N", type=int, help="samples per prompt: rollout.validation.n")
    parser.add_argument(
        "--temperature", metavar="T", type=float, help="0 is greedy: rollout.validation.temperature"
    )
    parser.add_argument("--max-tokens", metavar="N", type=int, help="of a response: data.max_response_length")
    parser.add_argument(
        "--against",
        metavar="DIR",
        help="the folder of another evaluation of the same prompts, to compare with",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="for the results; without it a new folder below the run's, or below outputs",
    )
    parser.add_argument("--json", action="store_true", help="print the results as one JSON document")
    parser.set_defaults(start=lambda parsed: run_of("run.eval")(parsed))


def add_generate(commands: Commands) -> None:
    summary = "generate from prompts, or chat, with a model folder or a run's checkpoint"
    parser = commands.add_parser("generate", help=summary, description=summary, allow_abbrev=False)
    _add_model(parser)
    _add_prompts_and_sampling(parser)
    parser.add_argument("--log-probs", action="store_true", help="also each token with its log-prob")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each answer, in a line")
    _add_episode(parser)
    parser.set_defaults(start=_start_generate)


def _add_prompts_and_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="*", help="without one the standard input; on a terminal, a chat"
    )
    parser.add_argument("--lines", action="store_true", help="each line of the standard input is a prompt")
    parser.add_argument(
        "--system",
        metavar="TEXT",
        help="comes before the prompts; without it what the model's chat template says",
    )
    parser.add_argument("--n", metavar="N", type=int, default=1, help="samples of each prompt")
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help="0, greedy, where it is left out"
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="draw from the most likely tokens with so much probability",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        help="of an answer; without it 256, or as many as the model has room for",
    )
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="ends an answer, and is left out; may be repeated",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the draws")


def _add_episode(parser: argparse.ArgumentParser) -> None:
    """Add the options with which an answer is an episode with tools or an environment."""
    parser.add_argument(
        "--tool",
        metavar="TOOL",
        action="append",
        default=[],
        help="calculator, or FILE.py:NAME; may be repeated",
    )
    parser.add_argument(
        "--environment",
        metavar="FILE.py:NAME",
        help="a class that answers the model's turns, instead of tools",
    )
    parser.add_argument(
        "--parser",
        metavar="NAME",
        help="of SGLang's, such as llama3, that reads calls; without it they are <tool_call> JSON",
    )
    parser.add_argument(
        "--agent",
        metavar="CONFIG",
        help="of a run, whose tools or environment, their limits and their parser it takes",
    )
    parser.add_argument(
        "--max-turns",
        metavar="N",
        type=positive,
        help="of the model, with tools or an environment; 8, or as --agent has it",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face folder or name, a run's trainer.output_dir, or a checkpoint of one",
    )
    parser.add_argument(
        "--step", metavar="STEP", default="latest", help="of a run's checkpoints: latest, best, or a number"
    )


def _start_generate(parsed: argparse.Namespace) -> int:
    return run_of("run.episodes" if parsed.tool or parsed.environment or parsed.agent else "run.generate")(
        parsed
    )
