"""A kind is what it declares: nothing can be chosen that has not said what it needs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass

import pytest
from omegaconf import OmegaConf

from megarl.config.kinds import EstimatorNeeds, Kind, PolicyLossNeeds


@dataclass(frozen=True, kw_only=True)
class ColourNeeds:
    light: bool


class Color(Kind):
    needs: ColourNeeds

    red = "red", ColourNeeds(light=True)
    blue = "blue", ColourNeeds(light=True)
    black = "black", ColourNeeds(light=False)


@dataclass
class Section:
    color: Color = Color.red


def test_members_with_equal_needs_are_different() -> None:
    assert [member.name for member in Color] == ["red", "blue", "black"]
    assert Color.red != Color.blue
    assert Color.red.needs == Color.blue.needs == ColourNeeds(light=True)
    assert Color("black") is Color["black"] is Color.black == "black"


def test_it_travels_as_its_name() -> None:
    given = OmegaConf.merge(OmegaConf.structured(Section), {"color": "black"})
    assert OmegaConf.to_object(given).color is Color.black
    assert OmegaConf.to_yaml(given) == "color: black\n"
    assert pickle.loads(pickle.dumps(Color.black)) is copy.deepcopy(Color.black) is Color.black


def declarations() -> Iterator[Kind]:
    for kinds in Kind.__subclasses__():
        yield from kinds


@pytest.mark.parametrize("member", declarations(), ids=str)
def test_name_and_value_agree_and_needs_do_not_change(member: Kind) -> None:
    assert member.value == member.name
    with pytest.raises(FrozenInstanceError):
        setattr(member.needs, next(iter(vars(member.needs))), None)


def test_a_member_without_a_declaration_is_an_error_at_import() -> None:
    with pytest.raises((TypeError, RuntimeError)) as error:
        Kind("Forgetful", {"one": "one"})
    assert "'needs'" in f"{error.value} {error.value.__cause__}"


@pytest.mark.parametrize("needs", [EstimatorNeeds, PolicyLossNeeds])
def test_needs_without_a_safe_default_are_required(needs: type) -> None:
    with pytest.raises(TypeError, match="required keyword-only argument: '(compares_samples|aggregations)'"):
        needs()
