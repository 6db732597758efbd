"""Entries of a mapping are replaced for a block only."""

from contextlib import suppress

from megarl.machine.replaced import replaced


def test_what_was_there_before_is_restored_after_an_error_too() -> None:
    place = {"kept": 1, "replaced": 2}
    with suppress(KeyError), replaced(place, {"replaced": 3, "added": None}):
        assert place == {"kept": 1, "replaced": 3, "added": None}
        del place["added"]  # by what runs in the block
        raise KeyError
    assert place == {"kept": 1, "replaced": 2}
