"""A program: TRL's trainer with vLLM in its process, and a bit that flips between what came and what vLLM was given.

`train` is the example's script. Prints what the update said, what a request after it said, and how many updates were
proven.
"""

import sys
from pathlib import Path

import torch
import train
from faults import flip_bit, given_to_vllm

from appliance.errors import SyncError
from appliance.tasks.built_in import arithmetic

# It is their turn in update 2 (docs/weights.md): gate_up_proj has this row as number 704 + 354 = 2 modulo 8, and
# INT8 asks for one row in eight; BF16 for 64 columns, from 2 * 64 on.
ROW, COLUMN = 354, 160


def flip_sign(tensor: torch.Tensor) -> torch.Tensor:
    return flip_bit(tensor, at=(ROW * tensor.shape[1] + COLUMN) / (tensor.numel() - 1), bit=15)


problems = arithmetic.splits(difficulty=2, seed=0, train_size=256, val_size=8)
trainer = train.make_trainer(train.tiny_model(Path(sys.argv[1])), problems.train, steps=1)
vllm = trainer.vllm_generation
vllm.sync_weights()

with torch.no_grad():
    trainer.model.model.norm.weight *= 1.5  # so that an engine that went on with the old weights would be wrong
lines = []
with given_to_vllm("model.layers.2.mlp.up_proj.weight", flip_sign):
    try:
        vllm.sync_weights()
    except SyncError as error:
        lines.append(error.message)
try:
    train.greedy(trainer, problems.val)
except SyncError as error:
    lines.append(error.message)
lines.append(f"{train.proven_updates(vllm.llm)} updates proven")
sys.stdout.write("\n".join(lines) + "\n")
