"""A wrong name of a user's function says how a reference is written, and which names the file has."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.machine.user_functions import Expected, UserFunctionError, load_name

EXPECTED = Expected("tool", "agent.tools", "def price(item: str) -> str:")
TOOLS = """
import math
from pathlib import Path

LIMIT = 3

class Shop:
    pass

shop = Shop()

def price(item: str) -> str:
    return item

def _hidden():
    pass
"""


def refused(path: Path, name: str) -> str:
    with pytest.raises(UserFunctionError) as raised:
        load_name(str(path), name, EXPECTED)
    return str(raised.value).replace(str(path), "tools.py")


def test_the_names_of_the_file_and_the_nearest_one_are_given(tmp_path: Path) -> None:
    file = tmp_path / "tools.py"
    file.write_text(TOOLS)
    assert load_name(str(file), "shop", EXPECTED).__class__.__name__ == "Shop"
    for name, nearest in (("prices", "price"), ("Shops", "Shop"), ("nothing_like_it", "Shop")):
        assert refused(file, name) == (
            f"tool {name!r} is not in 'tools.py', which defines Shop, shop, price; set agent.tools to "
            f"FILE.py:NAME, such as tools.py:{nearest}"
        )


def test_a_file_without_names_says_what_to_write(tmp_path: Path) -> None:
    file = tmp_path / "tools.py"
    file.write_text("LIMIT = 3\n")
    assert refused(file, "price") == (
        "tool 'price' is not in 'tools.py', which defines nothing; set agent.tools to FILE.py:NAME, and write "
        "`def price(item: str) -> str:` in it"
    )


def test_only_the_first_names_of_a_large_file_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "tools.py"
    file.write_text("".join(f"def tool_{number}(): ...\n" for number in range(100)))
    assert "which defines tool_0, tool_1, tool_2, tool_3, tool_4, tool_5, tool_6, tool_7; set" in refused(
        file, "x"
    )
