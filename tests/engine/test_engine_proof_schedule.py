"""What the proofs look at, sync after sync, and where they keep it. No engine: the kernels' side is made by hand."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.linear import QKVParallelLinear

from appliance.engine import kernel_proof
from appliance.engine.fp8_proof import EmulatedProof, NativeBlockProof, NativeFp8Proof
from appliance.engine.int4 import Int4Proof
from appliance.engine.kernel_proof import ROTATION, Bf16Proof, Int8Proof, KernelProof, choose_request, exact_product
from appliance.engine.tensor_slots import LocalShape, Slot, slots
from appliance.errors import SyncError
from appliance.quant import numba_fp8
from appliance.quant.codec import QuantisedWeight
from appliance.quant.codec_int8 import quantise_int8
from appliance.terms.schemes import Scheme

EVERY = (1, 3, 8, 20)


def proof(kind: type[KernelProof], scheme: Scheme, *, channels: int, length: int, **when: int) -> KernelProof | None:
    """when: turn, sync and every. None where the layer is not asked."""
    request = choose_request(when["turn"], sync=when["sync"], every=when["every"])
    shape = LocalShape(channels, length, is_cut=False)
    return None if request is None else kind("layer", shape=shape, scheme=scheme, request=request)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("turn", [0, 1, 5])
def test_every_layer_is_asked_once_in_each_round_and_when_all_are(every: int, turn: int) -> None:
    assert choose_request(turn, sync=1, every=every).full
    for start in range(1, 20 * every, every):
        syncs = [sync for sync in range(start, start + every) if choose_request(turn, sync=sync, every=every)]
        assert syncs
        of_all = {1, ROTATION * every, 2 * ROTATION * every}
        assert len(set(syncs) - of_all) <= 1


@pytest.mark.parametrize("every", EVERY)
def test_a_full_proof_ends_each_eight_rounds_and_is_of_all_layers(every: int) -> None:
    syncs = range(2, 20 * ROTATION * every)
    full = [
        {turn for turn in range(5) if (one := choose_request(turn, sync=sync, every=every)) and one.full}
        for sync in syncs
    ]
    assert {len(one) for one in full} <= {0, 5}
    at = [sync for sync, turns in zip(syncs, full, strict=True) if turns]
    assert at == list(range(ROTATION * every, syncs.stop, ROTATION * every))


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("channels", [96, 129, 1024, 1100])
@pytest.mark.parametrize("turn", [0, 1, 7])
def test_every_row_of_an_emulated_layer_is_looked_at(every: int, channels: int, turn: int) -> None:
    """Within any 8 rounds, and each round looks at other rows than the one before."""
    seen: dict[int, set[int]] = {}
    for sync in range(2, 2 * ROTATION * every):
        layer_proof = proof(EmulatedProof, Scheme.FP8, channels=channels, length=8, turn=turn, sync=sync, every=every)
        if layer_proof is not None:
            rows = {row for part in layer_proof._due_rows() for row in range(channels)[part]}
            assert rows and (layer_proof.request.full or len(rows) <= 256)
            seen[sync] = rows
    for first in range(1, ROTATION):
        last = (first + ROTATION) * every
        together = set().union(*(rows for sync, rows in seen.items() if first * every < sync <= last))
        assert together == set(range(channels))
    if channels > 128:
        parts = {sync // every: rows for sync, rows in seen.items() if len(rows) < channels}
        assert all(parts[number] != parts[number + 1] for number in parts if number + 1 in parts)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("length", [32, 64, 96, 1000, 4096])
def test_every_column_of_a_bf16_layer_is_looked_at(every: int, length: int) -> None:
    """In as many rounds as there are blocks of 64 columns, for a layer of any turn."""
    blocks = -(-length // 64)
    for turn in (0, 1, 7):
        seen = torch.zeros(length, dtype=torch.bool)
        for sync in range(1, blocks * every + 1):
            layer_proof = proof(Bf16Proof, Scheme.BF16, channels=1, length=length, turn=turn, sync=sync, every=every)
            if layer_proof is not None:
                assert bool(layer_proof._probe_K[layer_proof._block].abs().eq(1).all())
                seen[layer_proof._block] = True
        assert bool(seen.all())


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        (Int8Proof, Scheme.INT8),
        (Int4Proof, Scheme.INT4),
        (Bf16Proof, Scheme.BF16),
        *[(EmulatedProof, one) for one in Scheme if one.spec.can_emulate],
        (NativeFp8Proof, Scheme.FP8),
        (NativeFp8Proof, Scheme.FP8_CHANNEL),
        (NativeBlockProof, Scheme.FP8_BLOCK),
    ],
)
def test_a_proof_keeps_its_numbers_on_the_cpu(kind: type[KernelProof], scheme: Scheme) -> None:
    """An update on a GPU runs with the GPU as torch's default device."""
    with torch.device("meta"):
        layer_proof = proof(kind, scheme, channels=256, length=128, turn=0, sync=1, every=1)
    devices = {name: value.device.type for name, value in vars(layer_proof).items() if isinstance(value, Tensor)}
    assert devices and set(devices.values()) == {"cpu"}
    with torch.device("meta"):
        layer_proof.take(
            Slot("layer", "weight", rows=slice(0, 256)), torch.ones(256, 128, dtype=torch.bfloat16, device="cpu")
        )
    devices = {name: value.device.type for name, value in vars(layer_proof).items() if isinstance(value, Tensor)}
    assert set(devices.values()) == {"cpu"}


