"""Run headless Chromium for screenshots, tests and measurements.

Debian packages it: `apt-get install chromium chromium-driver`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

BROWSER = "chromium"
DRIVER = "chromedriver"


def is_installed() -> bool:
    return shutil.which(BROWSER) is not None and shutil.which(DRIVER) is not None


@contextmanager
def browser(width: int = 1280, height: int = 900) -> Generator[Chrome]:
    """Start a browser that makes no network requests of its own.

    `get_log("browser")` returns its console messages, `get_log("performance")` its requests.
    """
    with tempfile.TemporaryDirectory() as profile:
        options = ChromeOptions()
        options.binary_location = shutil.which(BROWSER) or BROWSER
        switches = [
            "headless=new",
            "disable-gpu",
            "disable-dev-shm-usage",
            "disable-background-networking",
            "no-first-run",
        ]
        switches += [f"user-data-dir={profile}", "force-device-scale-factor=1"]
        if os.geteuid() == 0:
            switches.append("no-sandbox")  # Chromium has no sandbox for root
        for switch in switches:
            options.add_argument(f"--{switch}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = Chrome(options, Service(shutil.which(DRIVER)))
        try:
            show_as(driver, width, height)
            yield driver
        finally:
            driver.quit()


def show_as(driver: Chrome, width: int, height: int, *, dark: bool = False) -> None:
    """Set the size of the page in CSS pixels and the preferred color scheme."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def wait_for(driver: Chrome, tab: str) -> None:
    """Wait until a tab of the page of `megarl report` is complete."""
    selector = f"#tab[data-tab={tab}][data-ready]"
    WebDriverWait(driver, 20, poll_frequency=0.02).until(
        lambda _: driver.find_elements(By.CSS_SELECTOR, selector)
    )
