"""An engine in a process of its own, started as verl starts it: what is live in its worker before a layer exists."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from first_loads import changed
from test_engine_int8 import KERNEL, write_plan
from torch import Tensor

from appliance.record.events import may_restart, read_events
from appliance.terms.environment import EVENTS_VARIABLE, PLAN_VARIABLE

pytestmark = pytest.mark.engine

# The worker writes an attestation from within, on verl's first call. Nothing of the engine is imported here: vLLM's
# entry point for plugins and the names in the settings must do.
START = """
import sys
from vllm import LLM, SamplingParams
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        **Quantisation(scheme=Scheme.INT8).engine_arguments(),
        worker_extension_cls="appliance.engine.sync.SyncWorkerExtension",
        enforce_eager=True,
        max_model_len=128,
        kv_cache_memory_bytes=64 << 20,
    )
    llm.collective_rpc("monkey_patch_model", args=(512,))
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": [9, 2, 3, 4, 7]}], params, use_tqdm=False)
    print("tokens", list(outputs[0].outputs[0].token_ids))
"""


def test_the_amx_patch_is_live_before_the_model(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    """The kernels are chosen while layers load: `[onednn]` on a host with AMX says that the patch came before."""
    script = tmp_path / "start.py"
    script.write_text(START)
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "APPLIANCE_PLAN": str(write_plan(tmp_path, scheme="int8")),
        "VERL_REPLICA_RANK": "0",
    }
    child = subprocess.run(
        [sys.executable, str(script), str(checkpoints[0])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    said = json.loads((tmp_path / "attest" / "rollout-0-0.json").read_text())
    assert said["scheme"] == "int8"
    assert said["patches"] == [
        "chunked-log-probs",
        "cpu-no-amx-tiles",
        "cpu-process-group",
        "cpu-sampling-mask-setting",
        "cpu-sampling-masks",
        "cpu-seeded-requests",
        "cpu-seeded-sampling",
        "cpu-token-ranks",
        "whole-checkpoint",
    ]
    assert said["detail"]["kernels"] == {KERNEL: 12, "UnquantizedEmbeddingMethod": 2}
    tokens = next(line for line in child.stdout.splitlines() if line.startswith("tokens "))
    assert len(json.loads(tokens.removeprefix("tokens "))) == 16


REFUSED = """
import sys
from pathlib import Path
from vllm import LLM
from appliance.record.engine_start import starting
from appliance.record.events import exit_code_of
from appliance.terms.settings import LOAD_FORMAT

def work():
    with starting():
        LLM(
            sys.argv[1],
            skip_tokenizer_init=True,
            load_format=LOAD_FORMAT,
            enforce_eager=True,
            max_model_len=128,
            kv_cache_memory_bytes=64 << 20,
        )

if __name__ == "__main__":
    sys.exit(exit_code_of(work, run_dir=Path(sys.argv[2])))
"""


def test_what_the_first_load_refuses_in_another_process_is_the_users_error(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """vLLM itself only says that there is a root cause above, and another attempt would be made of it."""
    name = "model.layers.1.mlp.up_proj.weight"

    def with_nan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        weight = tensors[name].clone()
        weight[3, 3] = float("nan")
        return tensors | {name: weight}

    script = tmp_path / "start.py"
    script.write_text(REFUSED)
    child = subprocess.run(
        [sys.executable, str(script), str(changed(checkpoints[0], tmp_path / "new", with_nan)), str(tmp_path)],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", EVENTS_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    events = [event for event in read_events(tmp_path) if event.kind == "failure"]
    assert {(event.error, event.what) for event in events} == {
        ("WeightsError", f"first load: {name} has a value that is not finite")
    }
    assert child.returncode == 4 and not may_restart(tmp_path, code=child.returncode)


def test_an_error_of_ours_is_said_by_the_process_it_was_raised_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM passes on only an error's text; kind and exit code reach the launcher as an event."""
    from appliance.errors import SyncError
    from appliance.record.events import first_failure, report_failures

    monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "plan.json"))
    with pytest.raises(SyncError), report_failures():
        raise SyncError("weight update: embed.weight came twice")
    said = first_failure(tmp_path)
    assert said is not None
    assert (said.what, said.error, said.exit_code) == ("weight update: embed.weight came twice", "SyncError", 4)