def test_a_quantiser_that_is_not_the_codec_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine uses the same one: in any chunk, and rows that move from sync to sync."""
    weight_NK = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    original = kernel_proof.quantise_rows
    monkeypatch.setattr(kernel_proof, "_CHUNK_ELEMENTS", 32 * 32)  # 2 chunks of 32 rows
    monkeypatch.setattr(kernel_proof, "_SAMPLED_ELEMENTS", 16 * 32)  # a row of each 16

    def run(sync: int, *, bad: slice) -> bool:
        chunks = iter(range(2))

        def quantise(rows_NK: Tensor, *, into_NK: Tensor) -> QuantisedWeight:
            right, chunk = original(rows_NK, into_NK=into_NK), next(chunks)
            own = [row for row in range(32) if chunk * 32 + row in range(64)[bad]]
            right.codes_NK[own] ^= 1
            return right

        monkeypatch.setattr(kernel_proof, "quantise_rows", quantise)
        layer_proof = proof(Int8Proof, Scheme.INT8, channels=64, length=32, turn=0, sync=sync, every=1)
        try:
            layer_proof.take(Slot("layer", "weight", rows=slice(0, 64)), weight_NK)
            kernel_proof.check_quantiser({"layer": layer_proof})
        except SyncError as error:
            start = "weight update: layer: this CPU's row quantiser differs from the codec in row "
            assert error.message.startswith(start)
            assert int(error.message.removeprefix(start)) in range(64)[bad]
            return True
        return False

    assert not run(1, bad=slice(0, 0))
    assert all(run(1, bad=slice(16 * part, 16 * (part + 1))) for part in range(4))
    # One bad row of 16, one drawn: seen in 120 syncs but for (15/16)^120 = 4e-4; the seeds are fixed.
    assert any(run(sync, bad=slice(53, 54)) for sync in range(1, 121))


@pytest.mark.parametrize("scheme", [one for one in Scheme if one.spec.can_emulate])
def test_a_compiled_codec_that_is_not_the_codec_is_found(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine uses the same one: some rows of those that are looked at, other ones from sync to sync."""
    weight_NK = torch.randn(300, 140, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    original = numba_fp8.quantise_fp8_numba_by

    def run(sync: int, *, bad: slice) -> bool:
        def quantise(rows_NK: Tensor, **how: object) -> QuantisedWeight:
            right = original(rows_NK, **how)
            right.codes_NK.view(torch.uint8)[bad, 139] ^= 1
            return right

        monkeypatch.setattr(numba_fp8, "quantise_fp8_numba_by", quantise)
        one = proof(EmulatedProof, scheme, channels=300, length=140, turn=0, sync=sync, every=1)
        try:
            one.take(Slot("layer", "weight", rows=slice(0, 300)), weight_NK)
        except SyncError as error:
            assert error.message.startswith("weight update: layer: the compiled quantiser differs from the codec in")
            return True
        return False

    assert not any(run(sync, bad=slice(0, 0)) for sync in range(1, 17))
    assert all(run(sync, bad=slice(0, 300)) for sync in range(1, 9))
    # A quarter of the rows that are looked at, 4 drawn: unseen in 60 syncs with a probability of 3e-8; seeds are fixed.
    assert any(run(sync, bad=slice(8, 40)) for sync in range(1, 61))


class TwiceRounded(Module):
    """As a GPU may multiply, and in vLLM's batch-invariant mode does: a bias is added to what is rounded already."""

    quant_method = property(lambda self: self)

    def __init__(self, weight_NK: Tensor, *, answers_in: torch.dtype) -> None:
        super().__init__()
        self.weight_NK, self.answers_in = weight_NK, answers_in

    def apply(self, layer: Module, probe_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        product_MN = (probe_MK.float() @ self.weight_NK.float().t()).to(self.answers_in)
        return product_MN if bias_N is None else product_MN + bias_N


@pytest.mark.parametrize("answers_in", [None, torch.float32])  # the head in FP32
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [40, 64, 200])
def test_where_a_bias_comes_after_rounding_columns_are_asked_one_by_one(
    length: int, dtype: torch.dtype, answers_in: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unit is seen in each column that has its turn, and a right weight is never taken for a wrong one: not a
    negative zero, not what FP16 just has."""
    monkeypatch.setattr(kernel_proof, "rounds_once", lambda: False)
    kernel = functools.partial(TwiceRounded, answers_in=answers_in or dtype)
    weight_NK = torch.randn(97, length, generator=torch.Generator().manual_seed(length)).to(dtype)
    weight_NK[6], weight_NK[7] = 2.0**-24, -0.0
    seen = set()
    for sync in range(1, 5):
        for column in range(length):
            wrong_NK = weight_NK.clone()
            wrong_NK[5, column] *= 1 + 2**-7
            request = choose_request(0, sync=sync, every=1)
            shape = LocalShape(97, length, is_cut=False)
            layer_proof = Bf16Proof("layer", shape=shape, scheme=Scheme.BF16, request=request, dtype=dtype)
            layer_proof.take(Slot("layer", "weight", rows=slice(0, 97)), weight_NK)
            assert layer_proof.check(kernel(weight_NK)) is None
            if (mismatch := layer_proof.check(kernel(wrong_NK))) is not None:
                assert mismatch.subject == "probe, output channel 5" and mismatch.expected == float(
                    weight_NK[5, column]
                )
                seen.add(column)
        wrong_NK[5, 0] = float("nan")  # wherever it is: a row of NaN is its answer to every column
        mismatch = layer_proof.check(kernel(wrong_NK))
        assert mismatch is not None and mismatch.channel == 5
    assert seen == set(range(length))


def test_exact_sums_are_asked_of_no_matmul_that_wants_two_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's batch-invariant mode puts in torch's place on GPUs before Hopper."""

    def two_matrices(*operands: Tensor) -> Tensor:
        assert all(each.ndim >= 2 for each in operands)
        return torch.mm(*operands)

    codes_NK, probe_K = torch.randint(-127, 128, (9, 64)), torch.randint(-127, 128, (64,))
    wanted_N = (codes_NK * probe_K).sum(dim=1).double()
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("aten::matmul", two_matrices, "CPU")
        monkeypatch.setattr("torch._int_mm", None)  # a GPU's way
        found_N = exact_product(OnGpu(codes_NK.to(torch.int8)), probe_K.to(torch.int8))
    finally:
        library._destroy()
    assert torch.equal(found_N, wanted_N)


def test_exact_sums_take_no_product_that_saturates_without_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu._is_vnni_supported", lambda: False)
    monkeypatch.setattr("torch._int_mm", None)
    codes_NK, probe_K = torch.full((9, 1000), -127, dtype=torch.int8), torch.full((1000,), 127, dtype=torch.int8)
    assert exact_product(codes_NK, probe_K).tolist() == [-127.0 * 127 * 1000] * 9


class OnGpu:
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda")

    def __init__(self, tensor: Tensor) -> None:
        self.double = tensor.double


class Int8Kernel(Module):
    """Answers as a kernel of these codes would, for a probe whose scale is 1."""

    quant_method = property(lambda self: self)

    def __init__(self, codes: QuantisedWeight) -> None:
        super().__init__()
        self.codes = codes

    def held_scale(self, layer: Module) -> Tensor:
        return self.codes.scale

    def apply(self, layer: Module, probe_MK: Tensor, bias_N: Tensor) -> Tensor:
        sums_MN = probe_MK.double() @ self.codes.codes_NK.double().t()
        return (sums_MN.float() * self.codes.scale[:, 0] + bias_N.float()).to(torch.bfloat16)


@pytest.mark.parametrize("wrong", [3, 40, 96])
@pytest.mark.parametrize("part", ["code", "scale"])
def test_a_wrong_int8_row_is_seen_when_it_is_its_turn_of_eight_and_in_a_full_proof(wrong: int, part: str) -> None:
    """A fused layer whose second part begins in the midst of an eighth."""
    weight_NK = torch.randn(97, 64, generator=torch.Generator().manual_seed(wrong)).to(torch.bfloat16)
    codes = quantise_int8(weight_NK)
    if part == "code":
        codes.codes_NK[wrong, 5] += 1 if codes.codes_NK[wrong, 5] < 0 else -1
    else:
        codes.scale[wrong] *= 1.001
    seen = set()
    for sync in range(1, 2 * ROTATION + 1):
        request = choose_request(0, sync=sync, every=1, parts=ROTATION)
        layer_proof = Int8Proof("layer", shape=LocalShape(97, 64, is_cut=False), scheme=Scheme.INT8, request=request)
        layer_proof.take(Slot("layer", "weight", 0, start=0, rows=slice(0, 37)), weight_NK[:37])
        layer_proof.take(Slot("layer", "weight", 1, start=37, rows=slice(0, 60)), weight_NK[37:])
        mismatch = layer_proof.check(Int8Kernel(codes))
        if mismatch is not None:
            assert mismatch.subject in (f"probe, output channel {wrong}", f"scale {wrong}")
            seen.add(sync)
    assert seen == {sync for sync in range(1, 17) if sync in (1, 8, 16) or sync % 8 == wrong % 8}


@pytest.mark.parametrize("rank", [0, 1])
def test_one_tensor_for_a_fused_layer_is_cut_as_its_parts_are(rank: int) -> None:
    layer = object.__new__(QKVParallelLinear)  # its __init__ asks for processes
    Module.__init__(layer)
    sizes = {"head_size": 8, "v_head_size": 8, "total_num_heads": 4, "num_heads": 2, "input_size": 16}
    cut = {"tp_rank": rank, "tp_size": 2, "total_num_kv_heads": 2, "num_kv_heads": 1, "num_kv_head_replicas": 1}
    layer.__dict__ |= sizes | cut
    model = Module()
    model.attn = Module()
    model.attn.qkv_proj = layer
    slots_by_source = slots(model, tied_head=False)
    for kind, shape in (("weight", (16,)), ("bias", ())):
        parts = {name: torch.randn(rows, *shape) for name, rows in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16))}
        fused = torch.cat([*parts.values()])
        for slot, (name, part) in zip(slots_by_source[f"attn.qkv_proj.{kind}"], parts.items(), strict=True):
            [own] = slots_by_source[f"attn.{name}.{kind}"]
            assert torch.equal(slot.cut(fused), own.cut(part)) and slot.fits(fused) and own.fits(part)
            assert (slot.part, slot.start) == (own.part, own.start)
