"""The tokenizer of a Hugging Face folder, and the conversion of chats to token ids."""

from __future__ import annotations

import itertools
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megarl.data.chat_clock import clock_arguments
from megarl.machine.errors import counted, one_line
from megarl.machine.files import read_json_object
from megarl.machine.strict_json import UNENCODABLE, is_encodable

if TYPE_CHECKING:
    from megarl.batch.ragged import RaggedTensor

Tools = Sequence[Mapping[str, Any]] | None
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
_JSON_FILES = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(
    path: str, trust_remote_code: bool = False, key: str = "model.path"
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a local folder, with an end token, a chat template and a pad token.

    If it has no pad token, the end token is used: all masks are explicit, so the id of padding has no
    meaning.

    Args:
        key: The configuration key of the folder, for messages.

    Raises:
        ValueError: The folder has no tokenizer, or the tokenizer has no end token, chat template or
            vocabulary, or it has tokens that the model in the folder does not have.
    """
    if not os.path.isdir(path):
        raise ValueError(
            f"{key}={path!r} is not a folder; download the model first, for example with `hf download NAME "
            f"--local-dir DIR`"
        )

    tokenizer = _read_tokenizer(path, trust_remote_code, key)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{key}={path!r}: the tokenizer has no end token; set eos_token in tokenizer_config.json"
        )

    if not isinstance(tokenizer.chat_template, str | dict):  # a dict contains several templates by name
        found = (
            "no chat template"
            if tokenizer.chat_template is None
            else f"{type(tokenizer.chat_template).__name__} as its chat template"
        )
        raise ValueError(
            f"{key}={path!r}: the tokenizer has {found}, so chats cannot be rendered; put "
            "chat_template.jinja (an instruct model of the family has one) into the folder"
        )

    _refuse_foreign(tokenizer, Path(path), key)
    _try_template(tokenizer, f"{key}={path!r}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token

    if tokenizer.is_fast and type(tokenizer.backend_tokenizer.model).__name__ == "BPE":
        # Decoding ignores this for BPE anyway, and warns about it in every process.
        tokenizer.clean_up_tokenization_spaces = False

    return tokenizer


def _read_tokenizer(path: str, trust_remote_code: bool, key: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder. Raises ValueError that names a damaged file."""
    # Read the JSON files first, so that a message can name a damaged one.
    for name in _JSON_FILES:
        try:
            if os.path.isfile(Path(path) / name):
                read_json_object(Path(path) / name)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{key}={path!r}: the folder's tokenizer cannot be loaded; copy its {name} again: it {error}"
            ) from error

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=True
        )
        return tokenizer
    except Exception as error:  # noqa: BLE001
        # The libraries have no specific exception for a file that they cannot use.
        reason = f"{one_line(error)} ({type(error).__name__})"
        raise ValueError(
            f"{key}={path!r}: the folder's tokenizer cannot be loaded; copy the tokenizer's files into it: "
            f"{reason}"
        ) from error


def _refuse_foreign(tokenizer: PreTrainedTokenizerBase, folder: Path, key: str) -> None:
    """Refuse a tokenizer of another model.

    A model may have more embeddings than its tokenizer has tokens, because sizes are rounded up, but not
    fewer.
    """
    # A tokenizer can load without a vocabulary, and then encodes all texts to the same tokens.
    files = sorted(tokenizer.vocab_files_names.values())
    if not any(os.path.isfile(folder / name) for name in files):
        raise ValueError(
            f"{key}={str(folder)!r}: the folder contains no vocabulary ({' or '.join(files)}), so all texts "
            "would be the same to the model; copy tokenizer.json into it: it is missing, for example after "
            "an interrupted download"
        )

    name_of = {index: token for token, index in tokenizer.get_vocab().items()}
    if not os.path.isfile(folder / "config.json"):
        return

    try:
        size = read_json_object(folder / "config.json").get("vocab_size")
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} {error}") from error

    # An id beyond the embedding would otherwise fail in the model, without naming the token.
    if isinstance(size, int) and max(name_of) >= size:
        beyond = sorted(index for index in name_of if index >= size)
        special = [name for name in ("eos_token", "pad_token") if getattr(tokenizer, f"{name}_id") in beyond]
        raise ValueError(
            f"{key}={str(folder)!r}: the tokenizer has {counted(len(beyond), 'token')} that the model "
            f"lacks, whose vocab_size is {size}: {name_of[beyond[0]]!r} is "
            f"{beyond[0]}{f', and it is the {special[0]}' if special else ''}; put the tokenizer that the "
            "model was trained with into the folder"
        )


