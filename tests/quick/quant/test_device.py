"""Which scheme `auto` takes on which device, and which device has no kernels for a scheme."""

from __future__ import annotations

import pytest

from appliance.terms.devices import GPUS, StoredResult, automatic_scheme, gpu_of_product, why_not
from appliance.terms.schemes import Scheme

NONE = frozenset[str]()
VNNI = frozenset({"avx512_vnni"})
AMPERE = ("a100", "a10", "a40", "a6000", "rtx3090")
ADA_AND_HOPPER = ("l40s", "l40", "l4", "rtx4090", "h100", "h200", "h20")
BLACKWELL = ("b200", "b300", "rtx5090")


def measured(**ratios: float) -> StoredResult:
    """int8=1.2, fp8_channel=1.3."""
    return StoredResult(
        tuple((Scheme(name.replace("_", "-")), ratio) for name, ratio in ratios.items()), measurement="bench"
    )


def test_every_gpu_belongs_to_a_generation() -> None:
    assert set(GPUS) == {*AMPERE, *ADA_AND_HOPPER, *BLACKWELL}


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20-3e", "h20"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_a_gpu_by_the_name_of_its_maker(product: str, name: str) -> None:
    assert gpu_of_product(product) is GPUS[name]


@pytest.mark.parametrize("product", ["NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA RTX A1000", "NVIDIA H800"])
def test_a_name_that_has_anothers_in_it_is_not_known(product: str) -> None:
    assert gpu_of_product(product) is None


@pytest.mark.parametrize("gpu", AMPERE)
def test_ampere_runs_int8(gpu: str) -> None:
    why = f"{gpu} has INT8 tensor cores and none for FP8; by rule, not measured"
    assert automatic_scheme(gpu, cpu_flags=NONE) == (Scheme.INT8, why)


@pytest.mark.parametrize("gpu", BLACKWELL)
def test_blackwell_runs_fp8_and_refuses_int8(gpu: str) -> None:
    why = f"{gpu} has FP8 tensor cores, and vLLM has no INT8 kernels for it; by rule, not measured"
    assert automatic_scheme(gpu, cpu_flags=NONE) == (Scheme.FP8, why)
    assert why_not(Scheme.INT8, device=gpu, cpu_flags=NONE) == f"vLLM has no INT8 kernels for {gpu} (Blackwell)"
    assert why_not(Scheme.FP8, device=gpu, cpu_flags=NONE) == ""


@pytest.mark.parametrize("gpu", ADA_AND_HOPPER)
def test_ada_and_hopper_go_by_what_was_measured(gpu: str) -> None:
    by_rule = f"{gpu} has INT8 tensor cores; by rule, not measured: `appliance bench` measures it"
    assert automatic_scheme(gpu, cpu_flags=NONE) == (Scheme.INT8, by_rule)
    stored = measured(int8=1.31, fp8_channel=1.42, fp8=1.4)
    why = "the fastest, measured: int8 1.31 times bf16, fp8-channel 1.42 times bf16, fp8 1.40 times bf16 (bench)"
    assert automatic_scheme(gpu, cpu_flags=NONE, stored=stored) == (Scheme.FP8_CHANNEL, why)


def test_what_does_not_pay_is_not_taken() -> None:
    stored = measured(int8=1.04, fp8=0.9)
    why = "quantising does not pay: measured: int8 1.04 times bf16, fp8 0.90 times bf16 (bench)"
    assert automatic_scheme("h100", cpu_flags=NONE, stored=stored) == (Scheme.BF16, why)
    assert automatic_scheme("h100", cpu_flags=NONE, stored=measured(int8=1.05))[0] is Scheme.INT8


def test_elsewhere_the_rule_decides_and_the_measurement_is_told() -> None:
    why = "the processor has avx512_vnni; by rule, measured: int8 0.98 times bf16 (bench)"
    assert automatic_scheme("cpu", cpu_flags=VNNI, stored=measured(int8=0.98)) == (Scheme.INT8, why)


@pytest.mark.parametrize("flag", ["amx_int8", "avx512_vnni", "avx_vnni"])
def test_a_cpu_with_int8_instructions_runs_int8(flag: str) -> None:
    assert automatic_scheme("cpu", cpu_flags=frozenset({flag, "sse"})) == (Scheme.INT8, f"the processor has {flag}")


def test_a_cpu_without_runs_bf16() -> None:
    why = "the processor has none of amx_int8, avx512_vnni, avx_vnni"
    assert automatic_scheme("cpu", cpu_flags=frozenset({"avx2"})) == (Scheme.BF16, why)


def test_int4_runs_on_any_cpu_and_on_no_gpu() -> None:
    assert why_not(Scheme.INT4, device="cpu", cpu_flags=NONE) == ""
    reason = "`int4` runs on a CPU only: no weight update of it was ever proven on a GPU"
    assert {why_not(Scheme.INT4, device=gpu, cpu_flags=NONE) for gpu in GPUS} == {reason}


@pytest.mark.parametrize("scheme", [Scheme.FP8, Scheme.FP8_CHANNEL, Scheme.FP8_BLOCK])
def test_fp8_needs_tensor_cores_for_it(scheme: Scheme) -> None:
    able = {gpu for gpu in GPUS if not why_not(scheme, device=gpu, cpu_flags=NONE)}
    assert able == {*ADA_AND_HOPPER, *BLACKWELL}
    assert why_not(scheme, device="a100", cpu_flags=NONE) == "FP8 needs compute capability 8.9, a100 has 8.0"
    assert why_not(scheme, device="cpu", cpu_flags=VNNI).startswith("vLLM's FP8 kernels on a CPU need AMX")
    assert why_not(scheme, device="cpu", cpu_flags=frozenset({"amx_int8"})) == (
        f"on a CPU vLLM widens FP8 weights and multiplies in BF16 (W8A16), which is not `{scheme}`"
    )
