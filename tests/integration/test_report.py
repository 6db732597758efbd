"""Test the page of `megarl report` in a real browser: it shows the contents of the files, and text written by
a model is inert."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from benchmarks.report import CONFIG, HIGHEST_WEIGHT, make_run
from megarl.cli.inspect.report import LiveReport
from megarl.cli.main import main
from megarl.config.load import dump_config, load_config
from megarl.config.schema import PPOConfig, SFTConfig, TrackingConfig, TrainerConfig
from megarl.config.shipped import CONFIGS_DIR
from megarl.tracking.report.run_folder import open_runs
from megarl.tracking.samples import SCHEMA, SampleTable, SampleWriter, read_samples, sample_files
from megarl.tracking.timeline import Span, Timeline

browsers = pytest.importorskip("docs.generate.browser", reason="selenium is not installed")
if not browsers.is_installed():
    pytest.skip("there is no Chromium: apt-get install chromium chromium-driver", allow_module_level=True)

from selenium.webdriver import ActionChains, Chrome  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.remote.webelement import WebElement  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

STEPS = 40
SAMPLES = 64
TOKENS = 7
FILES = 4
EVIL = "</script><img src=x onerror='window.hacked = 1'><b>bold</b>"
FAILURE = (
    f"Traceback (most recent call last):\n  earlier {EVIL}\n\n==== megarl train failed ====\nwhat    "
    f"RuntimeError: {EVIL}\n====\n"
)
RUN_COLORS = [(0x2F, 0x7E, 0xD8), (0xE0, 0x70, 0x2A)]
TABS = ("summary", "curves", "samples", "timeline", "memory", "configuration", "failures")


class Runs(NamedTuple):
    good: Path
    failed: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Create two runs. The second has failed at its last step, and its model tries to inject code into the
    page."""
    folder = tmp_path_factory.mktemp("runs")
    good = folder / "good"
    failed = folder / "failed"
    for seed, path in enumerate((good, failed)):
        make_run(path, STEPS, SAMPLES, TOKENS, FILES, seed)
    others = {"tracking": TrackingConfig(run_name=EVIL), "trainer": TrainerConfig(seed=7)}
    dump_config(dataclasses.replace(CONFIG, **others), failed / "config.yaml")
    (failed / "summary.json").unlink()
    (failed / "failure.txt").write_text(FAILURE)
    (failed / "generations.jsonl").write_text("no json\n")
    write_evil_samples(failed, STEPS)

    return Runs(good, failed)


def write_evil_samples(run_dir: Path, step: int) -> None:
    texts = {1: EVIL, 2: "\n", 3: "�", 4: f"<tool_call>{EVIL}", 5: "</tool_call>"}
    sample = {
        "uid": EVIL,
        "prompt": EVIL,
        "response": EVIL + "\n�",
        "ground_truth": EVIL,
        "finish_reason": EVIL,
        "data_source": EVIL,
    }
    sample |= {
        "step": step,
        "score": 3.5,
        "score_parts": [3.5],
        "advantage": 1.0,
        "weight_version": 1,
        "prompt_length": 1,
        "response_length": 3,
    }
    sample |= {
        "prompt_ids": [1],
        "response_ids": [1, 2, 3],
        "advantages": [1.0, 0.0, -1.0],
        "rollout_log_probs": [-0.5, -0.25, 0.0],
    }

    # A call, a line break and its end; a tool's result; the answer.
    episode = sample | {
        "uid": "episode",
        "score": 3.25,
        "response": EVIL,
        "response_ids": [4, 2, 5, 1, 3, 1],
        "response_length": 6,
    }
    episode |= {
        "advantages": [0.5, 0.5, 0.5, 0.0, 0.0, 0.5],
        "rollout_log_probs": [-0.5, -0.25, 0.0, 0.0, 0.0, -0.5],
    }
    episode |= {
        "is_model": [True, True, True, False, False, True],
        "turn_rewards": [0.75, 0.0],
        "num_calls": 3,
        "episode_end": EVIL,
    }
    episode |= {"call_errors": json.dumps({EVIL: 2})}
    writer = SampleWriter(run_dir)
    writer.write(
        step, lambda: SampleTable(pa.Table.from_pylist([sample, episode], SCHEMA), texts, [EVIL]), 2**30
    )
    writer.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chrome]:
    with browsers.browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def page(runs: Runs) -> str:
    """Return the address of the page of both runs."""
    output = runs.good / "report.html"
    assert main(["report", str(runs.good), str(runs.failed), "--output", str(output)]) == 0
    return output.as_uri()


