"""How much of the weights goes in one message of a carrier: so much that the messages under way take two buckets. Imports no torch."""

from __future__ import annotations

from megarl.config.schema import Transport

NUM_SLOTS = 4  # of the carrier `device`: with two, each side often waits for the other to wake
MESSAGE_BYTES_ON_A_CPU = 4 * 2**20  # what is read soon after it was written comes out of the processor's cache


def message_bytes(transport: Transport, bucket_bytes: int, is_cuda: bool) -> int:
    """`device`: of one slot, of which all hold two buckets at most. `group`: of one bucket, and two are under way."""
    if transport is Transport.group:
        return bucket_bytes
    assert transport is Transport.device, transport
    each = 2 * bucket_bytes // NUM_SLOTS
    return each if is_cuda else min(each, MESSAGE_BYTES_ON_A_CPU)
