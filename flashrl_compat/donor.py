"""FlashRL's way to a profile: a BF16 checkpoint and a W8A8 checkpoint of the same model tell what smoothed the donor.
`python -m flashrl_compat.donor JOB` makes it, as `appliance.profile.child` makes one by calibration.

Legend: N output and K input channels of a linear, q its int8 codes, c_n its channel scale, w the BF16 weight.

    norms       r_k = q_norm_k / norm_k                          input scale of the norm; 1 / r is the smoothing
    q, k, v, gate   codes = w * (1 / c_n) * (1 / r_k)            output and input scale
    o           codes = w * (1 / c_n)
    up          f = w / r_k / c_n;  b_n = sum_k(q f) / sum_k(f^2)    least squares: how up was scaled for down
                codes = w * (b_n / c_n) * (1 / r_k)
    down        codes = w * (1 / c_n) * (1 / b_k)

rounded to integers and clamped to [-128, 127]. Source: Liu et al. 2025, FlashRL 1.0.3. The numbers are kept as FlashRL
has them. What our engine uses of them is the smoothing of the norms and of up_proj, rounded to powers of two; its
channel scales are taken again from the weights at every sync, as those of a donor no longer fit when training has moved
the weights.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from appliance.errors import RecipeError
from appliance.finding import fault
from appliance.profile.child import run
from appliance.profile.job import ProfileJob
from appliance.quant.checkpoint import ModelTensors
from appliance.quant.profile import Origin, Profile, Settings, Smoothing, SmoothingGroup, power_of_two
from appliance.terms.counts import counted
from appliance.terms.families import LLAMA_NORMS
from appliance.terms.schemes import Scheme

_LINEARS = (*(reader for readers in LLAMA_NORMS.values() for reader in readers), "self_attn.o_proj", "mlp.down_proj")
_LAYER = re.compile(r"(model\.layers\.\d+\.)input_layernorm\.weight")
_LARGEST_RESIDUAL = 0.1  # |codes - predicted| / |codes|; rounding alone gives below 0.02, GPTQ below 0.05
_MOST_PROBLEMS = 10


def recover(model: Path, *, donor: Path, scheme: Scheme, origin: Origin) -> Profile:
    """Recover the scales that made a donor out of a model, both as folders with safetensors.

    donor: W8A8 of compressed-tensors: int8 `weight`, `weight_scale` per channel, symmetric.
    Raises RecipeError with what is different when the two are not a pair, or the scheme is not int8.
    """
    if scheme is not Scheme.INT8:
        raise RecipeError([fault((f"--scheme {scheme}",), "a donor's scales are those of `int8`", "use --scheme int8")])
    ours, theirs = ModelTensors(model), ModelTensors(donor)
    prefixes = [match.group(1) for name in ours.names if (match := _LAYER.fullmatch(name))]
    problems = _differences(ours, theirs, prefixes=prefixes)
    _refuse(problems, model=model, donor=donor)
    inputs, outputs = dict[str, Tensor](), dict[str, Tensor]()  # by what a parameter's columns and rows are scaled
    for prefix in prefixes:
        _recover_layer(ours, theirs, prefix=prefix, inputs=inputs, outputs=outputs)
        for name in (each for each in outputs if each.startswith(prefix)):
            codes_NK = theirs.read(name).float()
            made_NK = predicted_codes(ours.read(name), output_scale_N=outputs[name], input_scale_K=inputs.get(name))
            residual = float((codes_NK - made_NK).norm() / codes_NK.norm().clamp(min=1))
            if not residual <= _LARGEST_RESIDUAL:  # NaN too
                problems.append(f"{name}: the scales leave {residual:.2f} of the donor's codes unexplained")
    _refuse(problems, model=model, donor=donor)
    return Profile(
        origin=origin,
        scheme=scheme,
        settings=Settings(strength=0.0),
        smoothing=smoothing_of_scales(inputs),
        input_scales=inputs,
        output_scales=outputs,
    )


def smoothing_of_scales(input_scales: Mapping[str, Tensor]) -> Smoothing:
    """Return what smoothed the donor, as powers of two: of a norm 1 / r, from FlashRL's input scale r = q_norm / norm;
    between up_proj and down_proj the input scale of down_proj itself. Other input scales follow from these."""
    groups = []
    for name, input_scale_K in input_scales.items():
        prefix, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind in LLAMA_NORMS:
            source, readers = name, tuple(f"{prefix}.{reader}.weight" for reader in LLAMA_NORMS[kind])
        elif kind == "down_proj":
            source, readers = f"{prefix}.up_proj.weight", (name,)
        else:
            continue
        usable_K = (input_scale_K > 0) & torch.isfinite(input_scale_K)
        scale_K = torch.where(usable_K, input_scale_K, torch.ones_like(input_scale_K)).float()
        scale_K = power_of_two(scale_K.reciprocal() if kind in LLAMA_NORMS else scale_K)
        if bool((scale_K != 1).any()):
            groups.append(SmoothingGroup(source, readers, scale_K))
    return Smoothing(tuple(groups))


def _recover_layer(
    ours: ModelTensors, theirs: ModelTensors, *, prefix: str, inputs: dict[str, Tensor], outputs: dict[str, Tensor]
) -> None:
    for norm, readers in LLAMA_NORMS.items():
        name = f"{prefix}{norm}.weight"
        ratio_K = theirs.read(name) / ours.read(name).float()
        inputs[name] = ratio_K
        for reader in readers:
            weight = f"{prefix}{reader}.weight"
            scale_N1 = theirs.read(f"{weight}_scale").view(-1, 1)
            if reader == "mlp.up_proj":
                fitted_NK = ours.read(weight).float() / ratio_K.view(1, -1) / scale_N1
                codes_NK = theirs.read(weight).float()
                b_N1 = (codes_NK * fitted_NK).sum(dim=-1, keepdim=True) / (fitted_NK**2).sum(dim=-1, keepdim=True)
                scale_N1 = scale_N1.float() / b_N1
                inputs[f"{prefix}mlp.down_proj.weight"] = (1.0 / b_N1.view(1, -1)).view(-1)
            inputs[weight] = 1.0 / ratio_K
            outputs[weight] = (1.0 / scale_N1.float()).view(-1)
    for last in ("self_attn.o_proj", "mlp.down_proj"):
        weight = f"{prefix}{last}.weight"
        outputs[weight] = (1.0 / theirs.read(f"{weight}_scale").view(-1, 1).float()).view(-1)


def predicted_codes(weight_NK: Tensor, *, output_scale_N: Tensor, input_scale_K: Tensor | None) -> Tensor:
    """Return what FlashRL's sync makes of a weight: [N, K] float32, integers in [-128, 127]."""
    scaled_NK = weight_NK.float() * output_scale_N.view(-1, 1)
    if input_scale_K is not None:
        scaled_NK = scaled_NK * input_scale_K.view(1, -1)
    return scaled_NK.round().clamp(-128, 127)


