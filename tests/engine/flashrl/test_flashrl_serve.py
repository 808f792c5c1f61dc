"""`FLASHRL_CONFIG=... vllm serve MODEL`: a real server in processes of its own, with nothing of verl."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
from engines import Engine, read_checkpoint, start_engine
from trainings import Finished
from vllm_server import command, starting

from appliance.engine.vllm_versions import vllm_version
from appliance.quant.profile import load_smoothing
from appliance.record.checkpoints import checkpoint_folder, newest_step
from appliance.record.plan import read_plan
from appliance.trainer.export import export_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [9, 2, 3, 4, 7]
NUM_TOKENS = 8
SEGMENTS = Path("/dev/shm")
START_S = 240  # two cores that others may use as well; 30 s on an idle machine
UPDATABLE = {
    "more": ("--weight-transfer-config", '{"backend": "shm"}'),
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class Server:
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self) -> Answer:
        body = {
            "model": "served",
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            choice = json.load(response)["choices"][0]
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def options(*more: str) -> tuple[str, ...]:
    sizes = ("--max-model-len", "128", "--kv-cache-memory-bytes", str(64 << 20))
    return ("--enforce-eager", *sizes, "--served-model-name", "served", *more)


@contextlib.contextmanager
def served(model: Path, *, folder: Path, more: tuple[str, ...] = (), **environ: str) -> Iterator[Server]:
    """A server that answers."""
    log, output = folder / "flashrl.log", folder / "server.txt"
    variables = environ | {"FLASHRL_LOGGING_FILE": str(log), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with starting(model, options=options(*more), output=output, environ=variables) as (child, port):
        wait_until_it_answers(child, port=port, output=output)
        yield Server(port=port, log=log)


def wait_until_it_answers(child: subprocess.Popen, *, port: int, output: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and child.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise AssertionError(f"the server did not start: {output.read_text()[-4000:]}")


def answer_of_fresh_engine(model: Path, **settings: object) -> Answer:
    """What an engine says in this process that our own settings tell what to do."""
    return said_by(start_engine(model, **settings))


def said_by(engine: Engine) -> Answer:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    (output,) = engine.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    answer = output.outputs[0]
    return Answer(list(answer.token_ids), [next(iter(each.values())).logprob for each in answer.logprobs])


def lines_of(log: Path) -> list[str]:
    """Without time, name and level."""
    return [line.split(" - ", 3)[3] for line in log.read_text().splitlines()]


def test_serve_is_int8_by_variables_alone_and_reloads_on_both_ranks(
    two_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """Tensor parallel 2, the head in FP32, nothing of verl, and a checkpoint taken after the start in both workers."""
    first, second = two_checkpoints
    (tmp_path / "no-verl").mkdir()
    (tmp_path / "no-verl" / "verl.py").write_text('raise RuntimeError("somebody wanted verl")')
    environ = {
        "FLASHRL_CONFIG": "int8",
        "FLASHRL_LMHEAD_FP32": "1",
        "FLASHRL_TEST_RELOAD": f"{first},{second}",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path / "no-verl"), os.environ.get("PYTHONPATH")))),
    }
    with served(first, folder=tmp_path, more=("--tensor-parallel-size", "2"), **environ) as server:
        answer = server.answer()
    assert "somebody wanted verl" not in (tmp_path / "server.txt").read_text()
    lines = lines_of(server.log)
    assert sum(line.startswith("FLASHRL_CONFIG=int8: replica 0 gets the scheme int8: ") for line in lines) == 1
    for rank in (0, 1):
        begins = f"rank {rank} has the scheme int8, lm_head in FP32; layers by kernel: "
        [kernels] = [line for line in lines if line.startswith(begins)]
        assert sum(map(int, re.findall(r"(\d+) CPUInt8ScaledMMLinearKernel\[", kernels))) == 8
        taken = [
            re.search(r"by reload_weights of (\S+): 26 tensors in .* of \d+ layers", line)
            for line in lines
            if f"rank {rank} took" in line
        ]
        assert [found[1] for found in taken] == [str(first), str(second)]
    # Two ranks round each half of a row-parallel sum to BF16 (2^-9 of it) before adding: log-probs near 5 nats move by
    # some hundredths, those of another checkpoint by whole nats.
    alone, other = (
        answer_of_fresh_engine(model, scheme="int8", lm_head_fp32=True).log_probs[0] for model in (second, first)
    )
    assert abs(answer.log_probs[0] - alone) < 0.1 < abs(answer.log_probs[0] - other)


@pytest.mark.e2e(minutes=2)
@pytest.mark.usefixtures("flashrl")
def test_the_files_that_a_run_wrote_serve_its_engine(
    short: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model, read from disk, its profile folded in: to the last bit an engine as the plan has it, to which the same
    weights come by an update. By the run's file, and by what a model trained in one flow has beside it, elsewhere."""
    run_dir, model = short.run_dir, tmp_path / "elsewhere" / "model"
    plan = read_plan(run_dir / "plan.json")
    (quantisation,) = plan.engines
    checkpoint = checkpoint_folder(run_dir, step=newest_step(run_dir))
    export_checkpoint(checkpoint, target=model, uaq=None, model=plan.model, weights=plan.weights, flow=quantisation)
    with served(model, folder=tmp_path, FLASHRL_CONFIG=str(model / "profile" / "quantization.yaml")) as server:
        answer = server.answer()
    engine = start_engine(model, scheme="int8", **quantisation.engine_arguments())
    smoothing = load_smoothing(Path(quantisation.profile))
    assert any(group.source.endswith("up_proj.weight") for group in smoothing.groups)  # whose rows are divided
    engine.load([(name, tensor.bfloat16()) for name, tensor in read_checkpoint(model)], smoothing=smoothing)
    assert answer == said_by(engine)
    assert answer != answer_of_fresh_engine(model, scheme="bf16")
    monkeypatch.setenv("FLASHRL_CONFIG", str(run_dir / "profile" / "quantization.yaml"))
    assert answer == answer_of_fresh_engine(run_dir / "model", scheme="bf16")  # as far as its arguments say


