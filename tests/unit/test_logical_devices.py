"""Memory of a logical device is opened by those that see the device, and by nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.logical_devices import VARIABLE, VisibleDevices
from tests.mortal_ranks import Place, mortal_ranks


def test_memory_is_opened_where_its_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = VisibleDevices([2, 0]).allocate(8)
    memory.bytes[3] = 7

    for seen in ("1,2", "2"):
        monkeypatch.setenv(VARIABLE, seen)
        assert VisibleDevices().open(memory.handle).tolist() == [0, 0, 0, 7, 0, 0, 0, 0]

    for unseen in ("0,1", "1", ""):
        monkeypatch.setenv(VARIABLE, unseen)
        with pytest.raises(RuntimeError, match="invalid device ordinal: the memory is of device 2"):
            VisibleDevices().open(memory.handle)

    monkeypatch.delenv(VARIABLE)
    VisibleDevices().open(memory.handle)[0] = 9
    assert memory.bytes[0] == 9
    handle = memory.handle
    del memory
    with pytest.raises(FileNotFoundError):
        VisibleDevices().open(handle)


# ---- a push of a hybrid step, as megarl does it: one segment on the device of the trainer's first rank, for every engine


def trainer(place: Place) -> None:
    memory = VisibleDevices().allocate(4 * 8)
    memory.bytes.view(torch.float32).copy_(torch.arange(8.0))
    place.say(memory.handle)
    place.listen()


def engine(place: Place) -> None:
    """Says the sum of what it loads, or why it cannot."""
    handle = place.listen()
    try:
        place.say(float(VisibleDevices().open(handle).view(torch.float32).sum()))
    except RuntimeError as error:
        place.say(str(error))


@pytest.mark.usefixtures("forked_processes")
def test_an_engine_cannot_open_the_segment_of_a_trainer_on_a_device_that_only_others_see(
    tmp_path: Path,
) -> None:
    """Engines of one device each, as Ray gives them; an engine that saw the whole node could."""
    environments = [{VARIABLE: seen} for seen in ("0", "0", "1", "1,0")]
    with mortal_ranks(tmp_path, [trainer, engine, engine, engine], environments) as (of_trainer, *of_engines):
        handle = of_trainer.hear()
        for rank in of_engines:
            rank.tell(handle)
        answers = [rank.hear() for rank in of_engines]

    assert answers == [
        28.0,
        "CUDA error: invalid device ordinal: the memory is of device 0, this process sees (1,)",
        28.0,
    ]
