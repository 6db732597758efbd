"""Read the rotary position embedding (RoPE) from `config.json`: base frequency, scaling, partial rotation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from megarl.models.architecture import (
    Architecture,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from megarl.models.config_reader import OF_CLASS, ConfigReader

_OUTER_FIELDS = ("rope_theta", "partial_rotary_factor")  # at the top level in transformers v4
_BASE_FIELDS = {"rope_type", "type", *_OUTER_FIELDS}
_LAYER_TYPES = {"full_attention", "sliding_attention"}

# Types that are refused for a reason that a user should know.
_REFUSED_TYPES = {
    "dynamic": "its frequencies depend on the longest row of a batch, so a token's log-prob would depend on "
    "the other rows; use yarn, as published models do",
    "longrope": "its frequencies depend on the length of a row, and packed rows share one set",
    "proportional": "rotating the first pairs of both halves of a head is not implemented",
    "mrope": "positions in three axes are those of a model of images, which megarl does not train yet",
}


def read_rope(
    reader: ConfigReader, max_position_embeddings: int, *, rotates_parts: bool = False
) -> tuple[float, RopeScaling | None, float]:
    """Read the rotary embedding: the base frequency, the scaling, and the rotated fraction of a head.

    transformers v5 keeps all of it in `rope_parameters`. v4 has `rope_theta` and `partial_rotary_factor` at
    the top level and the scaling in `rope_scaling`, whose type may be named `type`. A folder without both
    objects has the scaling of transformers' class.

    Args:
        max_position_embeddings: The original context length of a scaling that does not name one.
        rotates_parts: Whether heads may be rotated in part although transformers' class has no default of
            the fraction.
    """
    of_class = reader.defaults.get("rope_parameters", {})
    if rotates_parts:
        of_class = {"partial_rotary_factor": 1.0} | of_class
    for name in _OUTER_FIELDS:
        reader.take(name)
    outer = {name: reader.fields[name] for name in _OUTER_FIELDS if name in reader.fields}

    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(reader.take(name), dict | None):
            reader.problems.append(f"field {name!r} is {reader.fields[name]!r}, but must be an object")
            return 1.0, None, 1.0

    # Choose the object to read, and merge the top-level fields of v4 into it.
    older = reader.fields.get("rope_scaling")
    newer = reader.fields.get("rope_parameters")
    name = "rope_scaling" if older else "rope_parameters"

    if older and newer not in (None, {}, older):
        both = "fields 'rope_scaling' and 'rope_parameters'"
        reader.problems.append(f"{both} are both given and differ; keep one")

    inner = older or newer
    if inner is None:
        inner = {field: value for field, value in of_class.items() if field not in _OUTER_FIELDS}

    # A separate reader collects these problems, so that they can name the object that contains the field.
    rope = ConfigReader(outer | inner, defaults=of_class)
    scaling = _read_scaling(rope, max_position_embeddings)
    theta = rope.number("rope_theta", float, OF_CLASS)
    rotated = _read_partial_rotary_factor(rope)

    # A field may be given inside the object, at the top level, or in both places.
    for field, value in outer.items():
        if value is not None and value != rope.fields[field]:
            differing = f"{rope.fields[field]!r} here and {value!r} at the top"
            rope.conflict(f"field {field!r} is {differing}; keep one", field)

    # The message names the object, unless the field is at the top level.
    is_nested = name in reader.fields
    reader.problems.extend(f"{name}: {problem}" if is_nested else problem for problem in rope.problems)
    reader.invalid |= {field for field in rope.invalid if outer.get(field) is not None}

    return theta, scaling, rotated


def has_rope_by_layer_type(reader: ConfigReader) -> bool:
    """Return whether layers with a sliding window have a rotary embedding of their own."""
    return not _LAYER_TYPES.isdisjoint(reader.defaults.get("rope_parameters", {}))


def read_ropes_by_layer_type(
    reader: ConfigReader, max_position_embeddings: int, local_theta_field: str | None
) -> tuple[tuple[float, RopeScaling | None, float], tuple[float, RopeScaling | None]]:
    """Read the rotary embedding of full attention, and that of layers with a sliding window.

    transformers v5 keeps both in `rope_parameters` by the type of a layer. v4 has the fields of full
    attention where `read_rope` reads them; layers with a window have another base frequency at most.

    Args:
        max_position_embeddings: The original context length of a scaling that does not name one.
        local_theta_field: The field of v4 that has the base frequency of layers with a window; None if v4
            has none.
    """
    of_class = reader.defaults["rope_parameters"]
    full = of_class["full_attention"]
    sliding = of_class["sliding_attention"]
    if local_theta_field in reader.fields:
        sliding = sliding | {"rope_theta": reader.number(local_theta_field, float)}

    both = reader.fields.get("rope_parameters")
    if not isinstance(both, dict) or not _LAYER_TYPES & both.keys():
        rope = read_rope(replace(reader, defaults={"rope_parameters": full}), max_position_embeddings)
        return rope, (sliding["rope_theta"], None)

    # Each type of layer has an object like that of other models. Fields of v4 may be left at the top level.
    for name in ("rope_parameters", "rope_theta"):
        reader.take(name)
    if reader.take("rope_scaling") is not None:
        reader.refuse("rope_scaling", "'rope_parameters' is given too; keep one")
    for name in sorted(both.keys() - _LAYER_TYPES):
        reader.problems.append(f"rope_parameters: field {name!r} is not one of {sorted(_LAYER_TYPES)}")

    ropes = []
    for layer_type, defaults in (("full_attention", full), ("sliding_attention", sliding)):
        part = ConfigReader({"rope_parameters": both.get(layer_type)}, defaults={"rope_parameters": defaults})
        ropes.append(read_rope(part, max_position_embeddings))
        reader.problems.extend(f"{layer_type} of {problem}" for problem in part.problems)

    full_rope, (theta, scaling, _) = ropes
    return full_rope, (theta, scaling)


def _read_partial_rotary_factor(rope: ConfigReader) -> float:
    """Read the rotated fraction of a head. Families whose class has no default always rotate whole heads."""
    if "partial_rotary_factor" not in rope.defaults:
        if rope.fields.get("partial_rotary_factor") not in (None, 1):
            rope.refuse("partial_rotary_factor", "only 1 is supported by this family")
        return 1.0

    return rope.number("partial_rotary_factor", float, OF_CLASS, at_most=1.0)


def _read_scaling(rope: ConfigReader, max_position_embeddings: int) -> RopeScaling | None:
    """Read the scaling of the object that contains it. None for `rope_type: default`."""
    # transformers v4 used either name for the type, and both may be present.
    rope_type = rope.fields.get("rope_type", rope.fields.get("type", "default"))

    if rope.fields.get("type", rope_type) != rope_type:
        differing = f"'rope_type' {rope_type!r} and 'type' {rope.fields['type']!r}"
        rope.problems.append(f"fields {differing} differ; keep one")

    if not isinstance(rope_type, str) or rope_type not in _SCALINGS:
        reason = f"; {_REFUSED_TYPES[rope_type]}" if rope_type in _REFUSED_TYPES else ""
        supported = f"supported: {', '.join(_SCALINGS)}"
        rope.problems.append(f"field 'rope_type' is {rope_type!r}{reason}; {supported}")
        return None

    # A field that the type does not use may imply another embedding, so it is not ignored.
    fields, read = _SCALINGS[rope_type]
    for extra in sorted(set(rope.fields) - _BASE_FIELDS - fields):
        rope.refuse(extra, f"rope_type {rope_type!r} is not known to use it")

    return read(rope, max_position_embeddings)


def _read_llama3(rope: ConfigReader, max_position_embeddings: int) -> Llama3Scaling:
    original = rope.number("original_max_position_embeddings", int, max_position_embeddings)
    scaling = Llama3Scaling(
        factor=rope.number("factor", float),
        low_freq_factor=rope.number("low_freq_factor", float),
        high_freq_factor=rope.number("high_freq_factor", float),
        original_max_position_embeddings=original,
    )

    if scaling.high_freq_factor <= scaling.low_freq_factor:
        rope.conflict(
            f"'high_freq_factor' {scaling.high_freq_factor} must be above "
            f"'low_freq_factor' {scaling.low_freq_factor}",
            "high_freq_factor",
            "low_freq_factor",
        )

    return scaling


def _read_yarn(rope: ConfigReader, max_position_embeddings: int) -> YarnScaling:
    original = rope.number("original_max_position_embeddings", int, max_position_embeddings)
    factor = rope.number("factor", float)
    mscale = rope.number("mscale", float, None)
    mscale_all_dim = rope.number("mscale_all_dim", float, None)
    attention_factor = _default_attention_factor(factor, mscale, mscale_all_dim)

    scaling = YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", float, 32.0),
        beta_slow=rope.number("beta_slow", float, 1.0),
        truncate=rope.flag("truncate") if "truncate" in rope.fields else True,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        attention_factor=rope.number("attention_factor", float, attention_factor),
    )

    # Kimi-K2 has the same number twice.
    if scaling.beta_fast < scaling.beta_slow:
        rope.conflict(
            f"'beta_fast' {scaling.beta_fast} must be at least 'beta_slow' {scaling.beta_slow}",
            "beta_fast",
            "beta_slow",
        )

    return scaling


def _default_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return YaRN's factor of cosine and sine if the folder does not give it."""
    if mscale is None or mscale_all_dim is None:
        return yarn_magnitude(factor, 1.0)
    return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)