class TemplateFailureError(ValueError):
    """A chat template cannot be run. The message contains the reason and the fix."""


def _try_template(tokenizer: PreTrainedTokenizerBase, folder: str) -> None:
    """Check that the template can render a minimal chat, because a failure is then not the fault of the data.

    A template may refuse this chat and accept others.
    """
    try:
        rendered_chat(tokenizer, [{"role": "user", "content": "1"}], for_generation=True)
    except TemplateFailureError as error:
        raise ValueError(f"{folder}: {error}") from error
    except ValueError:
        return


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    *,
    for_generation: bool,
    tools: Tools = None,
) -> list[int]:
    """Return the token ids of a chat, rendered with the tokenizer's template.

    Args:
        for_generation: Append the text that opens the assistant's answer.
        tools: The schemas of the tools that the model may call.

    Raises:
        ValueError: The template refuses the messages (for example the order of their roles), or fails.
    """
    return encode_rendered(
        tokenizer, rendered_chat(tokenizer, messages, for_generation=for_generation, tools=tools)
    )


def rendered_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    *,
    for_generation: bool,
    tools: Tools = None,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Render a chat as text, see `render_chat`. `arguments` are further ones of the template.

    Special tokens in the tools, or in a message that is not the assistant's, are escaped with a space: only
    the template writes real ones, so that no text ends a turn or begins another.
    """
    known: list[Any] | None = None if tools is None else [escaped(tokenizer, tool) for tool in tools]
    safe = [_with_plain_text(tokenizer, message) for message in messages]

    try:
        text = tokenizer.apply_chat_template(
            safe,
            tools=known,
            add_generation_prompt=for_generation,
            tokenize=False,
            **clock_arguments(tokenizer),
            **(arguments or {}),
        )
    except TemplateSyntaxError as error:
        raise TemplateFailureError(
            f"the chat template is invalid ({one_line(error)}, line {error.lineno}); fix chat_template.jinja"
        ) from error
    except TemplateError as error:
        roles = [message["role"] for message in messages]
        raise ValueError(
            f"the chat template refuses messages with the roles {roles}: {one_line(error)}"
        ) from error
    except (
        TypeError,
        ArithmeticError,
        LookupError,
        AttributeError,
        ValueError,
        RecursionError,
    ) as error:  # a template is a program
        roles = [message["role"] for message in messages]
        reason = f"{type(error).__name__}: {one_line(error)}"
        message = (
            f"the chat template fails for messages with the roles {roles} ({reason}); fix chat_template.jinja"
        )
        raise TemplateFailureError(message) from error

    assert isinstance(text, str)
    if not is_encodable(text):
        raise ValueError(f"the chat has {UNENCODABLE}; remove it")
    return text


def _with_plain_text(tokenizer: PreTrainedTokenizerBase, message: dict[str, Any]) -> dict[str, Any]:
    return (
        message if message["role"] == "assistant" else escaped(tokenizer, message) | {"role": message["role"]}
    )


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode a text rendered by a template, which contains all special tokens already."""
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids


def lost_text(tokenizer: PreTrainedTokenizerBase, text: str, token_ids: Sequence[int]) -> str | None:
    """Return a description of the text that is lost by encoding and decoding, or None.

    Whitespace, case, and changes by the tokenizer's own normalizer do not count: tokenizers that add spaces
    between words, or that lowercase, do so for every text that their model has seen.
    """
    # A tokenizer written in Python has no backend, and so no normalizer.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = None if backend is None else backend.normalizer
    read = _letters(
        str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    )
    if read in {_letters(text), *([] if normalizer is None else [_letters(normalizer.normalize_str(text))])}:
        return None
    gone = sorted(set(_letters(text)) - set(read))
    what = f"it cannot encode {', '.join(map(repr, gone[:8]))}" if gone else "some of its characters are lost"

    return (
        f"the tokenizer loses text: {what}, and the model would read {in_quotes(read)} for "
        f"{in_quotes(' '.join(text.split()))}; use a model whose tokenizer supports such text, or other rows "
        "(data.lossy=allow accepts them)"
    )


