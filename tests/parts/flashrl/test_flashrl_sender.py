"""The sender of digests in a trainer's process, where there may be nothing but torch."""

from __future__ import annotations

import json
import subprocess
import sys

ELSEWHERE = ("numpy", "pydantic", "ray", "rich", "transformers", "typer", "verl", "vllm", "yaml")
CODE = """
import json, sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # an import of one is an error
import torch
with_torch = set(sys.modules)
from flashrl_compat.sender import with_manifest
weights = [  # no element, less than a row of a digest's product, and 32 rows with a rest
    ("a.weight", torch.zeros(0, 4)),
    ("b.weight", torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())),
    ("c.weight", torch.arange(2**18 + 5).float()),
]
sent = list(with_manifest(weights, number=7))
loaded = {name.partition(".")[0] for name in sys.modules.keys() - with_torch} - sys.stdlib_module_names
texts = [bytes(tensor.tolist()).decode() for _, tensor in (sent[0], sent[-1])]
print(json.dumps([sorted(loaded), [name for name, _ in sent], *texts]))
"""
LISTED = (
    '{"sync":7,"tensors":[["appliance.precision","torch.uint8",[256],"fcea55830f2512d6e0d91f4dca8eb250"],'
    '["a.weight","torch.bfloat16",[0,4],"29982bffa9ed21f2c85db8ffdab4cc8f"],'
    '["b.weight","torch.bfloat16",[3,2],"35669ede1cb673f0f48f32a6da80ab5f"],'
    '["c.weight","torch.bfloat16",[262149],"9a3f48c52469d4e0b30a19c84a38edfe"]]}'
)


def test_torch_alone_sends_the_promised_stream() -> None:
    """Byte for byte: trainer and engine may have the plugin in other versions."""
    child = subprocess.run([sys.executable, "-c", CODE, *ELSEWHERE], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    loaded, names, directive, listed = json.loads(child.stdout)
    assert loaded == ["appliance", "flashrl_compat"]
    assert names == ["appliance.precision", "a.weight", "b.weight", "c.weight", "appliance.manifest"]
    assert directive == '{"scheme": null, "bf16_layers": []}'.ljust(256)
    assert listed == LISTED
