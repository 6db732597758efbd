"""Engines that the tests of this folder share for the session."""

from tests.unit.rollout.sglang_engines import sglang_in_process, sglang_server  # noqa: F401
from tests.unit.rollout.subjects import ready, subject  # noqa: F401
