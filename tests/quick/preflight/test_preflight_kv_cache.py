"""Where vLLM's attention on a CPU has keys and values in FP8: by the processor and by the width of heads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from plans import HOST

from appliance.plan.build import build_plan
from appliance.preflight.device import judge_kv_cache
from appliance.recipe.load import load_recipe
from appliance.terms.shapes import ModelShape

FLAGS = frozenset({"avx512f", "avx512_vnni"})
TOO_OLD = "`fp8` needs a processor with AVX-512, which this one does not have"
TOO_ODD = "the attention heads of tiny-arithmetic are 80 wide, and on a CPU `fp8` needs a multiple of 32"


@pytest.mark.parametrize(
    ("sets", "flags", "head_size", "messages"),
    [
        (("rollout.kv_cache=fp8",), FLAGS, 64, []),
        (("rollout.kv_cache=fp8",), {"avx2"}, 64, [TOO_OLD]),
        (("rollout.kv_cache=fp8",), {"avx2"}, 80, [TOO_OLD, TOO_ODD]),
        (("rollout.kv_cache=fp8",), FLAGS, 80, [TOO_ODD]),
        ((), {"avx2"}, 80, []),
        (("rollout.kv_cache=fp8", "cluster.device=h100"), {"avx2"}, 80, []),
    ],
)
def test_keys_in_fp8_are_refused_where_no_kernel_has_them(
    sets: tuple[str, ...], flags: set[str], head_size: int, messages: list[str]
) -> None:
    host = dataclasses.replace(HOST, cpu_flags=frozenset(flags))
    plan = build_plan(load_recipe("arithmetic-tiny-int8", sets=sets), run_dir=Path("/runs/a-1"), host=host)
    findings = list(judge_kv_cache(plan, host, ModelShape(heads=4, kv_heads=2, head_size=head_size)))
    assert [(finding.code, finding.message, finding.remedy) for finding in findings] == [
        ("kv-cache", message, "use `auto`") for message in messages
    ]
    without_shape = [finding.message for finding in judge_kv_cache(plan, host, None)]
    assert without_shape == [message for message in messages if message == TOO_OLD]
