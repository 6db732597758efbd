"""Rules for speculative decoding (`rollout.sglang.server_args.speculative_*`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megarl.config.finding import Finding, Findings, conflicts, refusals
from megarl.config.schema import Device, EngineDType, PPOConfig, RoutingReplay
from megarl.config.speculation import (
    ALGORITHM,
    ALGORITHMS,
    DRAFT,
    PREFIX,
    REJECTION,
    SECTION,
    STEPS,
    TOKENS,
    TOP_K,
    Algorithm,
    algorithm_name,
    draft_of,
    problem_on_cpu,
)
from megarl.machine.errors import ConfigError, counted
from megarl.models.architecture import Architecture
from megarl.models.families import read_draft

_ALGORITHM = f"{SECTION}.{ALGORITHM}"
_DRAFT = f"{SECTION}.{DRAFT}"
_DETERMINISTIC = "enable_deterministic_inference"
_FURTHER_TOKENS = (
    "the layers of model.path that predict further tokens are neither trained nor sent to engines; set "
    f"{ALGORITHM} to EAGLE, EAGLE3 or STANDALONE with a draft model in a folder of its own, or to NGRAM"
)


def run(config: PPOConfig) -> Findings:
    """Check the algorithm, its draft model and sizes, and what a run cannot combine with it."""
    given = config.rollout.sglang.server_args
    names = sorted(name for name, value in given.items() if name.startswith(PREFIX) and value is not None)
    if not names:
        return

    if given.get(ALGORITHM) is None:
        keys = tuple(f"{SECTION}.{name}" for name in names)
        yield Finding(keys, f"have no effect without {ALGORITHM}; set it to {_known()}, or remove them")
        return

    name = algorithm_name(given) or ""
    if (algorithm := ALGORITHMS.get(name)) is None:
        reason = _FURTHER_TOKENS if name == "NEXTN" else f"use {_known()}"
        yield Finding((_ALGORITHM,), f"is {given[ALGORITHM]!r}, which megarl does not support: {reason}")
        return

    yield from _draft(config, name, algorithm)
    yield from _sizes(given, algorithm)
    yield from _combined(config, name, algorithm)


def fits_model(config: PPOConfig, policy: Architecture) -> Findings:
    """Check that the draft model has the policy's vocabulary, and can read its hidden states."""
    folder = draft_of(config.rollout)
    if folder is None or not os.path.isfile(os.path.join(folder, "config.json")):
        return  # rules.machine reports a missing folder
    try:
        draft = read_draft(folder)
    except ConfigError as error:
        yield from (Finding((_DRAFT,), f"{error.source}: {problem}") for problem in error.problems)
        return

    given = config.rollout.sglang.server_args
    name = algorithm_name(given) or ""
    read = draft.target_hidden_size if name == "EAGLE3" else draft.hidden_size
    heads = draft.num_attention_heads
    tensor = config.rollout.tensor_parallel_size
    yield from conflicts(
        _DRAFT,
        f"the draft model {folder!r} ",
        (
            ("model.path",),
            draft.vocab_size != policy.vocab_size,
            f"has vocab_size {draft.vocab_size}, the policy {policy.vocab_size}, but the policy reads its "
            "tokens; use a draft model with the policy's vocabulary",
        ),
        (
            ("model.path",),
            ALGORITHMS[name].reads_policy and read != policy.hidden_size,
            f"reads hidden states of {read}, but the policy's have {policy.hidden_size}; use a draft model "
            f"that was trained for {config.model.path}",
        ),
        (
            (f"{SECTION}.{REJECTION}",),
            bool(given.get(REJECTION)) and draft.draft_vocab_size != draft.vocab_size,
            f"proposes {draft.draft_vocab_size} of the {draft.vocab_size} tokens, and SGLang compares all "
            f"probabilities; remove {REJECTION}",
        ),
        (
            (),
            draft.is_quantized,
            "is quantized, but SGLang gets the draft model in model.dtype; use a folder with weights in "
            "bfloat16",
        ),
        (
            ("rollout.tensor_parallel_size",),
            heads % tensor != 0,
            f"has num_attention_heads {heads}, which does not divide by tensor_parallel_size {tensor}; use a "
            f"divisor of {heads}",
        ),
    )