def show(chromium: Chrome, page: str, tab: str) -> None:
    chromium.get("about:blank")
    chromium.get(f"{page}#{tab}")
    browsers.wait_for(chromium, tab)


def find(chromium: Chrome, selector: str) -> WebElement:
    return chromium.find_element(By.CSS_SELECTOR, selector)


def wait(chromium: Chrome, condition: Callable[[], Any]) -> Any:
    return WebDriverWait(chromium, 20, poll_frequency=0.05).until(lambda _: condition())


def pixels(chromium: Chrome, canvas: WebElement) -> set[tuple[int, int, int]]:
    """Return the opaque colors in a canvas, once it is drawn."""
    script = """
        const canvas = document.createElement("canvas"), found = new Set(), context = canvas.getContext("2d", {willReadFrequently: true});
        [canvas.width, canvas.height] = [arguments[0].width, arguments[0].height];
        context.drawImage(arguments[0], 0, 0);
        const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
        for (let at = 0; at < data.length; at += 4)
            if (data[at + 3] === 255) found.add((data[at] << 16) | (data[at + 1] << 8) | data[at + 2]);
        return [...found];
    """
    found = wait(chromium, lambda: chromium.execute_script(script, canvas))
    return {(color >> 16, color >> 8 & 255, color & 255) for color in found}


def hover(chromium: Chrome, element: WebElement, x: int = 0, y: int = 0) -> str:
    """Return the tooltip's text; x and y are relative to the center."""
    chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    ActionChains(chromium).move_to_element_with_offset(element, x, y).perform()
    tooltip = wait(
        chromium, lambda: next(iter(chromium.find_elements(By.CSS_SELECTOR, "#tooltip:not([hidden])")), None)
    )

    return tooltip.text


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}


def test_curves_of_both_runs_lie_over_each_other(chromium: Chrome, page: str, runs: Runs) -> None:
    show(chromium, page, "curves")
    names = {
        chart.get_attribute("data-metric") for chart in chromium.find_elements(By.CSS_SELECTOR, ".chart")
    }
    assert names == metrics(runs.good)[1].keys() - {"step"}
    canvas = find(chromium, "[data-metric='actor/entropy'] canvas")
    assert set(RUN_COLORS) <= pixels(chromium, canvas)
    told = hover(chromium, canvas)
    step = int(told.splitlines()[0].removeprefix("step "))

    for run_dir in runs:
        value = metrics(run_dir)[step]["actor/entropy"]
        shown = next(line for line in told.splitlines() if line.startswith(f"{run_dir.name}: ")).split(": ")[
            1
        ]
        assert float(shown) == pytest.approx(value, rel=1e-4)


def test_a_run_can_be_hidden_and_metrics_found(chromium: Chrome, page: str) -> None:
    show(chromium, page, "curves")
    find(chromium, ".run-chip").click()
    wait(
        chromium,
        lambda: RUN_COLORS[0] not in pixels(chromium, find(chromium, "[data-metric='actor/entropy'] canvas")),
    )
    find(chromium, "#metric-filter").send_keys("entropy|val/")
    shown = {
        chart.get_attribute("data-metric") for chart in chromium.find_elements(By.CSS_SELECTOR, ".chart")
    }
    assert shown == {"actor/entropy", "val/score/mean"}


