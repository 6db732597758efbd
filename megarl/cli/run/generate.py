"""`megarl generate MODEL`: generates from prompts without Ray.

The prompts come from the command line, standard input or a chat.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.agents.trajectory import Sample
from megarl.cli.run.named_model import NamedModel, find_model, hugging_face_folder
from megarl.config.schema import Device, DType, LossyText, ModelConfig, RolloutConfig
from megarl.data.tokenizer import Tools, load_tokenizer
from megarl.data.whole_chat import render_whole
from megarl.machine.strict_json import dump_readable
from megarl.models.layers import routes_tokens
from megarl.rollout.hf.engine import HFEngine
from megarl.rollout.interface import (
    GenerationRequest,
    RolloutEngineSpec,
    SamplingParameters,
    check_request,
    plan_requests,
)
from megarl.weights.manifest import manifest_of_folder

_Messages = list[dict[str, Any]]
_MAX_TOKENS = 256  # default limit of an answer


def run(**options: Any) -> int:
    """Print the model's answers, or episodes with tools or an environment, and return 0.

    Raises:
        ValueError: The model, prompts or options are invalid. Raised before weights are loaded.
    """
    parsed = argparse.Namespace(**options)
    if parsed.tool or parsed.environment or parsed.agent:
        return importlib.import_module("megarl.cli.run.episodes").run(parsed)
    is_chat = not parsed.prompts and sys.stdin.isatty()
    if is_chat and (parsed.n > 1 or parsed.json):
        raise ValueError("--n and --json require prompts; a chat has one text answer at a time")
    chats = [] if is_chat else read_chats(parsed)
    writer = Writer(find_model(Path(parsed.model), parsed.step), parsed)
    prompts = [writer.render(chat) for chat in chats]
    writer.load()

    if is_chat:
        _chat(writer, parsed)
    else:
        _print(writer, chats, writer.write(prompts), parsed)

    return 0


def read_chats(parsed: argparse.Namespace) -> list[_Messages]:
    """Return each prompt as a conversation.

    Raises ValueError if there are none, or if all `n` samples of a prompt would be identical.
    """
    if parsed.n > 1 and parsed.temperature == 0:
        raise ValueError(
            f"--n is {parsed.n}, but greedy samples of a prompt are identical; set --temperature above 0, "
            "such as 1"
        )
    return [_opened(parsed.system, prompt) for prompt in parsed.prompts or _read_input(parsed.lines)]


def _opened(system: str | None, prompt: str) -> _Messages:
    return [
        *([] if system is None else [{"role": "system", "content": system}]),
        {"role": "user", "content": prompt},
    ]


def _read_input(by_lines: bool) -> list[str]:
    """Read prompts from standard input. Raises ValueError if it is empty."""
    text = sys.stdin.read()
    prompts = [line for line in text.splitlines() if line.strip()] if by_lines else [text.rstrip("\n")]

    if not any(prompt.strip() for prompt in prompts):
        raise ValueError(
            "no prompt is given, and standard input is empty; use `megarl generate MODEL 'a prompt'`"
        )

    return prompts


class Writer:
    """A model in this process, in float32 on CPU and in bfloat16 on a GPU.

    Raises ValueError for invalid options.
    """

    def __init__(self, model: NamedModel, parsed: argparse.Namespace) -> None:
        if routes_tokens(model.source.architecture):
            raise ValueError(
                f"{model.source.folder}: is a mixture-of-experts model, which `megarl generate` does not "
                f"support; use `megarl eval {parsed.model} --data FILE rollout.engine=sglang`"
            )
        self._model = model
        self.tokenizer = load_tokenizer(str(model.source.companions), key="MODEL")
        self._stop_texts: Sequence[str] = parsed.stop
        self._is_limit_given = parsed.max_tokens is not None
        self._sampling = SamplingParameters(
            n=parsed.n,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            max_new_tokens=_MAX_TOKENS if parsed.max_tokens is None else parsed.max_tokens,
            stop_token_ids=(self.tokenizer.eos_token_id,),
            seed=parsed.seed,
        )

    def render(self, chat: _Messages, tools: Tools = None) -> list[int]:
        """Return the token ids of a conversation with the generation prompt.

        Raises ValueError if it does not fit the model's context or the chat template cannot render it.
        """
        ids = render_whole(self.tokenizer, chat, LossyText.refuse, for_generation=True, tools=tools)
        architecture = self._model.source.architecture
        (request, *_) = self.requests([ids])
        check_request(request, architecture.vocab_size, architecture.row_limit.tokens)

        return ids

    def _fitting(self, prompts: Sequence[list[int]]) -> SamplingParameters:
        room = self._model.source.architecture.row_limit.tokens - max(map(len, prompts))
        return (
            self._sampling
            if self._is_limit_given or room >= _MAX_TOKENS
            else replace(self._sampling, max_new_tokens=max(1, room))
        )

    def requests(self, prompts: Sequence[list[int]]) -> list[GenerationRequest]:
        """Return `n` results per prompt, those of a prompt in sequence."""
        return plan_requests(prompts, self._fitting(prompts))

    def sample(self, request: GenerationRequest) -> Sample:
        self._engine.submit([request])
        ((_, sample),) = self._engine.collect(wait_s=0.0)
        return sample

    def load(self) -> None:
        """Load the weights, and print the device and the time to standard error."""
        start_s = time.monotonic()
        device, dtype = (
            (Device.cuda, DType.bfloat16) if torch.cuda.is_available() else (Device.cpu, DType.float32)
        )
        config = ModelConfig(path=str(self._model.source.companions), dtype=dtype)
        is_ended = self._has_stop_text if self._stop_texts else None
        self._engine = HFEngine(
            RolloutEngineSpec(model=config, rollout=RolloutConfig(), device=device), is_ended
        )

        # Convert a Megatron checkpoint to a temporary Hugging Face folder.
        with hugging_face_folder(self._model, getattr(torch, dtype.value)) as folder:
            self._engine.begin_weight_update(manifest_of_folder(folder))
            self._engine.load_folder(folder)
            self._engine.end_weight_update(1)

        seconds = time.monotonic() - start_s
        print(
            f"{self._model.source.folder}: {dtype.value} on {device.value}, loaded in {seconds:.1f} s",
            file=sys.stderr,
        )

    def write(self, prompts: Sequence[list[int]]) -> list[tuple[str, Sample]]:
        """Return `n` results per prompt, those of a prompt in sequence.

        The text of each ends before a stop string, and has no special tokens; the sample has all tokens.
        """
        written = []
        for sample in self._engine.generate(prompts, self._fitting(prompts)):
            text = self._text(sample.token_ids.tolist())
            # The earliest stop string ends the answer; it may start inside a token.
            end = min(
                (start for stop in self._stop_texts if (start := text.find(stop)) >= 0), default=len(text)
            )
            written.append((text[:end], sample))

        return written

    def show(self, text: str, sample: Sample, with_log_probs: bool) -> None:
        """Print the text of a sample, and the log-prob of each of its tokens if that is asked for."""
        print(text, flush=True)
        rows = zip(sample.log_probs.tolist(), sample.token_ids.tolist(), strict=True)
        for log_prob, token_id in rows if with_log_probs else ():
            print(f"{log_prob:10.4f}  {self.tokenizer.decode([token_id])!r}")

    def _has_stop_text(self, token_ids: list[int]) -> bool:
        text = self._text(token_ids)
        return any(stop in text for stop in self._stop_texts)

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def _print(
    writer: Writer,
    chats: Sequence[_Messages],
    written: Sequence[tuple[str, Sample]],
    parsed: argparse.Namespace,
) -> None:
    for index, (text, sample) in enumerate(written):
        chat = chats[index // parsed.n]
        number = index % parsed.n
        if parsed.json:
            values: dict[str, Any] = {
                "messages": chat,
                "sample": number,
                "text": text,
                "finish_reason": sample.finish_reason,
            }
            if parsed.log_probs:
                values["token_ids"] = sample.token_ids.tolist()
                values["log_probs"] = sample.log_probs.tolist()
            print(dump_readable(values))
            continue
        if len(written) > 1:
            print(f"--- {chat[-1]['content']}" + (f" [{number + 1} of {parsed.n}]" if parsed.n > 1 else ""))
        writer.show(text, sample, parsed.log_probs)


def _chat(writer: Writer, parsed: argparse.Namespace) -> None:
    """Chat until the end of the input."""
    import readline  # noqa: F401, PLC0415  (enables line editing and history in `input`)

    print("an empty line starts a new chat, Ctrl-D exits", file=sys.stderr)
    chat: _Messages = []

    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if not line.strip():
            chat = []
            continue
        # The whole conversation is rendered again for each turn.
        chat = [*chat, {"role": "user", "content": line}] if chat else _opened(parsed.system, line)
        ((text, sample),) = writer.write([writer.render(chat)])
        writer.show(text, sample, parsed.log_probs)
        chat.append({"role": "assistant", "content": text})
