"""Problems as the parquet that verl's RLHFDataset reads."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from appliance.tasks.problem import Problem

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64())])),
    ]
)


def write_parquet(problems: list[Problem], *, path: Path, kind: str, split: str) -> None:
    """One row per problem, in order. kind: the task's name, by which the reward is found."""
    rows = [
        {
            "data_source": kind,
            "prompt": [{"role": "user", "content": problem.prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.truth},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