def test_smoothing_scale_and_range_change_what_is_drawn(chromium: Chrome, page: str) -> None:
    show(chromium, page, "curves")
    canvas = find(chromium, "[data-metric='timing_s/step'] canvas")
    picture = "return arguments[0].toDataURL()"
    seen = {chromium.execute_script(picture, canvas)}

    def is_new() -> bool:
        seen.add(now := chromium.execute_script(picture, canvas))
        return now not in before

    hover(chromium, canvas)
    before = set(seen)
    wait(chromium, is_new)
    before = set(seen)
    chromium.execute_script(
        "const s = document.querySelector('#smoothing'); s.value = 0.9; s.dispatchEvent(new Event('input'))"
    )
    wait(chromium, is_new)
    assert "smooth 60" in hover(chromium, canvas, 10)
    before = set(seen)
    ActionChains(chromium).move_to_element_with_offset(canvas, -50, 0).click_and_hold().move_by_offset(
        40, 0
    ).move_by_offset(40, 0).release().perform()
    wait(chromium, is_new)
    low, high = (
        int(edge)
        for edge in find(chromium, ".pill").text.removeprefix("steps ").removesuffix(" ✕").split("–")
    )
    assert 1 < low < high < STEPS
    find(chromium, ".pill").click()
    assert not find(chromium, ".pill").is_displayed()


def test_samples_are_found_and_read_token_by_token(chromium: Chrome, page: str, runs: Runs) -> None:
    rows = [row for path in sample_files(runs.good).values() for row in read_samples(path).rows.to_pylist()]
    show(chromium, page, "samples")

    def number() -> int:
        text = find(chromium, "#num-found").text
        return 0 if text == "none" else int(text.split(" of ")[1].replace(",", ""))

    def choose(label: str, value: str) -> None:
        Select(find(chromium, f"select[aria-label='{label}']")).select_by_value(value)

    choose("Run", "0")
    assert number() == len(rows)
    step = rows[20]["step"]
    choose("Step", str(step))
    assert number() == len([row for row in rows if row["step"] == step])
    find(chromium, "#score-least").send_keys("1")
    right = [row for row in rows if row["step"] == step and row["score"] >= 1]
    assert 0 < number() == len(right) < SAMPLES // FILES
    wanted = right[-1]
    find(chromium, "#sample-text").send_keys(wanted["response"].upper())
    assert number() == len([row for row in right if wanted["response"] in row["response"]])
    (line,) = chromium.find_elements(By.CSS_SELECTOR, "#sample-table tbody tr")
    line.click()
    tokens = chromium.find_elements(By.CSS_SELECTOR, "#response [data-index]")
    assert len(tokens) == TOKENS
    assert find(chromium, "#response").get_attribute("textContent") == wanted["response"]
    least = min(range(TOKENS), key=lambda index: wanted["log_probs"][index])
    told = hover(chromium, tokens[least])
    assert f"id {wanted['response_ids'][least]}, token {least + 1} of {TOKENS}" in told
    lines = dict(
        line.replace(" (log", "").rsplit(" ", 2 if "(log" in line else 1)[:2]
        for line in told.splitlines()[1:]
    )
    assert float(lines["probability, trainer"]) == pytest.approx(
        math.exp(wanted["log_probs"][least]), rel=0.01
    )
    assert float(lines["probability, engine"]) == pytest.approx(
        math.exp(wanted["rollout_log_probs"][least]), rel=0.01
    )
    assert float(lines["log-prob gap"]) == pytest.approx(
        wanted["log_probs"][least] - wanted["rollout_log_probs"][least], rel=0.01
    )
    assert float(lines["advantage"]) == pytest.approx(wanted["advantages"][least], rel=0.01)
    share = wanted["loss_share"][least]
    assert f"share of the step's loss {100 * share:.3g} %" in told

    # What the loss makes of each token: its weight with the rule that limits it, or why it is left out.
    kept = tokens[:-1]
    for token, weight in zip(kept, wanted["rollout_weights"], strict=False):
        limit = ", limited (algorithm.rollout_correction.high)" if weight >= HIGHEST_WEIGHT - 1e-6 else ""
        assert re.search(
            rf"weight in the loss {weight:.3g}\d*{re.escape(limit)}$", hover(chromium, token), re.M
        )
    assert "not in the loss: it was sampled by weights older than" in hover(chromium, tokens[-1])
    excluded = chromium.find_elements(By.CSS_SELECTOR, "#response .excluded")
    assert excluded == [tokens[-1]]
    assert f"1 of {TOKENS} tokens" in find(chromium, "#sample .facts").text
    choose("Color of tokens", "share")
    alphas = [
        float(token.value_of_css_property("background-color").split(",")[-1].rstrip(")")) for token in tokens
    ]
    assert alphas[-1] == 0 < min(alphas[:-1])
    choose("Color of tokens", "probability")

    alphas = [
        float(token.value_of_css_property("background-color").split(",")[-1].rstrip(")")) for token in tokens
    ]
    assert max(alphas) == alphas[least]  # the least probable token has the strongest color
    assert alphas[least] == pytest.approx(0.75 * (1 - math.exp(wanted["log_probs"][least])), abs=0.01)
    choose("Color of tokens", "advantage")
    colors = {token.value_of_css_property("background-color") for token in tokens}
    assert colors == {"rgba(47, 126, 216, 0.75)" if wanted["advantage"] > 0 else "rgba(224, 112, 42, 0.75)"}
    choose("Kind of samples", "held-out")
    wait(chromium, lambda: number() == 0)  # their scores are 0


