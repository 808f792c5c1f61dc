"""For a trainer: digests travel with the weights, so that what arrives is compared with what was sent.

Torch alone: neither vLLM nor verl. Any transport that carries named tensors carries it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from appliance.sync.manifest import DIRECTIVE_NAME, MANIFEST_NAME, Manifest, precision_tensor, record_tensor
from appliance.terms.schemes import AS_PLANNED


def with_manifest(
    weights: Iterable[tuple[str, Tensor]], *, number: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, Tensor]]:
    """Yield one whole weight update: (name, tensor) of each weight, FP32 rounded to `dtype`, the engine's (or left as
    it is, by torch.float32, where the engine keeps a part in FP32), and two tensors of bytes, first and last.

    weights: all of a checkpoint's, each once, on any device.  number: of the update, from 1: how many this engine has
    had, and one.  An engine under FLASHRL_CONFIG generates nothing until all of it has arrived as it was sent.
    """
    start = precision_tensor(AS_PLANNED)
    records = [record_tensor(DIRECTIVE_NAME, start)]
    device = None
    for name, tensor in weights:
        sent = tensor.detach()
        sent = sent.to(dtype) if sent.dtype is torch.float32 else sent
        if device is None:
            device = sent.device
            yield DIRECTIVE_NAME, start.to(device)
        records.append(record_tensor(name, sent))
        yield name, sent
    yield MANIFEST_NAME, Manifest(sync=number, records=tuple(records)).to_tensor().to(device or "cpu")
