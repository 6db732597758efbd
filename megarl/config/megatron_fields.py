"""Reads the fields of Megatron-Core's configurations from its source, without importing it.

Importing Megatron takes seconds and loads torch. `megarl check` needs only the names and types of the fields.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Megatron's configurations by the names of megarl's sections: files below megatron/core, and classes in them.
_CLASSES = {
    "transformer": (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
        ("transformer/transformer_config.py", "MLATransformerConfig"),
    ),
    "ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
SECTIONS = tuple(_CLASSES)
# Types of torch, which a configuration gives by name. Megatron's command line has the short names.
DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "uint8": "uint8",
    "fp8": "uint8",
}
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


class Accepted(NamedTuple):
    """The values that a field accepts. A value is accepted if it belongs to one of the kinds.

    Attributes:
        choices: Single values: literals, the names of an enumeration's members, or names of dtypes.
        items: The values that each item of a list accepts, if the field takes lists.
        is_null: Whether null is accepted.
    """

    plain: tuple[type, ...] = ()
    choices: tuple[object, ...] = ()
    items: Accepted | None = None
    is_null: bool = False

    def __contains__(self, value: object) -> bool:
        if value is None:
            return self.is_null
        if isinstance(value, list):
            return self.items is not None and all(item in self.items for item in value)
        # A boolean is an integer for Python, and an integer is a number.
        if any(type(value) is kind or (kind is float and type(value) is int) for kind in self.plain):
            return True
        return any(type(value) is type(choice) and value == choice for choice in self.choices)

    def __str__(self) -> str:
        parts = [_WORDS[kind] for kind in self.plain]
        if self.choices:
            parts.append("one of " + ", ".join(map(str, self.choices)))
        if self.items is not None:
            parts.append(f"a list, each item {self.items}")
        if self.is_null:
            parts.append("null")
        return " or ".join(parts)

    def __or__(self, other: Accepted) -> Accepted:
        return Accepted(
            tuple(dict.fromkeys((*self.plain, *other.plain))),
            tuple(dict.fromkeys((*self.choices, *other.choices))),
            self.items if other.items is None else other.items,
            self.is_null or other.is_null,
        )


def find_megatron() -> Path | None:
    """Return the folder megatron/core of the installed package; None if it is not installed."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    return None if found is None or found.origin is None else Path(found.origin).parent


@cache
def megatron_fields(section: str) -> Mapping[str, Accepted]:
    """Return the fields of one of SECTIONS with the values that each accepts.

    Raises:
        FileNotFoundError: Megatron is not installed.
    """
    folder = find_megatron()
    if folder is None:
        raise FileNotFoundError("megatron-core is not installed")
    enums = _enumerations(folder / "transformer/enums.py")
    return {
        field: _accepted(annotation, enums)
        for file, name in _CLASSES[section]
        for field, annotation in _annotations(folder / file, name)
    }


def _annotations(file: Path, config: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield the fields of a dataclass with their annotations. A name with an underscore is internal."""
    for statement in _body(file, config):
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind) if not name.startswith("_"):
                yield name, kind


def _enumerations(file: Path) -> dict[str, tuple[str, ...]]:
    """Return the names of the members of each enumeration in a file."""
    return {
        node.name: tuple(
            target.id
            for statement in node.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        )
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }


def _body(file: Path, name: str) -> list[ast.stmt]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _accepted(annotation: ast.expr, enums: Mapping[str, tuple[str, ...]]) -> Accepted:
    """Return the values that a type accepts. Types that no file can express accept none."""
    match annotation:
        case ast.Name(id="bool" | "int" | "float" | "str" as name):
            return Accepted(plain=({"bool": bool, "int": int, "float": float, "str": str}[name],))
        case ast.Name(id="list" | "List"):
            # Nothing is known about the items of a bare list.
            anything = Accepted(plain=(bool, int, float, str))
            return Accepted(items=anything._replace(items=anything))
        case ast.Name(id=name) if name in enums:
            return Accepted(choices=enums[name])
        case ast.Constant(value=None):
            return Accepted(is_null=True)
        case ast.Attribute(value=ast.Name(id="torch"), attr="dtype"):
            return Accepted(choices=tuple(DTYPES))
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return _accepted(left, enums) | _accepted(right, enums)
        case ast.Subscript(value=ast.Name(id=name), slice=inside):
            return _accepted_generic(name, inside, enums)
    return Accepted()


def _accepted_generic(name: str, inside: ast.expr, enums: Mapping[str, tuple[str, ...]]) -> Accepted:
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if name == "Literal":
        return Accepted(choices=tuple(part.value for part in parts if isinstance(part, ast.Constant)))

    inner = Accepted(is_null=name == "Optional")
    for part in parts:
        inner |= _accepted(part, enums)
    if name in ("Optional", "Union"):
        return inner
    return Accepted(items=inner) if name in ("List", "list", "Tuple", "tuple") else Accepted()
