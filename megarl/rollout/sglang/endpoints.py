"""Names of SGLang's calls: the paths of its server, and what they are in its own process."""

from __future__ import annotations

from typing import NamedTuple


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
    "load_lora_adapter_from_tensors": Endpoint(
        "LoadLoRAAdapterFromTensorsReqInput", "load_lora_adapter_from_tensors"
    ),
    "update_weight_version": Endpoint("UpdateWeightVersionReqInput", "update_weight_version"),
    "release_memory_occupation": Endpoint("ReleaseMemoryOccupationReqInput", "release_memory_occupation"),
    "resume_memory_occupation": Endpoint("ResumeMemoryOccupationReqInput", "resume_memory_occupation"),
}
