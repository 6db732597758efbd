"""Data sets are identified by the contents of their rows."""

from megarl.data.tables import Fingerprint


def of(*rows):
    fingerprint = Fingerprint()
    for ids, values in rows:
        fingerprint.add(*ids, values=values)
    return fingerprint.hex()


def test_the_same_rows_in_the_same_order_are_the_same():
    rows = [([[1, 2], [3]], {"ground_truth": "4", "style": "rule"}), ([[5]], None)]
    assert of(*rows) == of(([(1, 2), (3,)], {"style": "rule", "ground_truth": "4"}), ([[5]], None))


def test_every_difference_shows():
    rows = [
        [([[1, 2], [3]], "a"), ([[5]], "b")],
        [([[5]], "b"), ([[1, 2], [3]], "a")],
        [([[1], [2, 3]], "a"), ([[5]], "b")],
        [([[1, 2, 3]], "a"), ([[5]], "b")],
        [([[1, 2], [3]], "c"), ([[5]], "b")],
        [([[1, 2], [3]], "a")],
        [],
    ]
    assert len({of(*each) for each in rows}) == len(rows)