def _draft(config: PPOConfig, name: str, algorithm: Algorithm) -> Findings:
    folder = config.rollout.sglang.server_args.get(DRAFT)
    is_missing = folder is None or folder == config.model.path
    yield from refusals(
        (
            (_DRAFT, _ALGORITHM),
            not algorithm.has_draft and folder is not None,
            f"is set, but {name} drafts from earlier tokens, without a model; remove it",
        ),
        (
            (_DRAFT, _ALGORITHM),
            algorithm.has_draft and is_missing,
            f"{'is not set' if folder is None else 'is model.path'}, but {name} needs a draft model: "
            f"{_FURTHER_TOKENS}",
        ),
        (
            (_DRAFT,),
            algorithm.has_draft and not is_missing and not isinstance(folder, str),
            f"is {folder!r}, but must be the path of a folder",
        ),
    )


def _sizes(given: Mapping[str, Any], algorithm: Algorithm) -> Findings:
    """Check the sizes of a draft, which SGLang chooses if none is given."""
    sizes = {name: given.get(name) for name in (STEPS, TOP_K, TOKENS)}
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            yield Finding((f"{SECTION}.{name}",), f"is {size!r}, but must be a positive integer")
            return

    steps, top_k, tokens = sizes.values()
    if not algorithm.has_draft:
        for name in (STEPS, TOP_K):
            if sizes[name] is not None:
                yield Finding(
                    (f"{SECTION}.{name}",),
                    f"has no effect with NGRAM; use {TOKENS} and speculative_ngram_max_bfs_breadth",
                )
        if tokens == 1:
            yield Finding(
                (f"{SECTION}.{TOKENS}",), "is 1, which is the policy's own token alone; use 2 or more"
            )
        return

    if steps is None and top_k is None and tokens is None:
        return
    keys = tuple(f"{SECTION}.{name}" for name in sizes)
    if steps is None or top_k is None or tokens is None:
        absent = ", ".join(name for name, size in sizes.items() if size is None)
        yield Finding(keys, f"{absent} missing: set all three, or none, and SGLang chooses them")
        return

    # The tokens to verify are the policy's last one and the best of the tree, a chain if each has one child.
    most = 1 + top_k + (steps - 1) * top_k**2
    yield from refusals(
        (
            keys,
            top_k == 1 and tokens != most,
            f"with {TOP_K} 1, {counted(steps, 'step')} can draft {counted(steps, 'token')}, and one is "
            f"verified with them; use {TOKENS} {most}",
        ),
        (
            keys,
            top_k != 1 and tokens > most,
            f"{TOKENS} is {tokens}, but {counted(steps, 'step')} with {TOP_K} {top_k} can give at most "
            f"{most}; use {most} or fewer",
        ),
    )


def _combined(config: PPOConfig, name: str, algorithm: Algorithm) -> Findings:
    """Check what else the run asks of its engines."""
    given = config.rollout.sglang.server_args
    if given.get(REJECTION) and not (algorithm.reads_policy and given.get(TOP_K) == 1):
        yield Finding(
            (f"{SECTION}.{REJECTION}", _ALGORITHM),
            f"is true, which SGLang has for EAGLE and EAGLE3 with {TOP_K} 1 only; set them, or remove it",
        )

    problem = problem_on_cpu(given) or ""
    yield from conflicts(
        _ALGORITHM,
        f"is {name}, ",
        (("device",), config.device is Device.cpu and problem != "", problem),
        (
            ("rollout.engine",),
            not config.rollout.engine.needs.speculates,
            f"but the engine {config.rollout.engine.value} decodes one token at a time; use "
            "rollout.engine=sglang, or remove it",
        ),
        (
            ("rollout.dtype",),
            algorithm.has_draft and config.rollout.dtype is EngineDType.fp8,
            "but with fp8 SGLang would read the draft model's weights as FP8, too; use rollout.dtype=model, "
            "or NGRAM",
        ),
        (
            ("engine.routing_replay",),
            config.engine.routing_replay is RoutingReplay.rollout,
            "but SGLang records routes by a token's place in its cache, which rejected tokens share with "
            "others; use engine.routing_replay=trainer, or remove it",
        ),
        (
            ("actor.lora.sync",),
            config.actor.served_adapters is not None,
            "which is not supported with adapters that the engine applies; use actor.lora.sync=merged, or "
            "remove it",
        ),
        (
            (f"{SECTION}.{_DETERMINISTIC}",),
            name == "NGRAM" and bool(given.get(_DETERMINISTIC)),
            "whose drafts depend on what the engine generated before, and with them the random numbers of a "
            "sample; use a draft model, or remove it",
        ),
    )


def _known() -> str:
    *most, last = ALGORITHMS
    return f"{', '.join(most)} or {last}"
