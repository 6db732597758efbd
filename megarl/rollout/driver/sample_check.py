"""Check that a sample is a possible result of its request."""

from __future__ import annotations

from megarl.machine.errors import RunError
from megarl.machine.wording import counted
from megarl.rollout.interface import GenerationRequest, Sample


class EngineFaultError(RunError):
    """An engine returned something that was not requested, so its samples cannot be trusted."""


def check_sample(replica: int, request: GenerationRequest, sample: Sample) -> None:
    """Raise EngineFaultError if the sample cannot be a result of the request."""
    sampling = request.sampling
    count = len(sample.token_ids)
    faults = []
    if not 1 <= count <= sampling.max_new_tokens:
        faults.append(f"{counted(count, 'token')}, but 1 to {sampling.max_new_tokens} were requested")
    if len(sample.log_probs) != count:
        faults.append(f"{len(sample.log_probs)} log-probs for {counted(count, 'token')}")
    if sample.finish_reason not in ("stop", "length"):
        faults.append(f"finish reason {sample.finish_reason!r}")

    # The spans must cover all tokens without a gap, with increasing versions.
    ends = [0, *(span.end for span in sample.spans)]

    if (
        ends[-1] != count
        or ends != sorted(set(ends))
        or list(sample.weight_versions) != sorted(set(sample.weight_versions))
    ):
        faults.append(
            f"weight versions {[tuple(span) for span in sample.spans]} (version, end) for "
            f"{counted(count, 'token')}"
        )

    if faults:
        raise EngineFaultError(f"rollout replica {replica} returned an invalid sample: {', '.join(faults)}")