def _differences(ours: ModelTensors, theirs: ModelTensors, *, prefixes: list[str]) -> list[str]:
    """What keeps the two from being a pair, before any number is looked at."""
    if not prefixes:
        return ["the model has no model.layers.<i>.input_layernorm.weight"]
    layers = sum(_LAYER.fullmatch(name) is not None for name in theirs.names)
    has = f"the model has {counted(len(prefixes), 'layer')}, the donor {layers}"
    problems = [has] if layers != len(prefixes) else []
    for prefix in prefixes:
        for part in (*LLAMA_NORMS, *_LINEARS):
            name = f"{prefix}{part}.weight"
            found = _different(ours, theirs, name=name)
            problems += found or (_not_int8(theirs, name=name) if part in _LINEARS else [])
    return problems


def _different(ours: ModelTensors, theirs: ModelTensors, *, name: str) -> list[str]:
    missing = [side for side, checkpoint in (("model", ours), ("donor", theirs)) if name not in checkpoint]
    if missing:
        return [f"{name} is missing in the {side}" for side in missing]
    if ours.shape(name) != theirs.shape(name):
        return [f"{name} is {list(ours.shape(name))} in the model and {list(theirs.shape(name))} in the donor"]
    return []


def _not_int8(theirs: ModelTensors, *, name: str) -> list[str]:
    scale = f"{name}_scale"
    if scale not in theirs:
        return [f"{scale} is missing in the donor"]
    rows = theirs.shape(name)[0]
    if theirs.shape(scale) not in ((rows, 1), (rows,)):
        return [f"{scale} is {list(theirs.shape(scale))}: one for each of {rows} channels is needed"]
    kind = theirs.read(name).dtype
    return [] if kind is torch.int8 else [f"{name} is {str(kind).removeprefix('torch.')} in the donor, not int8"]


def _refuse(problems: list[str], *, model: Path, donor: Path) -> None:
    if not problems:
        return
    more = [f"and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
    hint = f"{donor} must be a W8A8 checkpoint (compressed-tensors, int8, per channel, symmetric) of {model}"
    raise RecipeError([fault(("--quantized",), problem, hint) for problem in (*problems[:_MOST_PROBLEMS], *more)])


def _of_job(job: ProfileJob, folder: Path, origin: Origin) -> Profile:
    return recover(folder, donor=Path(job.donor), scheme=job.scheme, origin=origin)


if __name__ == "__main__":
    sys.exit(run(ProfileJob.model_validate_json(Path(sys.argv[1]).read_bytes()), profile_of=_of_job))
