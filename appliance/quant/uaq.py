"""UAQ, update-aware quantisation: a model rescaled once before training, so that the same update moves more INT8 codes.

Every linear layer fed by a decoder layer's norm gets W / s, and that norm gets its weight times s: s cancels and the
function is the same. With absmax scales the relative error of a quantised weight does not change either; what changes
is how an update of Adam's, whose size does not depend on the gradient's, compares with the weight: it is s times
larger. Whether that is more than a larger learning rate on the same layers is a question for an experiment
(`optimizer.norm_fed_lr_scale`).

A power of two moves exponents alone: the function, the INT8 codes and the file folded back are the same bit for bit.
With another s, such as the source's 1.5, most scaled weights have no place in BF16; they are kept in float32 (an error
of 2^-25 instead of 2^-9), so that trainer and engine round them to BF16 once, as they do without UAQ, and folding back
gives the very file again. Computed in BF16, the function is the same to that one rounding.

Source: QuRL, arXiv 2602.13953; read from notes on it. Imports torch where it is needed only.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import EngineError, NumericsError
from appliance.quant.files import tensor_shapes
from appliance.terms.families import NormFed, norm_fed, why_unknown
from appliance.terms.shapes import read_shape

if TYPE_CHECKING:
    from torch import Tensor

MARK_FILE = "uaq.json"  # in a scaled folder: says that it is one
MOST = 4096.0  # of a scale, either way: far beyond any use, and far inside every format's exponents
_HINT = "leave out correction.uaq_scale"


def scale_folder(source: Path, *, target: Path, scale: float, on_file: Callable[[], None] = lambda: None) -> int:
    """A copy of a model's folder, scaled; the number of norms that were. Holds one of its files in memory.

    target: empty, or not there.  on_file: called as each file of weights is written.
    Raises EngineError as require_unscaled and layers_to_scale, NumericsError when a weight leaves its format,
    ValueError for a scale outside 1 / MOST to MOST.
    """
    require_unscaled(source)
    return _copy(source, target=target, scale=scale, may_widen=True, on_file=on_file)


def fold_back(source: Path, *, target: Path, scale: float) -> None:
    """A copy of a model's folder in the original parametrisation. scale: what it was scaled with.

    Every parameter keeps the format that it has in the file. Raises as scale_folder.
    """
    _copy(source, target=target, scale=1 / scale, may_widen=False)
    (target / MARK_FILE).unlink(missing_ok=True)


def require_unscaled(folder: Path) -> None:
    """Raises EngineError."""
    if (folder / MARK_FILE).exists():
        raise EngineError(f"{folder}: the model is scaled by UAQ already ({MARK_FILE} says so)", hint=_HINT)


def layers_to_scale(folder: Path) -> NormFed:
    """Raises EngineError for a model that is not of a known family, or whose safetensors cannot be read."""
    try:
        names = tensor_shapes(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        message = f"{folder}: its safetensors cannot be read: {type(error).__name__}: {error}"
        raise EngineError(message) from error
    if not names:
        raise EngineError(f"{folder}: UAQ reads weights from *.safetensors, and the folder has none")
    shape = read_shape(folder / "config.json")
    if why := why_unknown(shape.architectures if shape else None):
        raise EngineError(f"{folder}: UAQ: {why}", hint=_HINT)
    try:
        return norm_fed(names)
    except EngineError as error:
        raise EngineError(f"{folder}: UAQ: {error.message}", hint=_HINT) from error


def scaled(tensor: Tensor, *, factor: float, may_widen: bool) -> Tensor:
    """The parameter times factor, rounded once: in its own format, or (may_widen) in float32 where that loses bits.

    Raises NumericsError when a value is not finite or leaves the format.
    """
    wide = tensor.double() * factor
    found = wide.to(tensor.dtype)
    if may_widen and not (found.double() / factor).to(tensor.dtype).equal(tensor):
        found = wide.float()
    if not bool(found.isfinite().all()):
        raise NumericsError(f"UAQ: a weight times {factor:g} does not fit {str(found.dtype).removeprefix('torch.')}")
    return found


def _copy(
    source: Path, *, target: Path, scale: float, may_widen: bool, on_file: Callable[[], None] = lambda: None
) -> int:
    from safetensors import safe_open
    from safetensors.torch import save_file

    if not 1 / MOST <= scale <= MOST:
        raise ValueError(f"the scale of UAQ lies between 1/{MOST:g} and {MOST:g}, got {scale:g}")
    layers = layers_to_scale(source)
    factors = dict.fromkeys(layers.norms, scale) | dict.fromkeys(layers.linears, 1 / scale)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            for name in factors.keys() & tensors.keys():
                tensors[name] = scaled(tensors[name], factor=factors[name], may_widen=may_widen)
            save_file(tensors, target / file.name, metadata=opened.metadata())
        on_file()
    return len(layers.norms)
