"""What differs between the versions of SGLang that megarl runs on (0.5.17 to 0.5.23), told apart by what is
there, in one place.

What is detected is plain data, so that a process that does not import `sglang` can be told it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple


class Endpoint(NamedTuple):
    """A call that both modes offer under one name: a path of the server, and here a method of the tokenizer
    manager."""

    request: str  # class in SGLang's io_struct
    method: str


ENDPOINTS = {
    "pause_generation": Endpoint("PauseGenerationReqInput", "pause_generation"),
    "continue_generation": Endpoint("ContinueGenerationReqInput", "continue_generation"),
    "begin_weight_update": Endpoint("BeginWeightUpdateReqInput", "begin_weight_update"),
    "end_weight_update": Endpoint("EndWeightUpdateReqInput", "end_weight_update"),
    "update_weights_from_tensor": Endpoint("UpdateWeightsFromTensorReqInput", "update_weights_from_tensor"),
    "update_weights_from_disk": Endpoint("UpdateWeightFromDiskReqInput", "update_weights_from_disk"),
    "update_weight_version": Endpoint("UpdateWeightVersionReqInput", "update_weight_version"),
    "release_memory_occupation": Endpoint("ReleaseMemoryOccupationReqInput", "release_memory_occupation"),
    "resume_memory_occupation": Endpoint("ResumeMemoryOccupationReqInput", "resume_memory_occupation"),
}


@dataclass(frozen=True)
class Features:
    """fields: endpoint -> names of its request's fields, for the endpoints that this version has."""

    version: str
    fields: dict[str, list[str]]

    def has(self, endpoint: str) -> bool:
        return endpoint in self.fields

    def payload(self, endpoint: str, **values: Any) -> dict[str, Any]:
        """`values` without those that this version's request has no field for."""
        return {name: value for name, value in values.items() if name in self.fields[endpoint]}


def detect() -> Features:
    """Imports SGLang."""
    import sglang
    import sglang.srt.managers.io_struct as requests
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    # An endpoint needs both its request class and the manager's method.
    present = {
        name: field_names(getattr(requests, endpoint.request))
        for name, endpoint in ENDPOINTS.items()
        if hasattr(requests, endpoint.request) and hasattr(TokenizerManager, endpoint.method)
    }

    return Features(sglang.__version__, present)


def field_names(record: type) -> list[str]:
    """Requests and ServerArgs are dataclasses in older versions, msgspec structs in newer ones."""
    if dataclasses.is_dataclass(record):
        return [field.name for field in dataclasses.fields(record)]
    return list(record.__struct_fields__)  # type: ignore[attr-defined]
