"""What a profile says, as lines for people. Pure: takes the header of the file."""

from __future__ import annotations

from typing import Any

_WORST = 8


def table(header: dict[str, Any], *, folder: str, model: str = "") -> list[str]:
    """header: of `profile.safetensors`.  folder: where the files lie.

    model: the model as it is called here, where it is the same one; else it is called as where the profile was made.
    """
    origin = f"{model or header['model'] or 'a model'}{'@' + header['revision'] if header['revision'] else ''}"
    lines = [f"profile of {origin} for {header['scheme']} ({header['kind']})", ""]
    lines += _errors(header["layers"]) if header["layers"] else []
    lines += _smoothing(header)
    lines += _kept(header)
    lines += _predicted(header["predicted"])
    memory = header["memory"]
    if memory:
        parts = (memory["peak_bytes"], memory["largest_layer_bytes"], memory["model_bytes"])
        peak, layer, model = (f"{each / 2**20:.1f} MiB" for each in parts)
        lines.append(f"memory        {peak} of weights at the most; the largest layer has {layer}, the model {model}")
    lines.append(f"files         {folder}")
    return lines


def _errors(layers: list[dict[str, Any]]) -> list[str]:
    worst = sorted(layers, key=lambda each: -each["output_error"])[:_WORST]
    names = {id(each): _name(each) for each in worst}
    width = max(len(name) for name in names.values())
    lines = [f"{'layers with the largest error':<{width}}  weights  outputs  not smoothed"]
    for each in worst:
        kept = "  kept in BF16" if each["kept"] else ""
        numbers = f"{each['weight_error']:7.2%}  {each['output_error']:7.2%}  {each['output_error_plain']:12.2%}"
        lines.append(f"{names[id(each)]:<{width}}  {numbers}{kept}")
    return [*lines, ""]


def _name(layer: dict[str, Any]) -> str:
    """`model.layers.3.self_attn.{q,k,v}_proj` for a fused layer."""
    prefix = layer["linears"][0].rpartition(".")[0]
    parts = [name.rpartition(".")[2] for name in layer["linears"]]
    if len(parts) == 1:
        return layer["linears"][0]
    return f"{prefix}.{{{','.join(part.removesuffix('_proj') for part in parts)}}}_proj"


def _smoothing(header: dict[str, Any]) -> list[str]:
    strength, groups = header["settings"]["strength"], len(header["smoothing"])
    if header["kind"] != "calibrated":
        return [f"smoothing     {_norms(groups)}, as the donor has it, to the nearest powers of two"]
    if not strength:
        return ["smoothing     off"]
    readers = sum("layernorm" in each["norm"] for each in header["smoothing"])
    return [f"smoothing     strength {strength:g}: {_norms(readers)} with all they feed; others gain nothing by it"]


def _norms(number: int) -> str:
    return f"{number} norm{'' if number == 1 else 's'}"


def _kept(header: dict[str, Any]) -> list[str]:
    kept, budget = header["suggested_ignore"], header["settings"]["error_budget"]
    why = f"an output error above {budget:.2%}, or `ignore`" if budget else "`ignore`; no error budget is set"
    return [f"kept in BF16  {', '.join(kept) if kept else 'none'} ({why})"] if header["layers"] else []


def _predicted(predicted: dict[str, Any] | None) -> list[str]:
    if predicted is None:
        return []
    numbers = f"KL {predicted['kl']:.1e}, k3-KL on the text {predicted['k3_kl']:.1e} nats"
    return [f"mismatch      predicted against BF16, over {predicted['tokens']} tokens: {numbers}"]
