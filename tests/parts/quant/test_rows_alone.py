"""Products in BF16 of which no row depends on the others, in trainer and engine: one flow's proof rests on it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from appliance.terms.environment import EXACT_ON_CPU, EXACT_VARIABLE, THREADS_VARIABLE

INSTRUCTIONS = "ONEDNN_MAX_CPU_ISA"
SHAPES = ((259, 128), (256, 704), (1024, 2048))
OF_ADAPTERS = ((1, 128), (128, 1), (8, 704), (704, 8), (32, 2048))  # which both sides multiply by the same function
ROWS = (1, 2, 3, 5, 13, 16, 33, 100, 255, 510)

# In a process of its own: oneDNN asks once what it may use.
SCRIPT = f"""
import os, torch
from appliance.engine.plugin import register
from appliance.quant.cpu_gemm import exact_linear, widened_types

register()
if threads := os.environ.get("{THREADS_VARIABLE}"):
    torch.set_num_threads(int(threads))
    assert torch.get_num_threads() == int(threads)

def engines(x_MK, weight_NK, bias_N):
    if torch.bfloat16 in widened_types():
        return torch.nn.functional.linear(x_MK, weight_NK, bias_N)
    y_MN = x_MK.new_empty(len(x_MK), len(weight_NK))
    handle = torch.ops._C.create_onednn_mm_handler(weight_NK.t(), 32)
    torch.ops._C.onednn_mm(y_MN, x_MK, bias_N, torch.tensor(handle))
    torch.ops._C.release_dnnl_matmul_handler(handle)
    return y_MN

for channels, inputs in {SHAPES + OF_ADAPTERS}:
    layer_products = (exact_linear, engines) if (channels, inputs) in {SHAPES} else (exact_linear,)
    torch.manual_seed(0)
    weight_NK = (0.02 * torch.randn(channels, inputs)).bfloat16()
    x_MK, bias_N = torch.randn(511, inputs).bfloat16(), torch.randn(channels).bfloat16()
    whole = exact_linear(x_MK, weight_NK, bias_N)
    for rows in {ROWS}:
        for multiply in layer_products:
            print("equal", int(torch.equal(multiply(x_MK[-rows:].clone(), weight_NK, bias_N), whole[-rows:])))
"""


def equal_rows(**env: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in EXACT_ON_CPU}
    child = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=inherited | env, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr[-3000:]
    said = [line for line in child.stdout.splitlines() if line.startswith("equal ")]
    assert said == ["equal 1"] * ((2 * len(SHAPES) + len(OF_ADAPTERS)) * len(ROWS))


@pytest.mark.parametrize("threads", ["2", "5"])
@pytest.mark.parametrize("instructions", ["AVX512_CORE", EXACT_ON_CPU[INSTRUCTIONS]])
def test_no_row_of_a_product_depends_on_the_others(instructions: str, threads: str) -> None:
    """With what a plan leaves oneDNN, and with what processors have that know no BF16."""
    equal_rows(**EXACT_ON_CPU | {INSTRUCTIONS: instructions, THREADS_VARIABLE: threads})


def test_one_variable_does_it_where_no_plan_is() -> None:
    """Of `vllm serve`: a run's summary and the exported model's card name it."""
    equal_rows(**{EXACT_VARIABLE: "1"})
