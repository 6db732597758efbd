"""What a model family is to the rest of megarl."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.config_reader import ConfigReader
from megarl.models.mapping import MappingRow


def _computes_the_same(architecture: Architecture) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True, kw_only=True)
class Family:
    """All models of one `model_type`.

    Attributes:
        model_type: The field of `config.json` that names the family.
        class_prefix: What the names in `architectures` begin with: Qwen2 of Qwen2ForCausalLM.
        read: Makes an Architecture of the fields. It takes them one by one and adds a line to the reader's
            `problems` for each that it cannot honor; fields that nobody has taken are refused by name.
        rows: The family's tensor table, without output layers.
        example: Returns a tiny `config.json`. The tests of every family are generated from it.
        sglang_differs: Yields what SGLang's class of the family would compute differently.
    """

    model_type: str
    class_prefix: str
    read: Callable[[ConfigReader], Architecture]
    rows: tuple[MappingRow, ...]
    example: Callable[[], dict[str, Any]]
    sglang_differs: Callable[[Architecture], Iterator[str]] = _computes_the_same
