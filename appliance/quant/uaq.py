"""UAQ, update-aware quantisation: a model rescaled once before training, so that the same update moves more INT8 codes.

Every linear layer fed by a decoder layer's norm gets W / s, and that norm gets its weight times s: the function is the
same, and with absmax scales so is the relative error of a quantised weight. An update of Adam's, whose size does not
depend on the gradient's, becomes s times larger beside the weight. (Whether that is more than a larger learning rate on
the same layers, an experiment can say: `optimizer.norm_fed_lr_scale`.)

A power of two moves exponents alone: the function, the INT8 codes and the file folded back are the same bit for bit.
With another s, such as the source's 1.5, most scaled weights have no place in BF16; they are kept in float32 (an error
of 2^-25), so that trainer and engine round them once, as without UAQ, and folding back gives the very file again.

Source: QuRL, arXiv 2602.13953; read from notes on it. Imports torch where it is needed only.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from appliance.errors import EngineError, NumericsError, PreflightError
from appliance.files import Frozen
from appliance.quant.files import tensor_shapes
from appliance.terms.families import NormFed, norm_fed, why_unknown
from appliance.terms.shapes import read_shape

if TYPE_CHECKING:
    from torch import Tensor

MARK_FILE = "uaq.json"  # in a scaled folder, and its copy in a checkpoint of what was trained from it
MOST = 4096.0  # of a scale, either way: far beyond any use, and far inside every format's exponents
_HINT = "leave out correction.uaq_scale"


class ScaledMark(Frozen):
    """Mark of a folder whose model is scaled."""

    scale: float
    """Divisor of the weights."""
    model: str
    model_hash: str
    """Hash of the model's files, unscaled."""
    norms: int
    schema_version: int = 1


def read_mark(folder: Path) -> ScaledMark | None:
    """Read the mark of a folder; None without one. Raises PreflightError for a file that is none."""
    file = folder / MARK_FILE
    try:
        return ScaledMark.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise PreflightError(f"{file}: not a mark of UAQ: {why}", hint="put it back, or start a new run") from error


def layers_to_scale(folder: Path) -> NormFed:
    """Find the layers that UAQ scales. Raises EngineError for a model that is scaled already, or not of a known family,
    or whose safetensors cannot be read."""
    if (folder / MARK_FILE).exists():
        raise EngineError(f"{folder}: the model is scaled by UAQ already ({MARK_FILE} says so)", hint=_HINT)
    return _norm_fed(folder)


def scale_folder(source: Path, *, target: Path, scale: float, on_file: Callable[[], None] = lambda: None) -> int:
    """Make a scaled copy of a model's folder, with one of its files in memory at a time. Returns the number of norms
    that were scaled.

    target: empty, or not there.  scale: 1 / MOST to MOST.  on_file: called as each file of weights is written.
    Raises EngineError as layers_to_scale, NumericsError when a weight leaves its format.
    """
    layers = layers_to_scale(source)
    _copy(source, target=target, layers=layers, scale=scale, may_widen=True, on_file=on_file)
    return len(layers.norms)


def fold_back(source: Path, *, target: Path, scale: float) -> None:
    """Make a copy of a scaled model's folder in the original parametrisation. scale: what it was scaled with. Every
    parameter keeps the format that it has in the file. Raises as scale_folder."""
    _copy(source, target=target, layers=_norm_fed(source), scale=1 / scale, may_widen=False, on_file=lambda: None)


def _norm_fed(folder: Path) -> NormFed:
    try:
        names = tensor_shapes(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        message = f"{folder}: its safetensors cannot be read: {type(error).__name__}: {error}"
        raise EngineError(message) from error
    if not names:
        raise EngineError(f"{folder}: UAQ reads weights from *.safetensors, and the folder has none")
    shape = read_shape(folder / "config.json")
    try:
        if why := why_unknown(shape.architectures if shape else None):
            raise EngineError(why)
        return norm_fed(names)
    except EngineError as error:
        raise EngineError(f"{folder}: UAQ: {error.message}", hint=_HINT) from error


def _copy(
    source: Path, *, target: Path, layers: NormFed, scale: float, may_widen: bool, on_file: Callable[[], None]
) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    factors = dict.fromkeys(layers.norms, scale) | dict.fromkeys(layers.linears, 1 / scale)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", MARK_FILE), dirs_exist_ok=True)
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            for name in factors.keys() & tensors.keys():
                tensors[name] = scaled(tensors[name], factor=factors[name], may_widen=may_widen)
            save_file(tensors, target / file.name, metadata=opened.metadata())
        on_file()


def scaled(tensor: Tensor, *, factor: float, may_widen: bool) -> Tensor:
    """Return the parameter times factor, rounded once: in its own format, or (may_widen) in float32 where that loses
    bits. Raises NumericsError when a value is not finite or leaves the format."""
    wide = tensor.double() * factor
    scaled = wide.to(tensor.dtype)
    if may_widen and not (scaled.double() / factor).to(tensor.dtype).equal(tensor):
        scaled = wide.float()
    if not bool(scaled.isfinite().all()):
        raise NumericsError(f"UAQ: a weight times {factor:g} does not fit {str(scaled.dtype).removeprefix('torch.')}")
    return scaled