def test_what_a_model_wrote_is_text(chromium: Chrome, page: str) -> None:
    for tab in TABS:
        show(chromium, page, tab)
        if tab == "samples":
            Select(find(chromium, "select[aria-label='Order']")).select_by_value("best")
            find(chromium, "#sample-table tbody tr").click()
            response = find(chromium, "#response")
            assert response.get_attribute("textContent") == f"{EVIL}⏎\n�"
            hover(chromium, response.find_element(By.CSS_SELECTOR, "[data-index]"))
            assert "by the engine 0.607 (log -0.5)" in find(chromium, "#tooltip").text
            find(chromium, "#sample-table tbody tr[data-uid='episode']").click()
            check_episode(chromium)
        assert chromium.find_elements(By.CSS_SELECTOR, "img, b b, script[src]") == []
        assert chromium.execute_script("return window.hacked") is None


def check_episode(chromium: Chrome) -> None:
    """Check that each turn and each result has a block of its own color, that calls are marked, and that
    tokens not written by the model have no probability."""
    turns = chromium.find_elements(By.CSS_SELECTOR, "#response .turn")
    texts = [turn.find_element(By.CSS_SELECTOR, ".tokens").get_attribute("textContent") for turn in turns]
    assert texts == [f"<tool_call>{EVIL}⏎\n</tool_call>", f"{EVIL}�", EVIL]
    authors = [turn.find_element(By.CSS_SELECTOR, ".author").text.split("\n") for turn in turns]
    assert authors == [["model, turn 1", "reward 0.75"], ["answer"], ["model, turn 2"]]
    colors = [turn.value_of_css_property("border-left-color") for turn in turns]
    assert colors[0] == colors[2] != colors[1]
    called = [len(turn.find_elements(By.CSS_SELECTOR, ".call")) for turn in turns]
    assert called == [3, 0, 0]
    tokens = chromium.find_elements(By.CSS_SELECTOR, "#response [data-index]")
    told = [hover(chromium, tokens[index]) for index in (0, 3, 5)]
    assert ["by the engine 0.607" in each for each in told] == [True, False, True]
    assert told[1].endswith("token 4 of 6\nnot written by the model, excluded from the loss")
    facts = find(chromium, "#sample .facts").text.replace("\n", " ")
    assert f"ended by {EVIL}" in facts
    assert f"turns 2 calls 3, of which 2 {EVIL}" in facts
    find(chromium, "#sample-text").send_keys("</TOOL_CALL>")
    assert [
        line.get_attribute("data-uid")
        for line in chromium.find_elements(By.CSS_SELECTOR, "#sample-table tbody tr")
    ] == ["episode"]
    find(chromium, "#sample-text").clear()


