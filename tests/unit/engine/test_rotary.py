"""The rotary embedding of packed sequences. `test_cpu_adaptations` compares its numbers with Megatron's loop."""

from __future__ import annotations

import pytest
import torch

from megarl.engine.rotary import angles_up_to, rotary_packed


def test_nothing_is_asked_of_the_device() -> None:
    """A meta tensor has no numbers: reading one raises an error where the host would wait for a CUDA device."""
    heads = torch.empty(12, 2, 8, device="meta", requires_grad=True)
    boundaries = torch.empty(4, dtype=torch.int32, device="meta")
    frequencies = torch.empty(7, 1, 1, 8, device="meta")
    turned = rotary_packed(heads, boundaries, frequencies)
    turned.sum().backward()
    assert turned.shape == heads.shape
    assert heads.grad is not None
    assert heads.grad.shape == heads.shape


@pytest.mark.parametrize(("rotated", "factor"), [(4, 1.0), (2, 1.0), (4, 1.5), (2, 1.5)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_is_turned_back(rotated: int, factor: float, interleaved: bool) -> None:
    heads = torch.randn(
        5, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    boundaries = torch.tensor([0, 3, 5], dtype=torch.int32)
    frequencies = torch.arange(3, dtype=torch.float64)[:, None, None, None].expand(-1, 1, 1, rotated) * 0.3
    assert torch.autograd.gradcheck(
        lambda heads: rotary_packed(
            heads, boundaries, frequencies, mla_rotary_interleaved=interleaved, mscale=factor
        ),
        [heads],
    )


def test_elements_behind_the_rotated_ones_are_kept() -> None:
    heads = torch.arange(24.0).view(3, 1, 8)
    boundaries = torch.tensor([0, 3], dtype=torch.int32)
    turned = rotary_packed(heads, boundaries, torch.ones(3, 1, 1, 4), mscale=2.0)
    assert torch.equal(turned[..., 4:], heads[..., 4:])
    assert not torch.isclose(turned[..., :4], heads[..., :4]).any()


def test_angles_are_those_of_the_factor() -> None:
    """A micro-batch caches them, and layers may differ."""
    heads = torch.ones(2, 1, 4)
    boundaries = torch.tensor([0, 2], dtype=torch.int32)
    frequencies = torch.ones(2, 1, 1, 4)
    once = rotary_packed(heads, boundaries, frequencies)
    assert torch.equal(rotary_packed(heads, boundaries, frequencies, mscale=2.0), once * 2)


def test_neighbors_are_turned_as_halves_of_reordered_heads() -> None:
    heads = torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(0))
    boundaries = torch.tensor([0, 3, 5], dtype=torch.int32)
    frequencies = torch.tensor([0.3, 0.1, 0.02]).repeat(2) * torch.arange(3)[:, None, None, None]
    halves = torch.cat([heads[..., 0::2], heads[..., 1::2]], dim=-1)
    assert torch.equal(
        rotary_packed(heads, boundaries, frequencies, mla_rotary_interleaved=True),
        rotary_packed(halves, boundaries.clone(), frequencies),
    )


class Embedding:
    """A rotary embedding as Megatron's, which counts the tables that it computes."""

    cp_group = None

    def __init__(self, *frequencies: float) -> None:
        self.inv_freq = torch.tensor(frequencies)
        self.lengths: list[int] = []

    def get_emb(self, max_seq_len: int) -> torch.Tensor:
        self.lengths.append(max_seq_len)
        return torch.outer(torch.arange(max_seq_len), self.inv_freq).repeat(1, 2)[:, None, None, :]


def test_one_table_of_angles_is_kept() -> None:
    embedding = Embedding(1.0, 0.5)
    tables = [angles_up_to(embedding, length) for length in (3, 5, 4, 5, 2)]
    assert embedding.lengths == [3, 5]
    assert [table.shape for table in tables] == [(length, 1, 1, 4) for length in (3, 5, 4, 5, 2)]
    for table in tables:
        expected = torch.tensor([[n, n / 2, n, n / 2] for n in range(len(table))])
        assert torch.equal(table[:, 0, 0], expected)
    assert len({table.untyped_storage().data_ptr() for table in tables[1:]}) == 1


def test_other_frequencies_have_another_table() -> None:
    embedding = Embedding(1.0)
    angles_up_to(embedding, 4)
    embedding.inv_freq = torch.tensor([3.0])
    assert angles_up_to(embedding, 2)[:, 0, 0, 0].tolist() == [0, 3]
