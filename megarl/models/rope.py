"""Read the rotary position embedding from `config.json`: the base frequency and Llama 3's scaling."""

from __future__ import annotations

from megarl.models.architecture import RopeScaling
from megarl.models.config_reader import ConfigReader

_ALWAYS_KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_FIELDS_OF_TYPE = {
    "default": _ALWAYS_KNOWN,
    "llama3": {*_ALWAYS_KNOWN, *RopeScaling.__dataclass_fields__},
}


def read_rope(
    reader: ConfigReader,
    max_position_embeddings: int,
    default_theta: float,
) -> tuple[float, RopeScaling | None]:
    """Read the base frequency and the scaling of the rotary embedding.

    transformers v5 keeps both in `rope_parameters`. v4 has `rope_theta` at the top level and the scaling in
    `rope_scaling`, whose type may be named `type`.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(reader.take(name), dict | None):
            reader.problems.append(f"field {name!r} is {reader.fields[name]!r}, but must be an object")
            return default_theta, None

    # Choose the object to read, and merge the top-level field of v4 into it.
    older = reader.fields.get("rope_scaling")
    newer = reader.fields.get("rope_parameters")
    name = "rope_scaling" if older else "rope_parameters"

    if older and newer not in (None, {}, older):
        both = "fields 'rope_scaling' and 'rope_parameters'"
        reader.problems.append(f"{both} are both given and differ; keep one")

    # A separate reader collects these problems, so that they can name the object that contains the field.
    rope = ConfigReader({"rope_theta": reader.take("rope_theta")} | (reader.fields.get(name) or {}))

    # transformers v4 used either name for the type, and both may be present.
    rope_type = rope.fields.get("rope_type", rope.fields.get("type", "default"))

    if rope.fields.get("type", rope_type) != rope_type:
        differing = f"'rope_type' {rope_type!r} and 'type' {rope.fields['type']!r}"
        rope.problems.append(f"fields {differing} differ; keep one")

    # The base frequency may be given inside the object, at the top level, or in both places.
    rope_theta = rope.number("rope_theta", float, default_theta)
    outer_theta = reader.fields.get("rope_theta")

    if outer_theta is not None and outer_theta != rope.fields["rope_theta"]:
        differing = f"{rope.fields['rope_theta']!r} here and {outer_theta!r} at the top"
        rope.problems.append(f"field 'rope_theta' is {differing}; keep one")

    scaling = None
    if not isinstance(rope_type, str) or rope_type not in _FIELDS_OF_TYPE:
        rope.problems.append(f"field 'rope_type' is {rope_type!r}; supported: {', '.join(_FIELDS_OF_TYPE)}")
    else:
        # A field that the type does not use may imply another embedding, so it is not ignored.
        for extra in sorted(set(rope.fields) - _FIELDS_OF_TYPE[rope_type]):
            rope.refuse(extra, f"rope_type {rope_type!r} is not known to use it")
        if rope_type == "llama3":
            scaling = _read_llama3_scaling(rope, max_position_embeddings)

    if rope.fields.get("partial_rotary_factor") not in (None, 1):
        rope.refuse("partial_rotary_factor", "only 1 is supported")

    # The message names the object, unless the field is at the top level.
    is_nested = name in reader.fields
    reader.problems.extend(f"{name}: {problem}" if is_nested else problem for problem in rope.problems)

    return rope_theta, scaling


def _read_llama3_scaling(rope: ConfigReader, max_position_embeddings: int) -> RopeScaling:
    original = rope.number("original_max_position_embeddings", int, max_position_embeddings)
    scaling = RopeScaling(
        factor=rope.number("factor", float),
        low_freq_factor=rope.number("low_freq_factor", float),
        high_freq_factor=rope.number("high_freq_factor", float),
        original_max_position_embeddings=original,
    )

    if not rope.problems and scaling.high_freq_factor <= scaling.low_freq_factor:
        low = f"'low_freq_factor' {scaling.low_freq_factor}"
        rope.problems.append(f"'high_freq_factor' {scaling.high_freq_factor} must be above {low}")

    return scaling