def test_the_timeline_is_shown(chromium: Chrome, page: str) -> None:
    show(chromium, page, "timeline")
    canvas = find(chromium, "canvas.timeline")
    assert set(RUN_COLORS) <= pixels(chromium, canvas)  # update and log_probs
    Select(find(chromium, "#timeline-step")).select_by_value("3")

    # the second row, in the second half of the step
    told = hover(chromium, canvas, 150, -canvas.size["height"] // 2 + 24 + 11 + 22)
    assert told.splitlines()[0].startswith("train 18")
    assert told.splitlines()[1] == "actor rank 1, pool actor"
    assert told.splitlines()[2].startswith("step 3, at ")


def test_differences_failures_and_damage_are_shown(chromium: Chrome, page: str, runs: Runs) -> None:
    show(chromium, page, "configuration")
    rows = {
        row.get_attribute("data-key"): row.text
        for row in chromium.find_elements(By.CSS_SELECTOR, "tr[data-key]")
    }
    assert rows == {"tracking.run_name": f"tracking.run_name null {EVIL}", "trainer.seed": "trainer.seed 0 7"}
    find(chromium, "#all-keys").click()
    assert len(chromium.find_elements(By.CSS_SELECTOR, "tr[data-key]")) > 100
    show(chromium, page, "failures")
    assert find(chromium, "pre.failure").text.startswith(
        f"==== megarl train failed ====\nwhat    RuntimeError: {EVIL}"
    )
    assert find(chromium, ".problem").text.startswith(
        f"{runs.failed / 'generations.jsonl'}: cannot be read as validation samples"
    )
    show(chromium, page, "summary")
    states = [
        card.get_attribute("data-state") for card in chromium.find_elements(By.CSS_SELECTOR, ".card.run")
    ]
    assert states == ["complete", "failed"]


@pytest.mark.parametrize("width", [800, 1280])
def test_everything_fits_in_light_and_dark(chromium: Chrome, page: str, width: int) -> None:
    backgrounds = set()
    try:
        for dark in (False, True):
            browsers.show_as(chromium, width, 900, dark=dark)
            for tab in TABS:
                show(chromium, page, tab)
                assert chromium.execute_script("return document.documentElement.scrollWidth") <= width, tab
            backgrounds.add(find(chromium, "body").value_of_css_property("background-color"))
            find(chromium, "#theme").click()
            assert (
                find(chromium, "body").value_of_css_property("background-color") not in backgrounds
                or len(backgrounds) == 2
            )
        assert len(backgrounds) == 2
    finally:
        browsers.show_as(chromium, 1280, 900)


def test_nothing_is_asked_of_a_network_and_nothing_is_complained_of(chromium: Chrome, page: str) -> None:
    """Applies to this test and those before it."""
    for tab in TABS:
        show(chromium, page, tab)
    events = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    asked = {
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    }
    assert {
        url.split("#")[0]
        for url in asked
        if not url.startswith(("data:", "about:", "chrome:", "chrome-untrusted:"))
    } == {page}
    assert chromium.get_log("browser") == []


@pytest.fixture(scope="module")
def page_of_kinds(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of the page of an SFT run and of a PPO run with planned memory, reward parts and
    worker calls in its timeline."""
    folder = tmp_path_factory.mktemp("kinds")
    ppo = folder / "ppo"
    sft = folder / "sft"
    for path in (ppo, sft):
        make_run(path, 3, 16, 3, 2)
    model = CONFIGS_DIR / "models" / "quickstart" / "model"
    config = load_config(
        PPOConfig, CONFIGS_DIR / "quickstart.yaml", [f"model.path={model}", "actor.optim.lr=0.5"]
    )
    dump_config(config, ppo / "config.yaml")

    # may contain the quickstart's run, with planned memory
    absent = [f"model.path={folder / 'absent'}", "actor.optim.lr=0.25"]
    dump_config(load_config(SFTConfig, CONFIGS_DIR / "quickstart_sft.yaml", absent), sft / "config.yaml")

    with (ppo / "metrics.jsonl").open("a") as lines:
        line = {
            "step": 4,
            "reward/mean": 0.5,
            "reward/format/mean": 0.25,
            "reward/format/max": 1.0,
            "timing_s/step": 60.0,
        }
        lines.write(json.dumps(line) + "\n")

    timeline = Timeline(ppo)
    names = ("__init__", "submit_and_poll", "receive_weights", "resident_memory_gb", "my_own_phase")
    timeline.add(
        [Span("rollout", "rollout", 0, name, 10.0 * at, 10.0 * at + 9) for at, name in enumerate(names)], 1
    )
    timeline.write()
    output = ppo / "report.html"
    assert main(["report", str(ppo), str(sft), "--output", str(output)]) == 0

    return output.as_uri()


def test_columns_of_numbers_are_right_aligned(chromium: Chrome, page_of_kinds: str) -> None:
    """Holds for every column of the memory table except the first; in every table, headers are aligned like
    their cells."""
    script = """
        return [...document.querySelectorAll("table")].map((table) => [...table.rows].map((row) =>
            [...row.cells].map((cell) => getComputedStyle(cell).textAlign)));
    """
    tables = {}

    for tab in TABS:
        show(chromium, page_of_kinds, tab)
        tables[tab] = chromium.execute_script(script)

    assert [len(found) for found in tables.values()] == [0, 0, 1, 0, 1, 1, 0]
    for tab, (head, *rows) in ((tab, table) for tab, found in tables.items() for table in found):
        assert rows, tab
        assert all(row == head for row in rows), tab

    (memory,) = tables["memory"]
    assert memory[0] == ["left", *["right"] * 4]  # actor, reference, critic, rollout
    show(chromium, page_of_kinds, "memory")
    assert (
        "on the fullest device of each pool, as printed by megarl check" in find(chromium, "#tab .card").text
    )


@pytest.mark.parametrize("width", [800, 1280])
def test_hints_in_fields_are_not_cut(chromium: Chrome, page: str, width: int) -> None:
    script = """
        return [...document.querySelectorAll("input[placeholder]")].filter((field) => field.placeholder).map((field) => {
            const style = getComputedStyle(field), context = document.createElement("canvas").getContext("2d");
            context.font = style.font;
            const room = field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
            return [field.placeholder, context.measureText(field.placeholder).width <= room];
        });
    """
    try:
        browsers.show_as(chromium, width, 900)
        fits: dict[str, bool] = {}
        for tab in TABS:
            show(chromium, page, tab)
            fits |= dict(chromium.execute_script(script))
        assert len(fits) == 3
        assert [hint for hint, does_fit in fits.items() if not does_fit] == []
    finally:
        browsers.show_as(chromium, 1280, 900)


def test_the_timeline_has_readable_names(chromium: Chrome, page_of_kinds: str) -> None:
    show(chromium, page_of_kinds, "timeline")
    named = {
        entry.text.rsplit(" ", 2)[0]
        for entry in chromium.find_elements(By.CSS_SELECTOR, ".timeline-legend > span")
    }
    assert named == {"start", "generate", "receive weights", "measure memory", "my_own_phase"}


def test_curves_have_an_axis_of_steps_and_one_of_wall_time(chromium: Chrome, page: str, runs: Runs) -> None:
    show(chromium, page, "curves")
    chart = find(chromium, "[data-metric='actor/entropy']")
    canvas = chart.find_element(By.CSS_SELECTOR, "canvas")
    label = chart.find_element(By.CSS_SELECTOR, ".axis-label")
    chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    assert wait(chromium, lambda: label.text) == "step"
    Select(find(chromium, "select[aria-label='X axis']")).select_by_value("time")
    assert wait(chromium, lambda: label.text if label.text != "step" else None) == "wall time (min)"
    assert set(RUN_COLORS) <= pixels(chromium, canvas)
    told = hover(chromium, canvas).splitlines()
    minutes, unit = told[0].split(" ")
    assert unit == "min"

    for run_dir, line in zip(runs, told[1:], strict=True):
        name, value, word, step = line.replace(":", "").split()
        assert (name, word) == (run_dir.name, "step")
        assert float(minutes) == int(step)  # each step took 60 s
        assert float(value) == pytest.approx(metrics(run_dir)[int(step)]["actor/entropy"], rel=1e-4)

    ActionChains(chromium).move_to_element_with_offset(canvas, -50, 0).click_and_hold().move_by_offset(
        80, 0
    ).release().perform()
    shown = wait(chromium, lambda: find(chromium, ".pill").text)
    low, high = (float(edge) for edge in shown.removesuffix(" min ✕").split("–"))
    assert 1 < low < high < STEPS
    Select(find(chromium, "select[aria-label='X axis']")).select_by_value("step")
    assert not find(chromium, ".pill").is_displayed()


def test_reward_parts_are_in_the_overview(chromium: Chrome, page_of_kinds: str) -> None:
    show(chromium, page_of_kinds, "curves")
    overview = chromium.find_elements(By.CSS_SELECTOR, "[data-group='overview'] .chart")
    assert [chart.get_attribute("data-metric") for chart in overview][:3] == [
        "reward/mean",
        "reward/format/mean",
        "val/score/mean",
    ]
    charts = chromium.find_elements(By.CSS_SELECTOR, "[data-group='reward'] .chart")
    assert {chart.get_attribute("data-metric") for chart in charts} == {
        "reward/mean",
        "reward/format/mean",
        "reward/format/max",
    }


def test_runs_of_two_kinds_are_compared_by_what_both_can_have(chromium: Chrome, page_of_kinds: str) -> None:
    show(chromium, page_of_kinds, "configuration")
    assert find(chromium, "#kinds").text.startswith(
        "The kinds of these runs differ (ppo: ppo, sft: sft); only keys that all"
    )
    rows = {
        row.get_attribute("data-key"): row.text
        for row in chromium.find_elements(By.CSS_SELECTOR, "tr[data-key]")
    }
    assert rows["actor.optim.lr"] == "actor.optim.lr 0.5 0.25"
    assert "–" not in "".join(rows.values())  # no key is missing in one of them
    find(chromium, ".run-chip").click()
    wait(chromium, lambda: not chromium.find_elements(By.CSS_SELECTOR, "#kinds"))
    find(chromium, "#all-keys").click()
    keys = {row.get_attribute("data-key") for row in chromium.find_elements(By.CSS_SELECTOR, "tr[data-key]")}
    assert "data.columns.messages" in keys  # alone, it has all of its keys


@contextmanager
def served(run_dir: Path) -> Iterator[LiveReport]:
    report = LiveReport(list(open_runs([run_dir])))
    thread = threading.Thread(target=report.serve_forever)
    thread.start()

    try:
        yield report
    finally:
        report.shutdown()
        report.server_close()
        thread.join()


def test_a_live_page_follows_its_run(chromium: Chrome, tmp_path: Path) -> None:
    make_run(run_dir := tmp_path / "run", 6, 16, 3, 2)
    with served(run_dir) as report:
        chromium.get(report.url.rsplit("/", 2)[0])
        assert find(chromium, "body").text.startswith("the address has no key")
        chromium.get_log("browser")  # the expected refusal
        show(chromium, report.url, "samples")
        chromium.execute_script("window.isTheSame = true")
        options = "select[aria-label='Step'] option"
        assert [option.text for option in chromium.find_elements(By.CSS_SELECTOR, options)] == [
            "all",
            "1",
            "6",
        ]
        write_evil_samples(run_dir, 7)
        with (run_dir / "metrics.jsonl").open("a") as lines:
            lines.write(json.dumps({"step": 7, "actor/entropy": 0.5}) + "\n")
        wait(
            chromium,
            lambda: (
                chromium.execute_script("return document.querySelectorAll(arguments[0]).length", options) == 4
            ),
        )
        chromium.execute_script("location.hash = 'summary'")
        browsers.wait_for(chromium, "summary")
        assert "7 of" in find(chromium, ".card.run").text
        assert chromium.execute_script("return window.isTheSame && !window.hacked")
        assert chromium.get_log("browser") == []

    wait(chromium, lambda: "has stopped" in find(chromium, "#status").text)
