"""Take screenshots of `megarl report` for the documentation, in Chromium.

    python -m docs.generate.screenshots RUN_DIR [RUN_DIR ...]

The command writes report-curves.png, report-samples.png and report-timeline.png to docs/static, from a report
of these runs. The documentation shows the quickstart and GRPO on the same additions.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select

from docs.generate.browser import browser, show_as, wait_for
from megarl.cli.main import main as megarl

FOLDER = Path("docs/static")
WIDTH = 1280
HEIGHTS = {"curves": 860, "samples": 640, "timeline": 430}


def main(run_dirs: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "report.html"
        if status := megarl(["report", *run_dirs, "--output", str(page)]):
            return status
        with browser() as chromium:
            for tab, height in HEIGHTS.items():
                show_as(chromium, WIDTH, height)
                chromium.get("about:blank")
                chromium.get(f"{page.as_uri()}#{tab}")
                wait_for(chromium, tab)
                if tab == "samples":
                    _read_a_sample(chromium)
                chromium.execute_async_script(
                    "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
                )
                picture = FOLDER / f"report-{tab}.png"
                chromium.save_screenshot(str(picture))
                print(f"{picture}: {picture.stat().st_size / 1e3:.0f} kB")
    return 0


def _read_a_sample(chromium: Chrome) -> None:
    """Open a sample and point at its second-to-last token.

    The sample has the largest absolute advantage of a step in the middle of the run.
    """
    step = Select(chromium.find_element(By.CSS_SELECTOR, "select[aria-label='Step']"))
    step.select_by_index(len(step.options) // 2)
    Select(chromium.find_element(By.CSS_SELECTOR, "select[aria-label='Order']")).select_by_value("advantage")
    token = chromium.find_elements(By.CSS_SELECTOR, "#response [data-index]")[-2]
    ActionChains(chromium).move_to_element(token).perform()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
