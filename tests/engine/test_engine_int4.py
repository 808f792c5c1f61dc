"""What the proof of an INT4 layer sees, on a layer without an engine, and layers that are refused.

What such layers of an engine hold and compute is in test_engine_schemes.py, faults in test_engine_faults_kernel.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import make_checkpoint, start_engine
from faults import flip_bit
from torch import Tensor
from torch.nn import Module

from appliance.engine.int4 import Int4LinearMethod, Int4Proof
from appliance.engine.kernel_proof import ProofRequest
from appliance.engine.tensor_slots import LocalShape, Slot
from appliance.errors import EngineError, SyncError
from appliance.quant import numba_int4
from appliance.quant.codec import QuantisedWeight
from appliance.quant.codec_int4 import quantise_int4
from appliance.terms.schemes import Scheme

pytestmark = pytest.mark.engine

ROWS, LENGTH = 64, 16384  # rows so long that the kernel's sums are rounded by more than a code
ALL_ROWS = ProofRequest(sync=1, round=1, full=True, thorough=True)


def gaussian(seed: int) -> Tensor:
    return torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def loaded(weight_NK: Tensor) -> Module:
    """A layer with that weight, as after an update."""
    layer, method = Module(), Int4LinearMethod(Scheme.INT4)
    layer.quant_method = method
    method.install(layer, method.quantise(weight_NK, absmax=None))
    return layer


def proven(
    layer: Module, weight_NK: Tensor, *, request: ProofRequest = ALL_ROWS, columns: slice = slice(0, LENGTH)
) -> str:
    """What the proof says when this weight was received in two parts, the second one first; empty: all is well.
    columns: that are this rank's."""
    proof = Int4Proof("layer", LocalShape(ROWS, LENGTH, is_cut=False), Scheme.INT4, request)
    for part, start in ((1, 41), (0, 0)):
        rows = weight_NK[start : start + 41]
        proof.take(Slot("layer", "weight", part, start=start, rows=slice(0, len(rows)), columns=columns), rows)
    return str(proof.check(layer) or "")


def test_each_code_and_scale_of_a_long_row_is_compared() -> None:
    weight_NK = gaussian(1)
    layer = loaded(weight_NK)
    assert proven(layer, weight_NK) == ""
    gemm = layer.quant_method.gemm
    for name, beginning, bits in (("packed", "digest of the codes of rows ", (0, 31)), ("scale_GN", "scale ", (0, 14))):
        right = getattr(gemm, name)
        for place in (0.0, 0.3, 1.0):
            for bit in bits:
                setattr(gemm, name, flip_bit(right, at=place, bit=bit))
                assert proven(layer, weight_NK).startswith(beginning)
        setattr(gemm, name, right)
    assert proven(layer, weight_NK) == ""


def test_a_kernel_that_multiplies_by_other_weights_than_lie_there_is_seen() -> None:
    weight_NK = gaussian(1)
    layer, other = loaded(weight_NK), loaded(gaussian(2)).quant_method.gemm
    other.unpacked, layer.quant_method.gemm = layer.quant_method.gemm.unpacked, other
    assert proven(layer, weight_NK).startswith("probe, output channel ")


@pytest.mark.parametrize("number", range(4))
def test_one_row_in_four_is_asked_and_another_one_in_each_round(number: int) -> None:
    request = replace(ALL_ROWS, full=False, round=number, parts=4)
    for row in (*range(4), *range(40, 48)):
        weight_NK, stale_NK = gaussian(1), gaussian(1)
        stale_NK[row] *= -1
        assert bool(proven(loaded(stale_NK), weight_NK, request=request)) == (row % 4 == number)


def test_a_rank_is_asked_for_its_own_columns() -> None:
    whole_NK = torch.cat([gaussian(1), gaussian(2)], dim=1)
    assert proven(loaded(gaussian(2)), whole_NK, columns=slice(LENGTH, 2 * LENGTH)) == ""
    assert proven(loaded(gaussian(1)), whole_NK, columns=slice(LENGTH, 2 * LENGTH)).startswith("scale ")


def test_a_compiled_quantiser_that_is_not_the_codec_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine uses the same one: four rows of each tensor, other ones from update to update."""

    def wrong(weight_NK: Tensor) -> QuantisedWeight:
        right = quantise_int4(weight_NK)
        right.codes_NK[:, 77] += 1 - 2 * (right.codes_NK[:, 77] > 0)
        return right

    monkeypatch.setattr(numba_int4, "quantise_int4_numba", wrong)
    with pytest.raises(SyncError, match="weight update: layer: the compiled quantiser differs from the codec in rows "):
        proven(loaded(gaussian(1)), gaussian(1))


def test_a_layer_of_a_size_that_int4_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, seed=1, intermediate_size=112)
    with pytest.raises(EngineError) as raised:
        start_engine(folder, scheme="int4")
    needs = "output channels must be a multiple of 32 and input channels one of groups of 128, 64 or 32"
    place = "model.layers.0.mlp.down_proj is 128 x 112 on a rank"
    assert raised.value.message == f"`int4`: {place}, where {needs}"
    assert raised.value.hint == "name the layer in quantization.ignore"