@pytest.mark.long
@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8_channel", "fp8_block"])
def test_each_scheme_is_served_and_updated_over_http(
    two_checkpoints: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    """INT8 is below, with requests in flight. FP8 without its hardware is what a file asks for."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from flashrl_compat.shared_memory import ManifestSource, ShmTrainerInitInfo

    emulated = name != "bf16"
    file = tmp_path / "served.yaml"
    file.write_text(f"configs: [{{fn: {name}, emulated: true}}]")
    config = str(file) if emulated else name
    with served(two_checkpoints[0], folder=tmp_path, FLASHRL_CONFIG=config, **UPDATABLE) as server:
        answers = [server.answer()]
        WeightTransferTrainerFactory.trainer_init(
            ShmTrainerInitInfo(rank=0),
            client=HTTPVLLMWeightSyncClient(server.url),
            source=ManifestSource(read_checkpoint(two_checkpoints[1])),
        ).send_weights()
        answers.append(server.answer())
    scheme = name.replace("_", "-")
    assert answers == [answer_of_fresh_engine(folder, scheme=scheme, emulated=emulated) for folder in two_checkpoints]
    proven = "9 of 9 layers proven, every digest as sent"
    assert re.fullmatch(rf"rank 0 took weight update 1 by a layerwise reload: .*, {proven}", lines_of(server.log)[-1])


def test_a_value_that_means_nothing_stops_serve(two_checkpoints: tuple[Path, Path]) -> None:
    """The hint too is there to be read: Python prints it below the traceback."""
    child = subprocess.run(
        command(two_checkpoints[0], port=1, options=options()),
        env=os.environ | {"FLASHRL_CONFIG": "fp8-block"},
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert child.returncode != 0
    stderr_lines = child.stderr.splitlines()
    assert "appliance.errors.RecipeError: FLASHRL_CONFIG: unknown value `fp8-block`" in stderr_lines
    hint = "hint: `fp8_block` is for `fn:` of a file; use one of `bf16`, `fp8`, `fp8_vllm`"
    assert any(line.startswith(hint) for line in stderr_lines)


def test_updates_over_http_while_requests_are_in_flight(two_checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    """vLLM's native weight transfer: no request mixes two versions, and after a broken update none is answered."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    from flashrl_compat.shared_memory import ManifestSource, ShmTrainer

    first, second = two_checkpoints
    weights = {folder: read_checkpoint(folder) for folder in two_checkpoints}
    with served(first, folder=tmp_path, FLASHRL_CONFIG="int8", **UPDATABLE) as server:
        url, old = server.url, server.answer()
        client = HTTPVLLMWeightSyncClient(url)
        client.init_weight_transfer_engine({})
        assert metric(url) == 0
        alone = {first: long_answer(url)}
        reasons: list[str] = []
        for number, folder in enumerate((second, first) * 5, start=1):
            with ThreadPoolExecutor() as pool:
                flying = [pool.submit(long_answer, url, after_s=0.05 * turn) for turn in range(8)]
                time.sleep(0.2)
                source = ManifestSource(weights[folder], taken_before=number - 1)
                ShmTrainer(client=client, source=source, chunk_bytes=40_000).send_weights()
                alone[folder] = long_answer(url)
                texts = [each.result() for each in flying]
            whole = [tokens for tokens, reason in alone.values() if reason == "length"]
            assert len(whole) == len(alone)
            assert all(any(one[: len(tokens)] == tokens for one in whole) for tokens, _ in texts), texts
            assert requests.get(f"{url}/weight_info", timeout=60).json()["weight_version"] == str(number)
            assert metric(url) == number
            reasons += [reason for _, reason in texts]
            if "abort" in reasons:  # one at least was in flight
                break
        assert "abort" in reasons
        answer = server.answer()
        assert answer == answer_of_fresh_engine(folder, scheme="int8") and (answer == old) == (folder == first)
        requests.post(f"{url}/update_weight_version", json={"new_version": "mine"}, timeout=60).raise_for_status()
        assert math.isnan(metric(url))
        segments = killed_between_two_chunks(url, second)
        code, while_open = refusal(url)
        assert code == 503 and LEFT_OPEN_SAID.fullmatch(while_open), while_open
        for call in ("start", "finish"):  # of another sender: nobody knows what came from whom
            assert requests.post(f"{url}/{call}_weight_update", json={}, timeout=60).status_code == 500
        code, for_good = refusal(url)
        assert code == 503 and BROKEN_SAID.fullmatch(for_good), for_good
        streamed = requests.post(f"{url}/v1/completions", json=REQUEST | {"stream": True}, timeout=60).text
        [told_first, *_] = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if "{" in line]
        assert BROKEN_SAID.fullmatch(told_first["error"]["message"]), streamed
    assert [name for name in segments if (SEGMENTS / name).exists()] == []


