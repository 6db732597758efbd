"""Compare block-scaled FP8 with SGLang's own functions, in a process that has SGLang."""

from __future__ import annotations

import json
import subprocess

from tests import fork_server

PROGRAM = """
import json
import torch
from sglang.benchmark.deepseek_utils import per_block_cast_to_fp8 as with_plain_scales
from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
from sglang.srt.layers.quantization.fp8_utils import per_block_cast_to_fp8 as with_powers_of_two
from megarl.rollout.sglang.cpu_fp8 import dequantized
from megarl.weights.block_scaling import block_maxima, quantize, scales_of
from megarl.weights.tensors import TensorSlice

torch.manual_seed(0)
found = {}
for dtype in (torch.bfloat16, torch.float32):
    # Partial blocks in both dimensions, and a block of zeros.
    weight = (torch.randn(1000, 700) * 0.02).to(dtype)
    weight[128:256, :128] = 0
    whole = TensorSlice.whole(weight.shape)
    scales = scales_of(block_maxima(weight, (0, 0)))
    values = quantize(weight, scales, whole)

    of_sglang, sglang_scales = with_plain_scales(weight)
    not_zero = torch.ones_like(scales, dtype=torch.bool)
    not_zero[1, 0] = False
    steps = values.view(torch.uint8).int() - of_sglang.view(torch.uint8).int()
    powers, scales_of_two = with_powers_of_two(weight)
    found[str(dtype)] = {
        "scales": torch.equal(scales[not_zero], sglang_scales[not_zero]),
        "share_of_other_values": float((steps != 0).float().mean()),
        "largest_step": int(steps.abs().max()),
        "powers_of_two": torch.equal(
            quantize(weight, scales_of_two, whole).view(torch.uint8), powers.view(torch.uint8)
        ),
        "dequantized": torch.equal(
            dequantized(values, scales, dtype), block_quant_dequant(values, scales, [128, 128], dtype)
        ),
    }
print(json.dumps(found))
"""


def test_values_and_scales_are_those_of_sglang(forked_processes: None) -> None:
    command = [*fork_server.PYTHON, "--sglang", "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    for found in json.loads(run.stdout.splitlines()[-1]).values():
        # SGLang multiplies by 448 / maximum instead of dividing by the scale, which rounds ties to the neighbor.
        assert found.pop("share_of_other_values") < 1e-3
        assert found.pop("largest_step") <= 1
        assert all(found.values()), found
