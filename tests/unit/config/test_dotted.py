"""Values by dotted keys, also of items of lists."""

from __future__ import annotations

from megarl.config.dotted import value_at, with_value
from megarl.config.schema import PPOConfig, SourceTeacherConfig


def test_values_of_sections_and_of_items() -> None:
    config = PPOConfig(teachers=[SourceTeacherConfig(name="a"), SourceTeacherConfig(name="b", path="b")])
    assert value_at(config, "teachers[1].path") == "b"
    assert value_at(config, "actor.parallel") is config.actor.parallel
    changed = with_value(with_value(config, "teachers[1].path", "c"), "rollout.n", 3)
    assert [teacher.path for teacher in changed.teachers] == [None, "c"]
    assert changed.teachers[0] is config.teachers[0]
    assert (changed.rollout.n, config.teachers[1].path) == (3, "b")
