"""Checks the image of a sandbox: that of the configuration, and those of rows."""

from __future__ import annotations

import os
import re

from megarl.config.schema import SandboxProvider

# A name, with a registry, a tag and a digest; or the start of an image's hash.
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")


def image_problem(provider: SandboxProvider, image: object) -> str | None:
    """Return why a value cannot be an image, and what to use; None if it can be one."""
    if not isinstance(image, str):
        return f"is {image!r}, of type {type(image).__name__}; give a string, or null"
    if provider is SandboxProvider.container:
        if _IMAGE.fullmatch(image):
            return None
        return f"is {image!r}, which is no name of an image; use one such as docker.io/library/python:3.12"
    if not image.startswith("/"):
        return f"is {image!r}, but with local it is the absolute path of a folder"
    if os.path.realpath(image) == "/":
        return (
            f"is {image!r}, so that programs could read all files of this machine; use the folder of another "
            "file system, or null for the system and Python of the machine without its other files"
        )
    return None
