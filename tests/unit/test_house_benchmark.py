"""The figures of benchmarks/house.py, on a tiny package whose figures are counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.house import LIMITS, Tree, read_tree, table_of

SOURCES = {
    "megarl/__init__.py": "",
    "megarl/models/__init__.py": '"""A package."""\n',
    # The module that declares the kinds of layers may read them.
    "megarl/models/architecture.py": """\
class Architecture(NamedTuple):
    experts: int

    def num_experts(self):
        return self.experts
""",
    # Two classes of pydantic, a dataclass, an Enum, and a Protocol with a function of two statements.
    "megarl/models/forms.py": '''\
"""A module."""
import dataclasses
from .architecture import Architecture

class Form(pydantic.BaseModel): ...

class Part(Form):
    """A part."""

@dataclasses.dataclass(frozen=True)
class Row: ...

class Kind(str, Enum): ...

class Reader(Protocol[T]):
    async def read(self, architecture: Architecture) -> bool:
        """Read."""
        latent = architecture.latent
        return bool(latent or architecture.experts)
''',
    "megarl/cli.py": """\
def run():
    from megarl.models import forms
    import megarl.models.forms
    forms.vision = None
""",
    "megarl/stubs/flash.py": "from megarl.models import architecture\n",
    "megarl/models/tests/test_forms.py": "import megarl.cli\n",
}


def test_every_figure_is_the_one_counted_by_hand() -> None:
    figures = Tree(SOURCES, 'LAYERS = (("models",), ("models.forms", "cli"))\nOTHERS = ("a.b",)').figures()
    assert figures["functions of at most 35 lines, %"] == 100
    # architecture 4; forms 2 imports, 5 classes with 3 bodies, 1 function with 2; cli 4
    assert figures["statements"] == 4 + (2 + 5 + 3 + 1 + 2) + 4
    assert figures["statements per line"] == pytest.approx(21 / (0 + 1 + 5 + 19 + 4))
    assert {name: figures[name] for name in ("classes", "records", "protocols", "modules", "rooms")} == {
        "classes": 6,
        "records": 4,  # Architecture, Form, Part, Row
        "protocols": 1,
        "modules": 5,
        "rooms": 2,  # models, and the room in it
    }
    assert figures["modules with one importer"] == 2  # architecture by forms, forms by cli
    assert figures["places that ask for a kind of layer"] == 2  # both in `read`; cli sets one
    assert figures["modules that ask for a kind of layer"] == 1
    assert (figures["lines of a function, median"], figures["lines of the longest function"]) == (4, 4)


def test_a_package_of_another_name_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "peer" / "loss").mkdir(parents=True)
    (tmp_path / "peer" / "loss" / "__init__.py").write_text("from . import kl\n")
    (tmp_path / "peer" / "loss" / "kl.py").write_text("def kl(policy):\n    return policy.experts\n")
    (tmp_path / "peer" / "__init__.py").write_text("from peer.loss import kl\nfrom .loss.kl import kl\n")

    tree = read_tree(str(tmp_path / "peer"))
    assert tree.importers() == {
        "peer": set(),
        "peer.loss": set(),
        "peer.loss.kl": {"peer", "peer.loss"},
    }
    assert (tree.figures()["rooms"], tree.figures()["places that ask for a kind of layer"]) == (1, 0)


def test_the_limits_are_marked_for_the_last_tree() -> None:
    many = Tree({f"megarl/m{number}.py": "" for number in range(LIMITS["modules"] + 1)})
    for trees, verdict in (({"many": many}, "no"), ({"many": many, "few": Tree(SOURCES)}, "yes")):
        table = table_of(trees)
        modules = list(table.columns[0].cells).index("modules")
        assert list(table.columns[-1].cells)[modules] == verdict
        assert (table.columns[-2].header, len(table.columns)) == ("limit", 3 + len(trees))
