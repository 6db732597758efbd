"""The options of the commands that sample from a model."""

from __future__ import annotations

import argparse

from megarl.cli.parser_parts import Commands, add_overrides, run_of
from megarl.cli.run.convert import positive


def add_eval(commands: Commands) -> None:
    summary = (
        "sample from a model on a data file and score it: mean and pass@k with standard errors; saves every "
        "sample"
    )
    parser = commands.add_parser("eval", help=summary, description=summary, allow_abbrev=False)
    _add_model(parser)

    add_overrides(parser, "such as rollout.engine=sglang or data.columns.prompt=question")

    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a run's configuration; the default is that of the run that produced the model, if any",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        action="append",
        help="file of prompts, as for training; the default is data.val_files",
    )
    parser.add_argument(
        "--reward",
        metavar="FILE.py:NAME",
        help="a reward function to use instead of the configuration's functions, judges and reward model",
    )

    parser.add_argument("--n", metavar="N", type=int, help="samples per prompt (rollout.validation.n)")
    parser.add_argument(
        "--temperature", metavar="T", type=float, help="0 is greedy (rollout.validation.temperature)"
    )
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, help="maximum tokens of a response (data.max_response_length)"
    )
    parser.add_argument(
        "--against",
        metavar="DIR",
        help="the folder of another evaluation of the same prompts to compare with",
    )

    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder for the results; the default is a new folder in the run's folder, or in outputs",
    )
    parser.add_argument("--json", action="store_true", help="print the results as one JSON document")

    parser.set_defaults(start=lambda parsed: run_of("run.eval")(parsed))


def add_generate(commands: Commands) -> None:
    summary = "generate from prompts, or chat, with a model folder or a run's checkpoint"
    parser = commands.add_parser("generate", help=summary, description=summary, allow_abbrev=False)
    _add_model(parser)
    _add_prompts_and_sampling(parser)
    parser.add_argument("--log-probs", action="store_true", help="also print each token with its log-prob")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per answer, each on a line"
    )
    _add_episode(parser)
    parser.set_defaults(start=_start_generate)


def _add_prompts_and_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts",
        metavar="PROMPT",
        nargs="*",
        help="prompts; by default standard input, or a chat on a terminal",
    )

    parser.add_argument("--lines", action="store_true", help="treat each line of standard input as a prompt")
    parser.add_argument(
        "--system",
        metavar="TEXT",
        help="system message; the default is that of the model's chat template",
    )

    parser.add_argument("--n", metavar="N", type=int, default=1, help="samples per prompt")
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help="the default is 0 (greedy)"
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="nucleus sampling: probability mass of the tokens to sample from",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        help="maximum tokens of an answer; the default is 256, or fewer if the model's context is shorter",
    )

    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end an answer at this string, which is removed; may be repeated",
    )

    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the sampling")


def _add_episode(parser: argparse.ArgumentParser) -> None:
    """Add the options for episodes with tools or an environment."""
    parser.add_argument(
        "--tool",
        metavar="TOOL",
        action="append",
        default=[],
        help="a tool: calculator, or FILE.py:NAME; may be repeated",
    )

    parser.add_argument(
        "--environment",
        metavar="FILE.py:NAME",
        help="a class that answers the model's turns, instead of tools",
    )

    parser.add_argument(
        "--parser",
        metavar="NAME",
        help="SGLang parser of tool calls, such as llama3; the default is <tool_call> JSON",
    )
    parser.add_argument(
        "--agent",
        metavar="CONFIG",
        help="configuration of a run whose tools or environment, limits and parser to use",
    )

    parser.add_argument(
        "--max-turns",
        metavar="N",
        type=positive,
        help="maximum turns of the model with tools or an environment; the default is that of --agent, or 8",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face folder or hub name, a run's trainer.output_dir, or a run's checkpoint",
    )
    parser.add_argument(
        "--step",
        metavar="STEP",
        default="latest",
        help="which of a run's checkpoints: latest, best, or a number",
    )


def _start_generate(parsed: argparse.Namespace) -> int:
    return run_of("run.episodes" if parsed.tool or parsed.environment or parsed.agent else "run.generate")(
        parsed
    )
