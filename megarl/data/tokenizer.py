"""The tokenizer of a Hugging Face folder, and what a chat becomes as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from torch import Tensor


def load_tokenizer(path: str, trust_remote_code: bool = False, key: str = "model.path") -> PreTrainedTokenizerBase:
    """The tokenizer in a local folder, with an end token, a chat template and a pad token. `key`: what names the folder, for messages.

    Without a pad token the end token takes its place: every mask is explicit here, so the padding's id has no meaning.
    Raises ValueError for a folder without a tokenizer, an end token or a chat template.
    """
    if not Path(path).is_dir():
        raise ValueError(f"{key}={path!r} is not a folder; download the model first, for example with `hf download NAME --local-dir DIR`")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}={path!r}: the folder's tokenizer cannot be loaded; copy the tokenizer's files into it: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{key}={path!r}: the tokenizer has no end token; set eos_token in tokenizer_config.json")
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{key}={path!r}: the tokenizer has no chat template, so chats cannot be rendered; "
            "put chat_template.jinja (an instruct model of the family has one) into the folder"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], *, for_generation: bool) -> list[int]:
    """Token ids of a chat by the tokenizer's template; `for_generation` appends what opens the assistant's answer.

    Raises ValueError where the template refuses the messages (roles in an order it does not allow, for instance).
    """
    try:
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=for_generation, tokenize=True, return_dict=False)
    except TemplateError as error:
        roles = [message["role"] for message in messages]
        raise ValueError(f"the chat template refuses messages of the roles {roles}: {error}") from error


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> dict[int, str]:
    """What each token writes by itself, a space before a word included; a part of a character is the replacement character."""
    texts = {}
    for number, token in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        text = str(tokenizer.decode([number], skip_special_tokens=False))
        has_space = isinstance(token, str) and token.startswith("\u2581")  # SentencePiece's, which decoding takes from the first word
        texts[number] = f" {text}" if has_space and not text.startswith(" ") else text
    return texts


def decode_rows(tokenizer: PreTrainedTokenizerBase, ids: Tensor, mask: Tensor) -> list[str]:
    """The texts of the tokens of `ids` (B, R) at which `mask` (B, R) holds, without special ones."""
    return [str(tokenizer.decode(row[kept], skip_special_tokens=True)) for row, kept in zip(ids, mask, strict=True)]
