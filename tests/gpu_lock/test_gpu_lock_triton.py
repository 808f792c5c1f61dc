"""The INT8 quantiser, compiled by the locked Triton for GPUs that are not there: each operation rounds as IEEE says."""

from __future__ import annotations

import re

import pytest

# K -> warps, as quantise_int8_triton chooses them: one warp, several, the widest row.
ROWS = {896: 1, 4864: 8, 32768: 32}


@pytest.mark.parametrize("has_absmax", [False, True], ids=["own-absmax", "given-absmax"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_quantiser_compiles_and_rounds_exactly(capability: int, dtype: str, has_absmax: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from appliance.quant.triton_int8 import _row_kernel

    types = {
        "weight": f"*{dtype}",
        "codes": "*i8",
        "scale": "*fp32",
        "absmax": "*fp32",
        **dict.fromkeys(("K", "stride_weight", "stride_codes"), "i32"),
        **dict.fromkeys(("HAS_ABSMAX", "BLOCK"), "constexpr"),
    }
    for K, warps in ROWS.items():
        constants = {"HAS_ABSMAX": has_absmax, "BLOCK": triton.next_power_of_2(K)}
        source = ASTSource(fn=_row_kernel, signature=types, constexprs=constants)
        options = {"num_warps": warps, "enable_fp_fusion": False}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert len(compiled.asm["cubin"]) > 0
        assert f".target sm_{capability}" in compiled.asm["ptx"]
        found = set(re.findall(r"\b((?:div|mul|add|sub|fma|mad|rcp)\.[\w.]*f32)\b", compiled.asm["ptx"]))
        assert found <= {"div.rn.f32", "mul.rn.f32", "add.rn.f32", "sub.rn.f32", "mul.f32", "add.f32", "sub.f32"}
        assert "div.rn.f32" in found
