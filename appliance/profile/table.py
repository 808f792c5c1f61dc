"""What a profile says, as lines for people. Pure: takes the header of the file."""

from __future__ import annotations

from typing import Any

from appliance import console

_WORST = 8


def table(header: dict[str, Any], *, folder: str, model: str = "") -> list[str]:
    """header: of `profile.safetensors`.  folder: where the files lie.

    model: the model as it is called here, where it is the same one; else it is called as where the profile was made.
    """
    origin = f"{model or header['model'] or 'a model'}{'@' + header['revision'] if header['revision'] else ''}"
    rows = [("smoothing", _smoothing(header))]
    if header["layers"]:
        rows.append(("kept in BF16", _kept(header)))
    if predicted := header["predicted"]:
        numbers = f"KL {predicted['kl']:.1e}, k3-KL on the text {predicted['k3_kl']:.1e} nats"
        rows.append(("mismatch", f"predicted against BF16, over {predicted['tokens']} tokens: {numbers}"))
    if memory := header["memory"]:
        parts = (memory["peak_bytes"], memory["largest_layer_bytes"], memory["model_bytes"])
        peak, layer, whole = (f"{each / 2**20:.1f} MiB" for each in parts)
        rows.append(("memory", f"{peak} of weights at the most; the largest layer has {layer}, the model {whole}"))
    return [
        f"profile of {origin} for {header['scheme']} ({header['kind']})",
        "",
        *([*_errors(header["layers"]), ""] if header["layers"] else []),
        *console.table([*rows, ("files", folder)]).splitlines(),
    ]


def _errors(layers: list[dict[str, Any]]) -> list[str]:
    worst = sorted(layers, key=lambda each: -each["output_error"])[:_WORST]
    rows = [
        (
            _name(each),
            *(f"{each[error]:.2%}" for error in ("weight_error", "output_error", "output_error_plain")),
            "kept in BF16" if each["kept"] else "",
        )
        for each in worst
    ]
    head = ("layers with the largest error", "weights", "outputs", "not smoothed", "")
    return console.table(rows, head=head, numbers=range(1, 4)).splitlines()


def _name(layer: dict[str, Any]) -> str:
    """`model.layers.3.self_attn.{q,k,v}_proj` for a fused layer."""
    prefix = layer["linears"][0].rpartition(".")[0]
    parts = [name.rpartition(".")[2] for name in layer["linears"]]
    if len(parts) == 1:
        return layer["linears"][0]
    return f"{prefix}.{{{','.join(part.removesuffix('_proj') for part in parts)}}}_proj"


def _smoothing(header: dict[str, Any]) -> str:
    strength, groups = header["settings"]["strength"], len(header["smoothing"])
    if header["kind"] != "calibrated":
        return f"{_norms(groups)}, as the donor has it, to the nearest powers of two"
    if not strength:
        return "off"
    readers = sum("layernorm" in each["norm"] for each in header["smoothing"])
    return f"strength {strength:g}: {_norms(readers)} with all they feed; others gain nothing by it"


def _norms(number: int) -> str:
    return f"{number} norm{'' if number == 1 else 's'}"


def _kept(header: dict[str, Any]) -> str:
    kept, budget = header["suggested_ignore"], header["settings"]["error_budget"]
    why = f"an output error above {budget:.2%}, or `ignore`" if budget else "`ignore`; no error budget is set"
    return f"{', '.join(kept) if kept else 'none'} ({why})"
