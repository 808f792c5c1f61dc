"""The trainer's side of one weight update in its own process: `-m benchmarks.accept.sender SHAPES SOCKET SYNC
BUCKET cpu|cuda`, the bucket in MiB. Random weights on the device, others for each sync, digested as they go, with the
list at the end.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from appliance.record.liveness import keep_stacks


def main() -> int:
    shapes_file, socket, sync, bucket_mib, device = sys.argv[1:]
    keep_stacks("sender")
    import torch

    from appliance.bench.job import Shapes
    from appliance.trainer.sender import DigestedWeights
    from benchmarks.accept.models import random_state

    shapes = Shapes.model_validate_json(Path(shapes_file).read_bytes())
    state = random_state(shapes, device=torch.device(device), seed=int(sync))
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    sender = BucketedWeightSender(zmq_handle=socket, bucket_size_mb=int(bucket_mib), use_shm=device == "cpu")
    asyncio.run(sender.async_send_weights(DigestedWeights(state, sync=int(sync)).__aiter__()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
