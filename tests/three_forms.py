"""One set of problems as users of ours, of TRL and of verl have it, with the example's reward in each form."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

EXAMPLE = Path(__file__).parents[1] / "examples" / "own-task"
REWARDS = {
    "ours": "def right_sum(response, truth, *, row):\n    return float(response.strip() == truth)\n",
    "trls": (
        "def right_sum(completions, answer, **columns):\n"
        "    return [float(said.strip() == str(one)) for said, one in zip(completions, answer)]\n"
    ),
    "verls": (
        "def right_sum(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'sums' and extra_info['index'] >= 0\n"
        "    return {'score': float(solution_str.strip() == ground_truth), 'said': solution_str}\n"
    ),
}


def data_of(form: str, folder: Path, *, name: str = "problems") -> dict[str, str]:
    """A file of the example as users of each trainer have it, and what the recipe says of it."""
    rows = [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()]
    if form == "verls":
        rows_of_verl = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": row["question"]}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": row["answer"]},
                "extra_info": {"split": "train", "index": index},
            }
            for index, row in enumerate(rows)
        ]
        pq.write_table(pa.Table.from_pylist(rows_of_verl), folder / f"{name}.parquet")
        return {"train_file": f"{name}.parquet"}
    prompt_rows = [{"prompt": row["question"], "answer": int(row["answer"]), "id": n} for n, row in enumerate(rows)]
    lines = rows if form == "ours" else prompt_rows
    (folder / f"{form}-{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    fields = {"prompt": "question", "truth": "answer"} if form == "ours" else {"prompt": "prompt", "truth": "null"}
    return {"train_file": f"{form}-{name}.jsonl", **fields}
