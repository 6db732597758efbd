"""The site builds without a warning, loads nothing from elsewhere, and says what the code says; no link leads
nowhere."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import urlparse

import pytest

from docs.generate.configuration import reference
from docs.generate.pages import PAGES as GENERATED
from megarl import api
from megarl.config.schema import DPOConfig, PPOConfig, RewardModelRunConfig, SFTConfig
from megarl.config.schema.keys import leaves
from megarl.trainers.ppo import PPOTrainer
from tests.docs.pages import PAGES, ROOT, SITE, anchors, links


def _build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "--quiet",
        "--fail-on-warning",
        "--keep-going",
        str(source),
        str(site),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = _build(ROOT / "docs", folder)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    built = {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")}
    assert {page.relative_to(ROOT / "docs").with_suffix("") for page in SITE} <= built


def test_a_reader_is_reported_to_nobody(site: Path) -> None:
    """No script, style, font or picture from another host; links that a reader follows are another thing."""
    loaded = [
        tag
        for page in site.rglob("*.html")
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
    ]
    styles = [
        url
        for sheet in site.rglob("*.css")
        for url in re.findall(r"(?:@import|url\()[^;)]*", sheet.read_text())
    ]
    assert len(loaded) > 20
    assert [
        text
        for text in (*loaded, *styles)
        if re.search(r"(?<!xmlns=['\"])\b(https?:)?//(?!www\.w3\.org)", text)
    ] == []


def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    """Two pages are enough to show it."""
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs" / "static", docs / "static")
    shutil.copy(ROOT / "docs" / "conf.py", docs)
    (docs / "rewards.md").write_text("# Rewards\n")
    (docs / "index.md").write_text(
        "# Index\n\n[x](nowhere.md) [x](rewards.md#nothing) ![x](none.svg)\n\n```{toctree}\nrewards\n```\n"
    )
    built = _build(docs, tmp_path / "site")
    assert built.returncode != 0
    for named in ("nowhere.md", "nothing", "none.svg"):
        assert named in built.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """In the repository; of addresses elsewhere only the form is looked at."""
    for link in links(page):
        parsed = urlparse(link)
        if parsed.scheme:
            assert parsed.scheme == "https", link
            assert re.fullmatch(r"([\w-]+\.)+[a-z]+", parsed.netloc), link
            continue
        target = (page.parent / parsed.path).resolve() if parsed.path else page
        assert target.exists(), f"{page.name}: {link}"
        assert target.is_relative_to(ROOT), f"{page.name}: {link}"
        if parsed.fragment:
            assert parsed.fragment in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("path", GENERATED)
def test_what_is_made_from_the_code_is_current(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == GENERATED[path](), (
        f"{path} is not what the code says now: run make reference"
    )


def test_the_reference_has_the_whole_name_of_every_key() -> None:
    page = reference()
    for kind in (PPOConfig, SFTConfig, DPOConfig, RewardModelRunConfig):
        keys = [leaf.key for leaf in leaves(kind())]
        assert len(keys) > 40
        assert [key for key in keys if f"`{key}`" not in page] == []
    for key in ("reward.judges[].parse.regex", "teachers[].path", "teachers[].parallel.data_parallel_size"):
        assert f"`{key}`" in page


def test_the_reference_has_one_row_for_each_key() -> None:
    rows = re.findall(r"(?m)^\| `(.+?)` \|", reference())
    # The kinds of run have their own limits, columns and folders of a reference.
    of_kinds = {"data.max_length", "data.columns.prompt", "data.columns.tools", "reference.path"}
    assert {key for key in rows if rows.count(key) > 1} == of_kinds


def test_the_keys_that_most_runs_set_are_a_short_table() -> None:
    table = reference().partition("## The keys that most runs set\n")[2].partition("\n## ")[0]
    keys = re.findall(r"(?m)^\| \[`(.+?)`\]", table)
    assert len(keys) == len(set(keys)) == 25
    assert keys[:4] == ["model.path", "data.train_files", "data.val_files", "data.max_prompt_length"]
    assert "| [`actor.optim.lr`](#actoroptim) | `1.0e-06` | " in table


def test_the_loop_of_the_readme_is_the_loop_that_runs() -> None:
    (shown,) = re.findall(
        r"(?s)One step is this.*?```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    loop = inspect.getsource(PPOTrainer.train_step)
    assert len(shown.splitlines()) == 18
    assert textwrap.indent(shown, " " * 8) in loop


def test_the_loop_of_the_api_is_the_loop_that_runs_without_critic_and_teachers() -> None:
    page = (ROOT / "docs/algorithms/custom.md").read_text(encoding="utf-8")
    shown = [
        page.partition("```python\nfrom megarl import api\n")[2].partition("```")[0],
        str(api.__doc__),
    ]
    loop = _calls(inspect.getsource(PPOTrainer.train_step))
    own = [call for call in loop if not call.startswith(("critic.", "teacher."))]
    assert len(own) == 9
    for text in shown:
        # The trainer's `score` adds baselines, and leaves out what dynamic sampling has scored.
        assert [call.replace("reward.score", "score") for call in _calls(text)] == own


def _calls(code: str) -> list[str]:
    """Return the calls on the run or its roles from `generate` to `log_batch`, such as "actor.update"."""
    calls = re.findall(r"\b(?:self|roles|run)\.([\w.]+)\(", code)
    return calls[calls.index("generate") : calls.index("log_batch") + 1]