def test_the_weight_checker_compares_what_the_kernels_compute_with(
    two_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """The sequence of vLLM 0.32's documentation: pause, digests, reset, update, comparison, resume."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    from flashrl_compat.shared_memory import ManifestSource, ShmTrainer

    first, second = two_checkpoints
    with served(first, folder=tmp_path, FLASHRL_CONFIG="int8", **UPDATABLE) as server:

        def check(action: str, **more: object) -> requests.Response:
            return requests.post(f"{server.url}/weight_checker", json={"action": action, **more}, timeout=60)

        def update(folder: Path, *, taken_before: int) -> None:
            source = ManifestSource(read_checkpoint(folder), taken_before=taken_before)
            ShmTrainer(client=client, source=source, chunk_bytes=40_000).send_weights()

        def call(path: str) -> None:
            requests.post(f"{server.url}/{path}", timeout=60).raise_for_status()

        client = HTTPVLLMWeightSyncClient(server.url)
        client.init_weight_transfer_engine({})
        call("pause?mode=abort")
        checked = check("checksum")
        assert checked.status_code == 200, checked.text
        begun = checked.json()
        assert begun["proof"] == [None]
        baseline = begun["checksums"]
        layers = [name for name in baseline if re.search(r"\.(qkv|o|gate_up|down)_proj\.weight$", name)]
        assert len(layers) == 8 and "dp0:pp0:pcp0:tp0:model.layers.1.mlp.down_proj.weight" in layers
        assert check("compare", baseline=baseline).json() == {"match": True, "mismatches": [], "proof": [None]}
        assert check("compare").status_code == 400

        assert check("reset").json() == {"status": "reset"}
        gone = "rank 0 has had no weights since a reset by /weight_checker"
        unchecked = check("checksum")
        assert unchecked.status_code == 409 and gone in unchecked.text
        update(first, taken_before=0)
        compared = check("compare", baseline=baseline).json()
        assert (compared["match"], compared["mismatches"]) == (True, [])
        proof = {"rank": 0, "update": 1, "layers": 9, "layers_proven": 9, "digests_as_sent": True}
        assert [proof.items() <= rank.items() for rank in compared["proof"]] == [True]
        call("resume")
        assert server.answer() == answer_of_fresh_engine(first, scheme="int8")

        check("reset")
        call("pause?mode=abort")
        call("resume")  # before an update: nothing is generated from weights that are gone
        code, why = refusal(server.url)
        assert code == 503 and gone in why, why
        update(second, taken_before=1)
        compared = check("compare", baseline=baseline).json()
        assert compared["match"] is False and set(layers) <= set(compared["mismatches"]) <= set(baseline)
        update(first, taken_before=2)

        call("sleep?level=1")
        for action in ("checksum", "reset"):
            refused = check(action)
            assert refused.status_code == 409 and "the engine sleeps: wake it up first" in refused.text
        call("wake_up?tags=weights")  # the cache still sleeps
        assert check("compare", baseline=baseline).json()["match"] is True
        call("wake_up")
        assert server.answer() == answer_of_fresh_engine(first, scheme="int8")

        client.start_weight_update()
        for action in ("checksum", "reset"):  # neither may leave the update half done
            refused = check(action)
            assert refused.status_code == 409 and "a weight update is open on rank 0" in refused.text


def test_each_token_over_http_has_the_version_that_sampled_it(
    two_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """`weight_versions` of `/inference/v1/generate`, of a core in a process of its own: an answer kept over an update
    has both versions, whole and as a stream; one after it has the label of the trainer."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    from flashrl_compat.shared_memory import ManifestSource, ShmTrainer

    num_tokens = 120

    def generate(**more: object) -> requests.Response:
        sampling = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}
        body = {"model": "served", "token_ids": PROMPT, "sampling_params": sampling} | more
        return requests.post(f"{server.url}/inference/v1/generate", json=body, timeout=120, stream=bool(more))

    def whole(response: requests.Response) -> tuple[list[int], list[dict]]:
        [choice] = response.json()["choices"]
        return choice["token_ids"], choice["weight_versions"]

    def streamed(response: requests.Response, started: threading.Event) -> tuple[list[int], list[dict]]:
        parts = []
        for line in response.iter_lines():
            if line.startswith(b'data: {"'):
                parts += json.loads(line[6:])["choices"]
                started.set()
        assert [part["weight_versions"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        return [token for part in parts for token in part["token_ids"]], parts[-1]["weight_versions"]

    first, second = two_checkpoints
    # From 0.30 on `vllm serve` has this route only with an option that the versions before it do not know.
    more = (*UPDATABLE["more"], *(("--enable-scale-out",) if vllm_version() in ("0.30.0", "0.31.0") else ()))
    with served(first, folder=tmp_path, FLASHRL_CONFIG="int8", **(UPDATABLE | {"more": more})) as server:
        client = HTTPVLLMWeightSyncClient(server.url)
        client.init_weight_transfer_engine({})
        old, spans = whole(generate())
        assert spans == [{"version": "default", "start": 0, "end": num_tokens}]
        with ThreadPoolExecutor() as pool:
            started = threading.Event()
            stream = pool.submit(lambda: streamed(generate(stream=True), started))
            assert started.wait(timeout=60)
            other = pool.submit(generate)
            time.sleep(0.1)
            requests.post(f"{server.url}/pause?mode=keep&clear_cache=false", timeout=60).raise_for_status()
            source = ManifestSource(read_checkpoint(second), taken_before=0)
            ShmTrainer(client=client, source=source, chunk_bytes=40_000).send_weights()
            requests.post(f"{server.url}/update_weight_version", json={"new_version": "step-1"}, timeout=60)
            requests.post(f"{server.url}/resume", timeout=60).raise_for_status()
            answers = [stream.result(), whole(other.result())]
        for tokens, spans in answers:
            changed = spans[0]["end"]
            assert spans == [
                {"version": "default", "start": 0, "end": changed},
                {"version": "step-1", "start": changed, "end": num_tokens},
            ]
            assert tokens[:changed] == old[:changed] and tokens != old
        assert whole(generate())[1] == [{"version": "step-1", "start": 0, "end": num_tokens}]


def killed_between_two_chunks(url: str, checkpoint: Path) -> list[str]:
    """A trainer's update ends with it, when the server has taken two chunks and the next one lies in shared memory. The
    names of all."""
    path = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]
    trainer = subprocess.Popen(
        [sys.executable, Path(__file__).parent / "killed_sender.py", url, checkpoint],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "VLLM_LOGGING_STREAM": "ext://sys.stderr"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def next_call() -> str:
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        return trainer.stdout.readline().strip()

    with trainer:
        try:
            assert trainer.stdout.readline() == "start\n"
            segments = [next_call()]
            code, while_open = refusal(url)
            assert code == 503 and OPEN_SAID.fullmatch(while_open), while_open
            segments += [next_call(), next_call()]
            assert [(SEGMENTS / name).exists() for name in segments] == [False, False, True]
        finally:
            trainer.kill()
    return segments


REQUEST = {"model": "served", "prompt": PROMPT, "max_tokens": 120, "temperature": 0, "ignore_eos": True}
OPEN_SAID = re.compile(
    r"request \S+: a weight update is open on rank 0, begun by a layerwise reload: no weights have come yet; "
    r"ask again when the update has ended"
)
LEFT_OPEN_SAID = re.compile(
    r"request \S+: a weight update is open on rank 0, begun by a layerwise reload: "
    r"model\.layers\.0\.self_attn\.qkv_proj \(0 of 12480 elements\) and \d+ more layers wait for weights; "
    r"ask again when the update has ended"
)
BROKEN_SAID = re.compile(
    r"request \S+: the weights of rank 0 are half-updated: \d+ layers did not receive all their weights: "
    r"model\.layers\.0\..*; restart the engine: its weights are neither the old ones nor the new ones"
)


def refusal(url: str) -> tuple[int, str]:
    """Status, and what the error of a request that is not answered says."""
    answer = requests.post(f"{url}/v1/completions", json=REQUEST, timeout=60)
    return answer.status_code, answer.json()["error"]["message"]


def metric(url: str) -> float:
    """The version of the weights in the server's metrics, which has one line of its own."""
    lines = requests.get(f"{url}/metrics", timeout=60).text.splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith("flashrl:weight_version ")]
    return float(value)


def long_answer(url: str, *, after_s: float = 0) -> tuple[tuple[int, ...], str]:
    """Greedy tokens of one prompt, and why they end."""
    time.sleep(after_s)
    response = requests.post(f"{url}/v1/completions", json=REQUEST | {"return_token_ids": True}, timeout=120)
    if response.status_code == 503:  # while an update was open
        return (), "refused"
    choice = response.json()["choices"][0]
    return tuple(choice["token_ids"]), choice["finish_reason"]
