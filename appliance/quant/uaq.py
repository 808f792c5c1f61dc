"""UAQ, update-aware quantisation: a model rescaled once before training, so that the same update moves more INT8 codes.

Every linear layer fed by a decoder layer's norm gets W / s, and that norm gets its weight times s: s cancels and the
function is the same. The layers are in `quant/uaq_layers.py`.

With absmax scales the relative error of a quantised weight does not change. What changes is how an update of Adam's,
whose size does not depend on the gradient's, compares with the weight: it is s times larger. Whether that is more than
a larger learning rate on the same layers is a question for an experiment (`optimizer.norm_fed_lr_scale`).

A power of two moves exponents alone: the function, the INT8 codes and the file folded back are the same bit for bit.
With another s, such as the source's 1.5, most scaled weights have no place in BF16; they are kept in float32 (an error
of 2^-25 instead of 2^-9), so that trainer and engine round them to BF16 once, as they do without UAQ, and folding back
gives the very file again. Computed in BF16, the function is the same to that one rounding.

Source: QuRL, arXiv 2602.13953; read from notes on it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from appliance.errors import EngineError, NumericsError
from appliance.quant.architectures import why_unknown
from appliance.quant.uaq_layers import MARK_FILE, MOST, norm_fed

_HINT = "leave out correction.uaq_scale"


def scale_folder(source: Path, *, target: Path, scale: float, on_file: Callable[[], None] = lambda: None) -> int:
    """A copy of a model's folder, scaled; the number of norms that were. Holds one of its files in memory.

    target: empty, or not there.  on_file: called as each file of weights is written.
    Raises EngineError for a model that cannot be scaled or read, or is scaled already,
    NumericsError when a weight leaves its format, ValueError for a scale outside 1 / MOST to MOST.
    """
    if (source / MARK_FILE).exists():
        raise EngineError(f"{source}: the model is scaled by UAQ already ({MARK_FILE} says so)", hint=_HINT)
    return _copy(source, target=target, scale=scale, may_widen=True, on_file=on_file)


def fold_back(source: Path, *, target: Path, scale: float) -> None:
    """A copy of a model's folder in the original parametrisation. scale: what it was scaled with.

    Every parameter keeps the format that it has in the file. Raises as scale_folder.
    """
    _copy(source, target=target, scale=1 / scale, may_widen=False)
    (target / MARK_FILE).unlink(missing_ok=True)


def scaled(tensor: Tensor, *, factor: float, may_widen: bool) -> Tensor:
    """The parameter times factor, rounded once: in its own format, or (may_widen) in float32 where that loses bits.

    Raises NumericsError when a value is not finite or leaves the format.
    """
    wide = tensor.double() * factor
    found = wide.to(tensor.dtype)
    if may_widen and not torch.equal((found.double() / factor).to(tensor.dtype), tensor):
        found = wide.float()
    if not bool(torch.isfinite(found).all()):
        raise NumericsError(f"UAQ: a weight times {factor:g} does not fit {str(found.dtype).removeprefix('torch.')}")
    return found


def _copy(
    source: Path, *, target: Path, scale: float, may_widen: bool, on_file: Callable[[], None] = lambda: None
) -> int:
    if not 1 / MOST <= scale <= MOST:
        raise ValueError(f"the scale of UAQ lies between 1/{MOST:g} and {MOST:g}, got {scale:g}")
    files = sorted(source.glob("*.safetensors"))
    if not files or not (source / "config.json").is_file():
        raise EngineError(f"{source}: no model of config.json and *.safetensors")
    if why := why_unknown(json.loads((source / "config.json").read_text()).get("architectures")):
        raise EngineError(f"UAQ: {why}", hint=_HINT)
    layers = norm_fed(name for file in files for name in _names(file))
    factors = layers.factors(scale)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            save_file(
                {name: _one(name, opened.get_tensor(name), factors, may_widen=may_widen) for name in opened.keys()},  # noqa: SIM118
                target / file.name,
                metadata=opened.metadata(),
            )
        on_file()
    return len(layers.norms)


def _one(name: str, tensor: Tensor, factors: dict[str, float], *, may_widen: bool) -> Tensor:
    return scaled(tensor, factor=factors[name], may_widen=may_widen) if name in factors else tensor


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise EngineError(f"{file}: safetensors that cannot be read: {error}") from error
