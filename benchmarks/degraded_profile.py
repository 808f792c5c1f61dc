"""A profile that is bad on purpose: rollouts far from the trainer, for experiments about corrections.

    python -m benchmarks.degraded_profile -o DIR [--exponent 4] [--seed 1] [--scheme int8]

Smoothing (quant/profile.py) multiplies each input channel of a layer by a power of two and divides the norm before it
by the same: the function is unchanged bit for bit, but rows of weights and tokens of activations now share one INT8
scale over channels that differ by up to 2^(2 * exponent). The small ones lose their bits. So the engine, its kernels
and its proofs are the real ones, nothing is emulated, and how coarse the rollouts are is one number: at 4, channels of
the tiny model keep between 8 and 0 bits. A profile of another model or checkpoint does the same by accident. FP8 has
an exponent in each code and loses nothing up to 8.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from appliance import console
from appliance.quant.profile import MAX_EXPONENT, Origin, Profile, Settings, Smoothing, SmoothingGroup, write_profile
from appliance.tasks.library import TINY_MODELS, TinySpec
from appliance.terms.families import LLAMA_NORMS
from appliance.terms.schemes import Scheme


def degraded_profile(spec: TinySpec, *, name: str, exponent: float, seed: int, scheme: Scheme = Scheme.INT8) -> Profile:
    """Scales 2^e with e uniform in -exponent..exponent, rounded, for every channel of every norm that feeds layers.

    exponent: 0..MAX_EXPONENT; with a part after the point only few channels have the largest scales.
    """
    if not 0 <= exponent <= MAX_EXPONENT:
        raise ValueError(f"the exponent is between 0 and {MAX_EXPONENT}, got {exponent:g}")
    draw = torch.Generator().manual_seed(seed)
    groups = []
    for layer in range(spec.num_layers):
        for norm, linears in LLAMA_NORMS.items():
            prefix = f"model.layers.{layer}."
            drawn_K = torch.rand(spec.hidden_size, generator=draw) * 2 * exponent - exponent
            groups.append(
                SmoothingGroup(
                    f"{prefix}{norm}.weight",
                    tuple(f"{prefix}{linear}.weight" for linear in linears),
                    torch.exp2(drawn_K.round()),
                )
            )
    origin = Origin(kind="calibrated", model=name)
    return Profile(origin, scheme, settings=Settings(), smoothing=Smoothing(tuple(groups)))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the profile")
    parser.add_argument("--model", choices=sorted(TINY_MODELS), default="tiny-arithmetic")
    parser.add_argument("--exponent", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scheme", choices=[str(each) for each in Scheme if each.quantised], default="int8")
    options = parser.parse_args(arguments)
    if not 0 <= options.exponent <= MAX_EXPONENT:
        parser.error(f"--exponent: between 0 and {MAX_EXPONENT}")
    spec = TINY_MODELS[options.model]
    profile = degraded_profile(
        spec, name=options.model, exponent=options.exponent, seed=options.seed, scheme=Scheme(options.scheme)
    )
    console.say(str(write_profile(profile, folder=options.output)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
