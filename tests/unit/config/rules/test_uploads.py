"""Test the URLs of checkpoints: what they are, and which file systems exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.config.validate import validate_here
from tests.unit.config.folders import ppo_values, write_yaml


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "checkpoint.upload=outputs/copies",
            r"checkpoint.upload: 'outputs/copies' is not a URL; give one such as s3://",
        ),
        (
            "checkpoint.upload=s4://bucket/run",
            r"checkpoint.upload: 's4://bucket/run': fsspec has no protocol 's4'",
        ),
        (
            "checkpoint.resume=s4://bucket/run",
            r"checkpoint.resume: 's4://bucket/run': fsspec has no protocol 's4'",
        ),
        ("checkpoint.upload=dropbox://run", r"checkpoint.upload: 'dropbox://run': .*needs the package s3fs"),
    ],
)
def test_a_wrong_url_is_refused(setting: str, message: str, tmp_path: Path) -> None:
    (violation,) = about_urls(tmp_path, setting)
    assert re.search(message, violation)


@pytest.mark.parametrize("key", ["checkpoint.upload", "checkpoint.resume"])
@pytest.mark.parametrize("url", ["s3://bucket/run", "file:///copies", "memory://copies"])
def test_a_url_is_accepted_without_a_connection(key: str, url: str, tmp_path: Path) -> None:
    assert about_urls(tmp_path, f"{key}={url}") == []


def about_urls(tmp_path: Path, setting: str) -> list[str]:
    path = write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))
    found = [str(violation) for violation in validate_here(load_config(PPOConfig, path, [setting]))]
    return [violation for violation in found if violation.startswith("checkpoint.")]
