"""Read the field `quantization_config` of a `config.json`: the format in which a folder stores matrices.

A folder in block-scaled FP8 is read as the model in bfloat16 that its values and scales stand for, so the
field does not change the architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.models.config_reader import ConfigReader

BLOCK = 128
FIELD = "quantization_config"
# The field of folders in block-scaled FP8, for SGLang and transformers.
BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}

# The fields that change how stored values are read, with the supported values; None: the field is missing.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "fmt": ("e4m3", "float8_e4m3fn", None),
    "activation_scheme": ("dynamic", None),
    # the values of scales, whose dtype the files contain
    "scale_fmt": ("ue8m0", "float", None),
    "dequantize": (False, None),
}
# Lists of layers: the files show which matrices are quantized.
_LISTS = {"modules_to_not_convert", "ignored_layers", "modules_to_convert"}
_HINT = "convert the folder to bfloat16 or to FP8 in blocks of 128 x 128 first"


def check_quantization(reader: ConfigReader) -> None:
    """Refuse all formats except block-scaled FP8, unless the family has read the field."""
    if FIELD in reader.seen:
        return
    quantization = reader.take(FIELD)
    if quantization is None:
        return
    if not isinstance(quantization, Mapping):
        reader.refuse(FIELD, "must be an object")
        return
    reader.problems.extend(f"field {FIELD!r}: {problem}" for problem in _problems(quantization))


def _problems(quantization: Mapping[str, object]) -> Iterator[str]:
    method = quantization.get("quant_method")
    if method != BLOCK_FP8["quant_method"]:
        yield f"'quant_method' is {method!r}, but only 'fp8' is supported; {_HINT}"
        return

    block = quantization.get("weight_block_size")
    if block != BLOCK_FP8["weight_block_size"]:
        yield f"'weight_block_size' is {block!r}, but only {[BLOCK, BLOCK]} is supported; {_HINT}"

    for name, supported in _FIXED.items():
        if quantization.get(name) not in supported:
            yield f"{name!r} is {quantization[name]!r}, but only {supported[0]!r} is supported; {_HINT}"

    known = {"quant_method", "weight_block_size", *_FIXED, *_LISTS}
    for name in sorted(set(quantization) - known):
        yield f"{name!r} is {quantization[name]!r}, and megarl does not know whether it changes the weights"