def _letters(text: str) -> str:
    """Return the text without whitespace, including SentencePiece's U+2581, and without case."""
    return "".join(unicodedata.normalize("NFC", text).casefold().replace("\u2581", "").split())


def in_quotes(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> dict[int, str]:
    """Return the text of each token by itself, including a leading space.

    A part of a character is the replacement character.
    """
    texts = {}
    for number, token in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        text = str(tokenizer.decode([number], skip_special_tokens=False))
        # SentencePiece marks a leading space, which decoding removes from the first word.
        has_space = isinstance(token, str) and token.startswith("\u2581")
        texts[number] = f" {text}" if has_space and not text.startswith(" ") else text

    return texts


def token_bytes(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> dict[int, bytes]:
    """Return the bytes of each token by itself, in UTF-8, including a leading space.

    A token can be a part of a character. Vocabularies name such tokens by their bytes, either with one
    printable character for each byte (GPT-2's mapping) or as `<0xE2>` (SentencePiece).
    """
    found = {}
    for number, text in token_texts(tokenizer, ids).items():
        token = tokenizer.convert_ids_to_tokens(number)
        found[number] = text.encode(errors="replace")
        # The replacement character stands for bytes that are no character, or for itself.
        if "\ufffd" in text and isinstance(token, str):
            if fallback := re.fullmatch("<0x([0-9A-F]{2})>", token):
                found[number] = bytes.fromhex(fallback[1])
            elif all(character in _BYTE_OF for character in token):
                found[number] = bytes(_BYTE_OF[character] for character in token)

    return found


def decode_turns(
    tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, wrote: np.ndarray
) -> list[dict[str, str]]:
    """Return the turns of a row (R,) as messages with the roles `assistant` and `environment`.

    Messages of the environment are as rendered by the chat template, without special tokens, and so as the
    model read them.

    Args:
        wrote: (R,), whether the model wrote each token.
    """
    # A turn begins wherever the author of the tokens changes.
    starts = [0, *(np.flatnonzero(np.diff(wrote)) + 1).tolist(), len(ids)]
    return [
        {
            "role": "assistant" if wrote[start] else "environment",
            "content": str(tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=True)),
        }
        for start, end in itertools.pairwise(starts)
    ]


def decode_rows(tokenizer: PreTrainedTokenizerBase, ids: RaggedTensor, mask: RaggedTensor) -> list[str]:
    """Return the texts of the tokens of `ids` where `mask`, of the same lengths, is True.

    Special tokens are omitted.
    """
    return [
        str(tokenizer.decode(row[kept], skip_special_tokens=True))
        for row, kept in zip(ids.each(), mask.each(), strict=True)
    ]


# ---- special tokens in texts: only a chat template may write real ones, so that no text of a user or a tool
# can end a turn


def escaped(tokenizer: PreTrainedTokenizerBase, value: Any) -> Any:
    """Return a nested value of mappings, lists and texts with all special tokens escaped.

    A space after its first character breaks a special token, so that the tokenizer encodes it as plain text.
    """
    if isinstance(value, str):
        pattern = _pattern(tokenizer)
        # A replacement may form another special token, so repeat until there is none.
        while pattern.search(value):
            value = pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", value)
        return value

    if isinstance(value, Mapping):
        return {key: escaped(tokenizer, each) for key, each in value.items()}
    return [escaped(tokenizer, each) for each in value] if isinstance(value, list | tuple) else value


def spelled(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> str | None:
    """Return the first special token that occurs in one of the texts, or None."""
    return next((match[0] for text in texts if (match := _pattern(tokenizer).search(text))), None)


@lru_cache(maxsize=16)
def _pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern of the special tokens, longest first.

    Tokens of one character cannot be broken and are not included.
    """
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    longest_first = sorted((text for text in special if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # the latter matches nothing
