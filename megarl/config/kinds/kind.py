"""A choice of the configuration whose members declare what they need of a run, once, as data that can be read without torch."""

from __future__ import annotations

from enum import Enum
from typing import Any


class Kind(str, Enum):
    """A member is its name and its declaration, as in `rloo = "rloo", EstimatorNeeds(compares_samples=True)`; one without a declaration is
    a TypeError at import. Files, command lines and OmegaConf see the name.

    `needs` is what rules, placement, roles and documentation ask for, so that none of them asks for a member by its name. What a member
    does (maths, an engine, a logger) is registered under it where that is written.
    """

    _value_: str
    needs: Any

    def __new__(cls, name: str, needs: object) -> Kind:
        member = str.__new__(cls, name)
        member._value_ = name
        member.needs = needs
        return member
