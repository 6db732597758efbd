"""Display names of driver phases and worker calls in the timeline of `megarl report`."""

from __future__ import annotations

# Phase of the driver or method of a worker -> display name. Methods that do the same work share a name.
PHASE_NAMES = {
    # Phases of the driver.
    "step": "step",
    "gen": "wait for samples",
    "adv": "compute advantages",
    "update_actor": "train actor",
    "update_weights": "sync weights",
    "testing": "validate",
    "save_checkpoint": "save checkpoint",
    # Every worker.
    "__init__": "start",
    "visible_gpus": "list GPUs",
    "resident_memory_gb": "measure memory",
    # Models that are trained or that score samples.
    "measure_speed": "measure speed",
    "log_probs": "compute log-probs",
    "values": "compute values",
    "update": "train",
    "update_scored": "train",
    "score_conversations": "score",
    "restore_state": "onload",
    "offload_state": "offload",
    "load_checkpoint": "load checkpoint",
    "begin_save": "save checkpoint",
    "save_is_written": "check checkpoint",
    "finish_save": "commit checkpoint",
    "begin_snapshot": "begin snapshot",
    "await_snapshot": "await snapshot",
    "load_snapshot": "load snapshot",
    "wanted_tensors": "load snapshot",
    "load_resharded": "load snapshot",
    "begin_profile": "begin profile",
    "end_profile": "end profile",
    "begin_trace": "begin trace",
    "end_trace": "end trace",
    # The sending side of a weight sync.
    "weights_are_on_cuda": "plan weight sync",
    "reserve_weight_group": "connect weight sync",
    "join_weight_group": "connect weight sync",
    "join_patch_folder": "connect weight sync",
    "serve_weights": "prepare weights",
    "relay_weights": "relay weights",
    "send_weights": "send weights",
    "write_weight_files": "write weights",
    "write_weight_patches": "write weights",
    "weight_checksums": "checksum weights",
    "forget_acknowledged_weights": "plan weight sync",
    "leave_weights": "disconnect weight sync",
    "end_weights": "disconnect weight sync",
    # Engines.
    "submit_and_poll": "generate",
    "abort": "cancel requests",
    "interrupt": "wake",
    "wake": "onload",
    "wake_cache": "onload KV cache",
    "sleep": "offload",
    "needed_slices": "plan weight sync",
    "join_weights": "connect weight sync",
    "receive_weights": "receive weights",
    "load_folder": "load weights",
    "checksums": "checksum weights",
    "weight_version": "check weight version",
    "acknowledged_version": "check weight version",
    "process_ids": "list processes",
    # Reward functions.
    "score": "score",
    "endpoint": "start judge",
    "serve": "serve judge",
    "use_judges": "connect judges",
    "begin": "start scoring",
    "scored": "collect scores",
    "forget": "drop scores",
    "finish": "collect scores",
    # Environments of agents.
    "exchange": "run environment",
}


def phase_name(span_name: str) -> str:
    """Return the readable name of a span. Phases that a user's own worker names keep their names."""
    return PHASE_NAMES.get(span_name, span_name)
