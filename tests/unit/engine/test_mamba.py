"""Mamba-2 mixers in chunks, against their definition token by token, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.engine.delta_mixing import DeltaRows, row_chunks
from megarl.engine.mamba import row_numbers, state_space

CPU = torch.device("cpu")
# More than two chunks of 64; a whole chunk; less than one; a single token.
LENGTHS = (70, 150, 64, 1)


def token_by_token(
    inputs: Tensor, written: Tensor, read: Tensor, steps: Tensor, decay: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """Apply the definition of the module to each row, whose state is empty at first."""
    group = torch.arange(inputs.shape[1]) // (inputs.shape[1] // written.shape[1])
    outputs = []
    for row in torch.arange(len(inputs)).split(lengths):
        state = torch.zeros(inputs.shape[1], written.shape[2], inputs.shape[2], dtype=inputs.dtype)
        for token in row.tolist():
            change = torch.einsum("hk,hv->hkv", written[token][group], inputs[token])
            state = state * decay[token].exp()[:, None, None] + change * steps[token][:, None, None]
            outputs.append(torch.einsum("hkv,hk->hv", state, read[token][group]))
    return torch.stack(outputs)


def test_rows_in_chunks_are_what_the_definition_gives() -> None:
    """Four heads in two groups."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(sum(LENGTHS), *shape, generator=generator)

    inputs = [draw(4, 6), draw(2, 8), draw(2, 8), draw(4).sigmoid(), -draw(4).abs()]
    weights = draw(4, 6)
    results = []
    for function, dtype in ((token_by_token, torch.float64), (state_space, torch.float32)):
        copies = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
        rows = LENGTHS if function is token_by_token else row_chunks(LENGTHS, CPU)
        output = function(*copies, rows)
        (output * weights).sum().backward()
        results.append([output.detach(), *(tensor.grad for tensor in copies)])

    for expected, got in zip(*results, strict=True):
        assert got.dtype == torch.float32
        assert float((got - expected).norm() / expected.norm()) < 2e-6


def test_kernels_are_told_the_row_of_each_token() -> None:
    rows = DeltaRows(None, None, torch.tensor([0, 2, 3, 7]), row_chunks((2, 1, 4), CPU))
    assert row_numbers(rows, 7).tolist() == [[0, 0, 1, 2, 2, 2, 2]]
