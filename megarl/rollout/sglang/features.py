"""Differences between the SGLang versions that megarl supports (0.5.17 to 0.5.23).

They are detected in one place, by feature.

The result is plain data, so that it can be sent to a process that does not import `sglang`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple


class Endpoint(NamedTuple):
    """A call that both modes offer under one name.

    It is a path of the server, or a method of the tokenizer manager in this process.
    """

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
    """Features of an SGLang version.

    Attributes:
        fields: Endpoint -> field names of its request, for the endpoints of this version.
    """

    version: str
    fields: dict[str, list[str]]

    def has(self, endpoint: str) -> bool:
        return endpoint in self.fields

    def payload(self, endpoint: str, **values: Any) -> dict[str, Any]:
        """Return `values` without those for which this version's request has no field."""
        return {name: value for name, value in values.items() if name in self.fields[endpoint]}


def detect() -> Features:
    """Detect the features of the installed SGLang, which is imported."""
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
    """Return the field names of a record.

    Requests and ServerArgs are dataclasses in older versions, msgspec structs in newer ones.
    """
    if dataclasses.is_dataclass(record):
        return [field.name for field in dataclasses.fields(record)]
    return list(record.__struct_fields__)  # type: ignore[attr-defined]
