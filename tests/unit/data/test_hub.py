"""Models and data sets named by hub names, with an HTTP hub on this machine and without any."""

import json
import re
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from megarl.cli.main import main
from megarl.config.finding import Status
from megarl.config.schema import ModelConfig, SFTConfig, SFTDataConfig
from megarl.data.hub import with_cached_models, with_hub_inputs
from megarl.doctor.checks import read_subject
from megarl.doctor.inputs import MODELS, check
from megarl.doctor.texts import TOKENIZERS
from tests.integration.tiny_run import REWARD, save_policy
from tests.unit.config.folders import ppo_values, write_yaml
from tests.unit.data.chats import prompt_row

SHA = "a" * 40
FILES = {
    "models/maker/tiny": {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"#"},
    "datasets/maker/one": {"data/train.jsonl": b'{"prompt": "1"}\n'},
    "datasets/maker/many": {"a.jsonl": b"{}\n", "b.parquet": b"PAR1"},
}


class Hub(BaseHTTPRequestHandler):
    """A stub of the hub with the requests that its library makes: a revision, its tree, files."""

    asked: list[str] = []

    def do_GET(self) -> None:
        path = self.path.split("?")[0].removeprefix("/")
        if path.startswith("api/"):
            repository = "/".join(path.split("/")[1:4])
            if repository not in FILES:
                self.send_error(404)
            elif "/tree/" in path:
                entries = FILES[repository].items()
                self.answer(
                    json.dumps(
                        [
                            {"type": "file", "path": name, "size": len(data), "oid": oid(data)}
                            for name, data in entries
                        ]
                    ).encode()
                )
            else:
                self.answer(
                    json.dumps(
                        {"id": "/".join(repository.split("/")[1:]), "sha": SHA, "siblings": []}
                    ).encode()
                )
            return

        repository, _, name = path.partition(f"/resolve/{SHA}/")
        self.asked.append(name)
        self.answer(FILES[repository if repository.startswith("datasets/") else f"models/{repository}"][name])

    do_HEAD = do_GET  # noqa: N815  (http.server's name)

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        for name, value in (
            ("Content-Length", str(len(content))),
            ("ETag", f'"{oid(content)}"'),
            ("X-Repo-Commit", SHA),
        ):
            self.send_header(name, value)

        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


def oid(content: bytes) -> str:
    return sha1(content).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start the hub and return its address, with an empty cache and an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    Hub.asked.clear()

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield address
        server.shutdown()


@pytest.fixture
def run(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a run with a model on the hub and local data."""
    save_policy(tmp_path / "policy")
    policy = {file.name: file.read_bytes() for file in (tmp_path / "policy").iterdir()}
    monkeypatch.setitem(FILES, "models/maker/policy", policy)
    path = write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path) | {"model": {"path": "maker/policy"}})
    pq.write_table(
        pa.Table.from_pylist([prompt_row(f"{number}+1=") for number in range(12)]), tmp_path / "train.parquet"
    )
    (tmp_path / "reward.py").write_text(REWARD)

    return path


def config(model: str = "model", *files: str) -> SFTConfig:
    return SFTConfig(model=ModelConfig(path=model), data=SFTDataConfig(train_files=list(files)))


def test_a_model_is_fetched_once_and_its_weights_for_a_run_alone(hub: str) -> None:
    checked, said, problems = with_hub_inputs(config("maker/tiny"), fetch=False)
    assert problems == []
    assert Hub.asked.count("model.safetensors") == 0
    assert said == ["model.path: maker/tiny is on the hub; `megarl train` downloads its weights"]
    assert (Path(checked.model.path) / "config.json").read_bytes() == b"{}"
    run, _, problems = with_hub_inputs(config("maker/tiny"), fetch=True)
    assert problems == []
    assert (Path(run.model.path) / "model.safetensors").read_bytes() == b"weights"
    assert not (Path(run.model.path) / "README.md").exists()
    num_asked = len(Hub.asked)
    assert with_hub_inputs(config("maker/tiny"), fetch=False) == (run, [], [])
    assert with_cached_models(config("maker/tiny")) == run
    assert len(Hub.asked) == num_asked


def test_the_only_file_of_a_data_set_is_taken_and_several_must_be_named(hub: str) -> None:
    mixed = config("model", "own.parquet", "maker/one")
    unfetched = (mixed, ["data.train_files: maker/one is on the hub; `megarl train` downloads it"], [])
    assert with_hub_inputs(mixed, fetch=False) == unfetched
    found = with_hub_inputs(mixed, fetch=True)[0]
    assert found.data.train_files[0] == "own.parquet"
    assert Path(found.data.train_files[1]).read_text() == '{"prompt": "1"}\n'
    (problem,) = with_hub_inputs(config("model", "maker/many"), fetch=True)[2]
    assert re.search("has 2 data files; name the ones to read: .*a.jsonl, .*b.parq", problem)


def test_every_name_that_the_hub_does_not_give_is_one_line_with_how_to_download_it(
    hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent, several = with_hub_inputs(config("maker/absent", "maker/many"), fetch=True)[2]
    assert absent.startswith(
        "model.path: 'maker/absent' does not exist locally, and the hub does not provide it ("
    )
    assert several.startswith("data.train_files: maker/many on the hub has 2 data files")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, data = with_hub_inputs(config("maker/tiny", "maker/one"), fetch=True)[2]
    assert "(hf download maker/tiny --local-dir DIR), and set model.path to DIR" in model
    assert (
        "--repo-type dataset maker/one --local-dir DIR), and set data.train_files to the files in DIR" in data
    )
    assert "\n" not in model + data


def test_commands_know_its_models_and_data(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands that need no weights report what a run would download; the others download it."""
    about_weights = "model.path: maker/policy is on the hub; `megarl train` downloads its weights"
    for command in (["check", "--fast"], ["check"], ["plan"]):
        assert main([*command, run]) == 0
        assert about_weights in capsys.readouterr().out

    assert main(["check", "--fast", run, "data.train_files=[maker/one]"]) == 0
    assert "data.train_files: maker/one is on the hub; `megarl train` downloads it" in capsys.readouterr().out
    subject, (good, warning) = read_subject(run, [], 0, None)
    assert (good.status, warning.status, warning.message) == (Status.ok, Status.warning, about_weights)
    assert subject.all_models_known
    assert "model.safetensors" not in Hub.asked

    # Files of the tokenizer.
    assert [found.status for found in check(subject) if found.check in (MODELS, TOKENIZERS)] == [Status.ok]

    assert main(["generate", "maker/policy", "1+1=", "--max-tokens", "4"]) == 0
    assert "model.safetensors" in Hub.asked
    sizes = ["--max-tokens", "8", "data.max_prompt_length=8"]
    assert (
        main(["eval", "maker/policy", "--data", "maker/one", "--reward", "reward.py:compute_score", *sizes])
        == 2
    )
    assert "data/train.jsonl: column 'data_source' is missing" in capsys.readouterr().err
    assert main(["init", "mine", "--model", "maker/policy", "--device", "cpu"]) == 0
    assert main(["check", "--fast", "mine/run.yaml"]) == 0
    assert main(["generate", "maker/absent", "1"]) == 2
    assert (
        "MODEL: 'maker/absent' does not exist locally, and the hub does not provide it"
        in capsys.readouterr().err
    )
