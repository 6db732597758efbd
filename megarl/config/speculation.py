"""Speculative decoding in SGLang: the algorithms that a run may use, and the arguments that configure them.

A draft proposes tokens, and the policy verifies them in one forward pass. Each accepted token is a sample of
the policy, so the draft only decides how many tokens a pass yields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megarl.config.schema import RolloutConfig

SECTION = "rollout.sglang.server_args"
PREFIX = "speculative_"
ALGORITHM = "speculative_algorithm"
DRAFT = "speculative_draft_model_path"
STEPS = "speculative_num_steps"
TOP_K = "speculative_eagle_topk"
TOKENS = "speculative_num_draft_tokens"
REJECTION = "speculative_use_rejection_sampling"


class Algorithm(NamedTuple):
    """The requirements of one of SGLang's algorithms.

    Attributes:
        has_draft: Whether a draft model in a folder of its own proposes the tokens. It stays as it is.
        reads_policy: Whether the draft reads the policy's hidden states, and shares its embedding.
    """

    has_draft: bool
    reads_policy: bool


ALGORITHMS: Mapping[str, Algorithm] = {
    "NGRAM": Algorithm(has_draft=False, reads_policy=False),
    "STANDALONE": Algorithm(has_draft=True, reads_policy=False),
    "EAGLE": Algorithm(has_draft=True, reads_policy=True),
    "EAGLE3": Algorithm(has_draft=True, reads_policy=True),
}
# The arguments of speculative decoding that are passed to SGLang. None of them changes what a sample's
# tokens are distributed as.
ARGUMENTS = frozenset(
    {
        ALGORITHM,
        DRAFT,
        STEPS,
        TOP_K,
        TOKENS,
        "speculative_attention_mode",
        "speculative_draft_attention_backend",
        "speculative_draft_kv_cache_dtype",
        REJECTION,
        "speculative_ngram_min_bfs_breadth",
        "speculative_ngram_max_bfs_breadth",
        "speculative_ngram_match_type",
        "speculative_ngram_max_trie_depth",
        "speculative_ngram_capacity",
    }
)


def problem_on_cpu(server_args: Mapping[str, Any]) -> str | None:
    """Return why engines on a CPU cannot use these arguments, with the remedy; None if they can.

    There, drafts run with replacements of SGLang's kernels (rollout/sglang/cpu_speculation.py).
    """
    name = algorithm_name(server_args)
    if name is None:
        return None

    algorithm = ALGORITHMS.get(name)
    if algorithm is None or not algorithm.has_draft:
        return "whose index of n-grams SGLang has on GPUs only; use a draft model, device=cuda, or remove it"
    if server_args.get(TOP_K) != 1 or server_args.get(REJECTION):
        return (
            f"but on a CPU each drafted token has one successor, which is compared with a sample of the "
            f"policy; set {STEPS}, {TOP_K} 1 and {TOKENS}, without {REJECTION}"
        )

    return None


def algorithm_name(server_args: Mapping[str, Any]) -> str | None:
    """Return the name of the algorithm as SGLang reads it; None without speculative decoding."""
    name = server_args.get(ALGORITHM)
    return name.upper() if isinstance(name, str) else None


def draft_folder(server_args: Mapping[str, Any]) -> str | None:
    """Return the folder of the draft model; None if the algorithm has none."""
    algorithm = ALGORITHMS.get(algorithm_name(server_args) or "")
    folder = server_args.get(DRAFT)
    return folder if algorithm is not None and algorithm.has_draft and isinstance(folder, str) else None


def draft_of(rollout: RolloutConfig) -> str | None:
    """Return the folder of the draft model of a run's engines; None without one."""
    settings = rollout.settings_of(rollout.engine)
    return None if settings is None else draft_folder(settings.server_args)


def without_speculation(server_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an engine that decodes one token at a time."""
    return {name: value for name, value in server_args.items() if not name.startswith(PREFIX)}
