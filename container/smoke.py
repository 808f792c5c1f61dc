"""A smoke test of an image, run while it is built: vLLM finds the plugin, verl takes its module, each patch fits.

A patch that was made for another version or source raises, and the build ends. No engine starts: that needs a device.
"""

from __future__ import annotations

import argparse
import os
import sys

from appliance.plan import build


def main(flavour: str) -> None:
    is_cpu = flavour == "cpu"
    expected = {*build.VERL_PATCHES, *build.DRIVER_PATCHES}
    if is_cpu:
        expected |= {*build.CPU_ROLLOUT_PATCHES, *build.CPU_TRAINER_PATCHES}
        os.environ |= {"VERL_PLATFORM": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    os.environ |= {"VLLM_PLUGINS": "flashrl_appliance", "HOME": "/tmp", "VLLM_NO_USAGE_STATS": "1"}

    from vllm.plugins import load_general_plugins

    load_general_plugins()

    import appliance.trainer.worker  # noqa: F401  as verl imports it
    from appliance import patch
    from appliance.record.attestations import fingerprint
    from appliance.trainer.fit import NO_LOAD_BALANCER, _without_balancer

    patch.apply_patch(NO_LOAD_BALANCER, _without_balancer)
    live = set(patch.applied_patches())
    if live != expected:
        sys.exit(f"error: live patches {sorted(live)}, the plan of this flavour says {sorted(expected)}")
    sys.stdout.write(f"smoke: plugin and patches live: {', '.join(sorted(live))}\nfingerprint: {fingerprint()}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--flavour", choices=("cpu", "gpu"), required=True)
    main(parser.parse_args().flavour)
