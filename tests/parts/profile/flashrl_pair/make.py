"""A tiny pair of checkpoints, and what FlashRL's own code makes of it: the numbers of `flashrl.safetensors`.

    pip download flash-llm-rl==1.0.3 --no-deps && unzip flash_llm_rl-1.0.3-*.whl -d WHEEL
    python tests/parts/profile/flashrl_pair/make.py WHEEL/flash_rl/flash_quantization.py

`profiling_int8` runs as it was published, on the parameters of the pair by their names: only the loading of models is
ours, as it would need a whole model and the donor's package. Made with torch 2.13.0+cpu.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).parent
HIDDEN, INNER, KEYS, LAYERS = 16, 24, 8, 2
ROWS = {"q": HIDDEN, "k": KEYS, "v": KEYS}


def make_pair() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(model, donor): norms divided and what they feed multiplied, up divided for down, as SmoothQuant does; W8A8."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    model: dict[str, Tensor] = {}
    donor: dict[str, Tensor] = {}
    for layer in (f"model.layers.{index}." for index in range(LAYERS)):
        attention, feed_forward = normal(HIDDEN).exp(), normal(HIDDEN).exp()
        inner = (0.5 * normal(INNER)).exp()
        for norm, smooth in (("input_layernorm", attention), ("post_attention_layernorm", feed_forward)):
            name = f"{layer}{norm}.weight"
            model[name] = (1 + 0.2 * normal(HIDDEN)).bfloat16()
            donor[name] = (model[name].float() / smooth).bfloat16()
        unit = torch.ones(1)
        linears = [(f"self_attn.{part}_proj", normal(rows, HIDDEN), attention, unit) for part, rows in ROWS.items()]
        linears += [
            ("self_attn.o_proj", normal(HIDDEN, HIDDEN), unit, unit),
            ("mlp.gate_proj", normal(INNER, HIDDEN), feed_forward, unit),
            ("mlp.up_proj", normal(INNER, HIDDEN), feed_forward, 1 / inner),
            ("mlp.down_proj", normal(HIDDEN, INNER), inner, unit),
        ]
        for linear, weight_NK, columns, rows in linears:
            name = f"{layer}{linear}.weight"
            model[name] = (0.05 * weight_NK).bfloat16()
            made_NK = model[name].float() * columns * rows[:, None]
            scale_N1 = (made_NK.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
            donor[name] = (made_NK / scale_N1.float()).round().clamp(-128, 127).to(torch.int8)
            donor[f"{name}_scale"] = scale_N1
    return model, donor


def flashrl_numbers(source: Path, *, model: dict[str, Tensor], donor: dict[str, Tensor]) -> dict[str, Tensor]:
    """`NAME.input_scale` and `NAME.output_scale` of every parameter, flat. source: FlashRL's flash_quantization.py."""
    spec = importlib.util.spec_from_file_location("flash_quantization", source)
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    loaded = {"model": model, "donor": donor}
    theirs.AutoModelForCausalLM = SimpleNamespace(
        from_pretrained=lambda name, **_: SimpleNamespace(named_parameters=loaded[name].items)
    )
    theirs.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: None)
    with tempfile.TemporaryDirectory() as folder:
        theirs.profiling_int8("model", "donor", f"{folder}/profile.pt")
        profile = torch.load(f"{folder}/profile.pt")
    return {
        f"{name}.{key}": torch.as_tensor(entry[key], dtype=torch.float32).reshape(-1).clone()
        for name, entry in profile.items()
        for key in ("input_scale", "output_scale")
    }


def main() -> None:
    model, donor = make_pair()
    for part, tensors in (("model", model), ("donor", donor)):
        (FOLDER / part).mkdir(exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, FOLDER / part / "model.safetensors")
        (FOLDER / part / "config.json").write_text("{}\n")
    pair = {part: load_file(FOLDER / part / "model.safetensors") for part in ("model", "donor")}
    save_file(flashrl_numbers(Path(sys.argv[1]), **pair), FOLDER / "flashrl.safetensors")


if __name__ == "__main__":
    main()
