"""The definition of a model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.class_defaults import CLASS_DEFAULTS
from megarl.models.config_reader import ConfigReader
from megarl.models.mapping import MappingRow, layer_of
from megarl.models.vision import Vision


def stored_name(name: str, prefixes: Mapping[str, str]) -> str:
    """Return the name in a folder of a parameter of transformers' class, given `Family.module_prefixes`."""
    found = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return name if found is None else prefixes[found] + name.removeprefix(found)


class SGLangStages(Enum):
    """How SGLang distributes a model of a family over pipeline stages."""

    plain = "plain"
    ties = "ties"  # the last stage has a copy of a tied embedding; otherwise it has no output layer
    head_on_every = "head_on_every"  # every stage has an untied output layer, although only the last uses it


@dataclass(frozen=True, kw_only=True)
class Family:
    """All models of one `model_type`.

    Attributes:
        model_type: The field of `config.json` that names the family.
        class_prefix: The prefix of the names in `architectures`, such as Qwen2 for Qwen2ForCausalLM.
        lm_class: The suffix of the language model's class in `architectures`.
        read: Creates an Architecture from the fields. It reads them one by one and adds a line to the
            reader's `problems` for each field that it cannot honor. Fields that were not read are refused by
            name.
        rows: The tensor table of the family, without output layers and vision towers.
        kept: Beginnings of the names of tensors that are not trained but kept (see weights/kept_tensors.py),
            with what they are: layers that predict further tokens, if these are not layers after the last
            one, and the vision tower of models whose images megarl does not read. `{layer}` stands for the
            number of any layer.
        tower_rows: The rows of a vision tower, for families that read images.
        module_prefixes: Prefixes of the parameters of transformers' class, with those of the tensors in
            folders, where they differ.
        example_fields: The fields of a tiny `config.json`, without those that name the family.
        sglang_class: Whether SGLang has a class of the family.
        sglang_stages: How SGLang distributes a model over pipeline stages, None if it cannot, or if megarl
            has no test of it.
        sglang_groups: Whether SGLang's class computes attention in groups of an engine's ranks.
        sglang_fields: Fields of `config.json` that SGLang requires and transformers v5 no longer writes, with
            their values. SGLang gets them if the folder lacks them.
        sglang_derived: Returns further such fields, whose values follow from the architecture; None if there
            are none.
        sglang_replaced: Returns fields that SGLang gets with other values, from those of the folder.
        sglang_cpu_class: The class with which SGLang serves a policy on a CPU, where it has no kernels for
            the one that the folder names; None: the latter.
        sglang_differences: What SGLang's class of the family would compute differently, each with the
            condition on the architecture.
        sglang_refuses: Returns which fields of a folder SGLang's class refuses, with the remedy; empty if it
            reads all.
        cpu_engine_lacks: What SGLang's class of the family cannot compute on a CPU, in words, although it
            computes the kinds of its layers there; empty if it computes everything.
        models: The names of the family's models, for docs/models.md.
        limits: What the family does not support, for docs/models.md. The code that refuses it says why.
    """

    model_type: str
    class_prefix: str
    read: Callable[[ConfigReader], Architecture]
    rows: tuple[MappingRow, ...]
    example_fields: dict[str, Any]
    kept: Mapping[str, str] = field(default_factory=dict)
    lm_class: str = "ForCausalLM"
    tower_rows: Callable[[Vision], tuple[MappingRow, ...]] | None = None
    module_prefixes: Mapping[str, str] = field(default_factory=dict)
    sglang_class: bool = True
    sglang_stages: SGLangStages | None = None
    sglang_groups: bool = False
    sglang_fields: Mapping[str, Any] = field(default_factory=dict)
    sglang_derived: Callable[[Architecture], Mapping[str, Any]] | None = None
    sglang_replaced: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda fields: {}
    sglang_cpu_class: str | None = None
    sglang_differences: Mapping[str, Callable[[Architecture], bool]] = field(default_factory=dict)
    sglang_refuses: Callable[[Mapping[str, Any]], str] = lambda fields: ""
    cpu_engine_lacks: str = ""
    models: str = ""
    limits: tuple[str, ...] = ()

    def example(self) -> dict[str, Any]:
        """Return a tiny `config.json`, from which the tests of every family are generated."""
        names = {"architectures": [self.class_prefix + self.lm_class], "model_type": self.model_type}
        return deepcopy({**self.example_fields, **names})

    def sglang_differs(self, architecture: Architecture) -> list[str]:
        """Return what SGLang's class of the family would compute differently."""
        return [name for name, is_so in self.sglang_differences.items() if is_so(architecture)]

    def reader(self, fields: Mapping[str, Any]) -> ConfigReader:
        """Return a reader of a `config.json` of the family."""
        return ConfigReader(dict(fields), defaults=CLASS_DEFAULTS.get(self.model_type, {}))

    def keeps(self, name: str) -> bool:
        """Return whether a tensor is kept without being trained, except layers after the last one."""
        layer = layer_of(name)
        return name.startswith(tuple(beginning.format(layer=layer) for beginning in self.kept))

    def added_for_sglang(self, config: Mapping[str, Any], *, on_cpu: bool = False) -> dict[str, Any]:
        """Return the fields that SGLang gets in addition to `config`, or with other values.

        Args:
            config: The fields of a folder of the family.
            on_cpu: Whether it serves a policy, to which a trainer sends weights, on a CPU.
        """
        required = dict(self.sglang_fields)
        if self.sglang_derived is not None:
            required |= self.sglang_derived(self.read(self.reader(config)))
        missing = {name: value for name, value in required.items() if name not in config}
        if on_cpu and self.sglang_cpu_class is not None:
            missing["architectures"] = [self.sglang_cpu_class]
        return missing | dict(self.sglang_replaced(config))
