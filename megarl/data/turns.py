"""What stands between two answers of a model in one conversation, as token ids.

A conversation is told to a model as it grew: the prompt, what the model wrote up to its end token, a bridge, what it wrote next. Nothing
that was written is rendered or tokenised a second time, so a template that renders an earlier answer otherwise (that drops its thinking
part, say) changes nothing: a model is trained on what it is given when it generates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl.data.tokenizer import encode_rendered, rendered_chat

_ANSWER = "an-answer-0c1d"  # stands for whatever the model wrote


class TurnTemplate:
    """Of a tokenizer's chat template, for conversations in which the model is told of `tools`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._tokenizer = tokenizer
        self._tools = tools

    def bridge(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of the messages that follow an answer, from behind its end token to where the next answer begins.

        Raises ValueError where the template does not close an answer with the end token, or refuses the messages.
        """
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}, *messages]
        text = rendered_chat(self._tokenizer, chat, for_generation=True, tools=self._tools)
        before, answer, after = text.rpartition(_ANSWER)
        # The end token stays in front while the rest is tokenised: some tokenizers treat the beginning of a text in another way.
        token_ids = encode_rendered(self._tokenizer, after)
        if not answer or _ANSWER in before or token_ids[:1] != [self._tokenizer.eos_token_id]:
            raise ValueError(
                f"the chat template does not write an earlier answer followed at once by the end token {self._tokenizer.eos_token!r}, so "
                f"nothing can be put behind what the model wrote; it writes {after[:40]!r}. Use a template that does, or set the "
                "tokenizer's eos_token to what its chat template ends an answer with"
            )
        return token_ids[1:]