def yarn_magnitude(factor: float, coefficient: float) -> float:
    """Return 0.1 * coefficient * ln(factor) + 1, the magnitude of a context `factor` times as long."""
    return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1 else 1.0


# The supported types, with the fields that each uses besides those of every type.
_SCALINGS: dict[str, tuple[set[str], Callable[[ConfigReader, int], RopeScaling | None]]] = {
    "default": (set(), lambda rope, longest: None),
    "linear": ({"factor"}, lambda rope, longest: LinearScaling(factor=rope.number("factor", float))),
    "llama3": (set(Llama3Scaling.__dataclass_fields__), _read_llama3),
    "yarn": (set(YarnScaling.__dataclass_fields__), _read_yarn),
}


def extended_context(scaling: RopeScaling | None) -> int:
    """Return the number of tokens to which YaRN extends the context; 0 without YaRN."""
    if not isinstance(scaling, YarnScaling):
        return 0
    return int(scaling.factor * scaling.original_max_position_embeddings)


def sglang_rope_differs(architecture: Architecture) -> Iterator[str]:
    """Yield what SGLang's rotary embedding would compute differently.

    SGLang does not read `attention_factor`. Its fused kernel of mixture-of-experts models takes `factor` from
    the ratio of the context lengths.
    """
    scaling = architecture.rope_scaling
    if not isinstance(scaling, YarnScaling):
        return

    used = _default_attention_factor(scaling.factor, scaling.mscale, scaling.mscale_all_dim)
    if not math.isclose(used, scaling.attention_factor, rel_tol=1e-6):
        yield f"a YaRN attention_factor of {scaling.attention_factor:.6g}, for which it uses {used:.6g}"

    ratio = architecture.max_position_embeddings / scaling.original_max_position_embeddings
    if architecture.experts is not None and ratio != scaling.factor:
        yield f"a YaRN factor of {scaling.factor:g}, for which it uses the ratio of the contexts {ratio:g}"
