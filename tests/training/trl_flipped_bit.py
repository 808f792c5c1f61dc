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

problems = arithmetic.splits(difficulty=2, seed=0, train_size=256, val_size=8)
trainer = train.make_trainer(train.tiny_model(Path(sys.argv[1])), problems.train, steps=1)
vllm = trainer.vllm_generation
vllm.sync_weights()

with torch.no_grad():
    trainer.model.model.norm.weight *= 1.5  # so that an engine that went on with the old weights would be wrong
said = []
with given_to_vllm("model.layers.2.mlp.up_proj.weight", lambda tensor: flip_bit(tensor, at=0.5, bit=30)):
    try:
        vllm.sync_weights()
    except SyncError as error:
        said.append(error.message)
try:
    train.greedy(trainer, problems.val)
except SyncError as error:
    said.append(error.message)
said.append(f"{train.proven_updates(vllm.llm)} updates proven")
sys.stdout.write("\n".join(said) + "\n")
