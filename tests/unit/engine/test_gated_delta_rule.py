"""The gated delta rule in chunks, against its definition token by token, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.engine.delta_mixing import causal_convolution, gated_delta_rule, normalized, row_chunks

CPU = torch.device("cpu")
# More than two chunks of 64; a whole chunk; less than one; a single token.
LENGTHS = (70, 150, 64, 1)


def token_by_token(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """Apply the definition of the module to each row, whose state is empty at first."""
    outputs = []
    for row in torch.arange(len(query)).split(lengths):
        state = torch.zeros(query.shape[1], query.shape[2], value.shape[2], dtype=query.dtype)
        for token in row.tolist():
            state = state * decay[token].exp()[:, None, None]
            read = torch.einsum("hkv,hk->hv", state, key[token])
            change = strength[token][:, None] * (value[token] - read)
            state = state + key[token][..., None] * change[:, None]
            outputs.append(torch.einsum("hkv,hk->hv", state, query[token]) * query.shape[-1] ** -0.5)
    return torch.stack(outputs)


def test_rows_in_chunks_are_what_the_definition_gives() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(sum(LENGTHS), 2, *shape, generator=generator)

    inputs = [normalized(draw(8)), normalized(draw(8)), draw(6), -draw().abs(), draw().sigmoid()]
    weights = draw(6)
    results = []
    for function, dtype in ((token_by_token, torch.float64), (gated_delta_rule, torch.float32)):
        copies = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
        rows = LENGTHS if function is token_by_token else row_chunks(LENGTHS, CPU)
        output = function(*copies, rows)
        (output * weights).sum().backward()
        results.append([output.detach(), *(tensor.grad for tensor in copies)])

    for expected, got in zip(*results, strict=True):
        assert got.dtype == torch.float32
        assert float((got - expected).norm() / expected.norm()) < 2e-6


@pytest.mark.parametrize("lengths", [(3, 40, 1, 17), (5, 5, 5)])
def test_every_token_has_one_place_and_padding_repeats_the_last_one(lengths: tuple[int, ...]) -> None:
    chunks = row_chunks(lengths, CPU)
    tokens = torch.arange(sum(lengths))
    assert torch.equal(chunks.places.flatten()[chunks.inverse], tokens)
    assert chunks.num_rows[0] == len(lengths)
    assert sum(chunks.num_rows) == len(chunks.places)
    ends = torch.tensor(lengths).cumsum(0) - 1
    others = torch.ones(chunks.places.numel(), dtype=torch.bool)
    others[chunks.inverse] = False
    assert set(chunks.places.flatten()[others].tolist()) <= set(ends.tolist())


def test_the_convolution_sees_no_token_of_the_row_before() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 2, 9)
    tokens = torch.randn(sum(lengths), 3, generator=generator)
    weight = torch.randn(3, 1, 4, generator=generator)
    got = causal_convolution(tokens, weight, row_chunks(lengths, CPU).offsets)
    expected = [
        F.silu(F.conv1d(F.pad(row.T[None], (3, 0)), weight, groups=3))[0].T for row in tokens.split(lengths)
    ]
    torch.testing.assert_close(got, torch.cat(expected))
