"""What runs a Dockerfile's instructions for tests of the CPU image does what Docker would, and refuses the
unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.dockerfile_steps import DockerfileSteps

STEPS = """\
ARG BASE_IMAGE=somewhere/image:1
FROM ${BASE_IMAGE}
ENV GREETING="good day" \\
    PATH=/opt/app/bin:$PATH
RUN useradd --create-home somebody && install --directory /opt/app
USER 1000
WORKDIR /opt/app
ARG WHERE=here
COPY --chown=somebody kept.txt bin/
RUN echo "$GREETING $WHERE" > /opt/app/said.txt \\
    && test -f bin/kept.txt && test ! -e inner
COPY . .
CMD ["cat", "said.txt"]
"""


def steps(tmp_path: Path, text: str, **build_args: str) -> DockerfileSteps:
    context = tmp_path / "context"
    folder = tmp_path / "image"
    (context / "inner" / "__pycache__").mkdir(parents=True)
    (context / "left_out").mkdir()
    folder.mkdir()

    for name in (
        "kept.txt",
        "inner/kept.txt",
        "inner/left_out",
        "inner/__pycache__/gone.pyc",
        "left_out/gone.txt",
    ):
        (context / name).touch()

    (context / ".dockerignore").write_text("# a comment\nleft_out\n**/__pycache__\n")
    (context / "Dockerfile").write_text(text)
    return DockerfileSteps(context / "Dockerfile", context, folder, build_args, path="/usr/bin:/bin")


def test_steps_run_in_the_folder_with_variables_and_arguments(tmp_path: Path) -> None:
    image = steps(tmp_path, STEPS, WHERE="there")
    image.build()
    ended = image.start()
    assert ended.stdout == "good day there\n"
    assert image.user == "1000"


def test_what_dockerignore_names_is_not_copied(tmp_path: Path) -> None:
    steps(tmp_path, STEPS).build()
    made = {
        str(path.relative_to(tmp_path / "image"))
        for path in (tmp_path / "image").rglob("*")
        if path.is_file()
    }
    assert made == {
        "bin/kept.txt",
        "said.txt",
        "kept.txt",
        "inner/kept.txt",
        "inner/left_out",
        "Dockerfile",
        ".dockerignore",
    }


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("RUN false", "RUN false"),
        ("RUN useradd somebody && echo more", "only a part of this step"),
        ("ONBUILD RUN true", "ONBUILD is not known here"),
        ("WORKDIR /elsewhere", "one WORKDIR is known here"),
    ],
)
def test_a_step_that_fails_or_is_not_known_ends_the_build(tmp_path: Path, step: str, said: str) -> None:
    image = steps(tmp_path, f"{STEPS}{step}\n")
    with pytest.raises(AssertionError, match=said):
        image.build()
