"""Engines that another trainer updates, under FLASHRL_CONFIG: in this process by the calls that trainers make of vLLM,
and served, by vLLM's weight transfer over HTTP."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from appliance.processes import module_argv
from appliance.terms.schemes import Scheme
from benchmarks.accept.engines import KV_BYTES, PROMPTS, SEQUENCES, Answers, answers, engine, runner_of
from benchmarks.accept.ground import Ground, RowSkipped
from benchmarks.accept.models import Tensors, make_checkpoint, read_checkpoint

PLUGINS = "flashrl_appliance,flashrl_compat"
LOG = "flashrl.log"
START_S = 400  # of a server whose libraries are read from a cold disk, or on a busy host
CHUNK = 5  # tensors of a bucket
TAKEN = re.compile(r"rank 0 took weight update (\d+) by .*?: \d+ tensors in (\S+) s, (\d+) of (\d+) layers proven")
NEVER_COMES = "a tensor that never comes"


def in_process(ground: Ground, *, config: str) -> None:
    """Each way in: other weights and back, proven; the answers move, are the same by all ways, and return bit for bit.
    At last a tensor is left out, and nothing is generated any more."""
    from flashrl_compat.plugin import register

    _set_variables(ground, config=config)
    register()
    first, other = _two_checkpoints(ground)
    llm = engine(ground, first, scheme=Scheme.BF16)  # the variable says another one
    before, seen, number = answers(llm), [], 0
    weights = {
        folder: [(name, each.to(ground.device)) for name, each in read_checkpoint(folder)] for folder in (first, other)
    }

    def try_way(way: str) -> None:
        nonlocal number
        if way == NEVER_COMES:
            _refuses(ground, llm, weights[other])
            return
        for folder in (other, first):
            number += 1
            WAYS[way](llm, weights[folder], folder=folder, number=number)
            given_answers = answers(llm)
            _hold_update(ground, number=number, update=f"{way}, update {number}")
            if folder == other:
                seen.append(given_answers)
                ground.hold(given_answers != before, "the answers did not move with the weights")
                ground.hold(given_answers == seen[0], "the answers are others than by the first way")
            else:
                ground.hold(given_answers == before, "the first weights again do not give the first answers again")

    ground.run_parts([*WAYS, NEVER_COMES], try_way)


def _by_tensor(llm: Any, weights: Tensors, *, number: int, **rest: Any) -> None:
    """TRL and OpenRLHF; with digests."""
    from flashrl_compat.sender import with_manifest

    for each in with_manifest(weights, number=number):
        runner_of(llm).get_model().load_weights([each])


def _by_buckets(llm: Any, weights: Tensors, **rest: Any) -> None:
    """NeMo-RL, whose buffer is used again."""
    left = iter(weights)
    while bucket := [(name, tensor.clone()) for name, tensor in itertools.islice(left, CHUNK)]:
        runner_of(llm).get_model().load_weights(bucket)
        for _, tensor in bucket:
            tensor.fill_(float("nan"))


def _by_reload(llm: Any, weights: Tensors, **rest: Any) -> None:
    """SkyRL and prime-rl."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = runner_of(llm)
    initialize_layerwise_reload(runner.get_model())
    _by_buckets(llm, weights)
    finalize_layerwise_reload(runner.get_model(), runner.model_config)


def _by_folder(llm: Any, weights: Tensors, *, folder: Path, **rest: Any) -> None:
    """vLLM's own call."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


WAYS = {"tensors": _by_tensor, "buckets": _by_buckets, "layerwise reload": _by_reload, "reload_weights": _by_folder}


def _refuses(ground: Ground, llm: Any, weights: Tensors) -> None:
    from appliance.errors import SyncError

    left_out = weights[len(weights) // 2][0]
    _by_buckets(llm, [(name, tensor) for name, tensor in weights if name != left_out])
    try:
        answers(llm, tokens=1)
    except SyncError as error:
        ground.hold("did not receive all its weights: " in str(error), f"it was refused otherwise: {error}")
    else:
        ground.hold(False, f"{left_out} never came, and tokens were sampled")


def served(ground: Ground, *, config: str) -> None:
    """`vllm serve`, with this process as the trainer: other weights and back by CUDA IPC, tensor by tensor and then
    packed, and by NCCL between two GPUs."""
    import torch

    def try_transport(transport: str) -> None:
        if not ground.rehearsal and transport == "nccl" and (count := torch.cuda.device_count()) < 2:
            raise RowSkipped(f"needs 2 GPUs, this host has {count}")
        _served(ground, config=config, transport=transport)

    ground.run_parts(("ipc",) if ground.rehearsal else ("ipc", "nccl"), try_transport)


def _served(ground: Ground, *, config: str, transport: str) -> None:
    import requests
    import torch

    from appliance.tasks.tiny_model import save_tokenizer
    from flashrl_compat.shared_memory import ManifestSource

    if ground.rehearsal:
        ground.stand_in("CUDA IPC of vLLM's weight transfer: shared memory")
        transport = "shm"
    _set_variables(ground, config=config)
    first, other = _two_checkpoints(ground)
    save_tokenizer(first, max_positions=512)
    if transport == "nccl":
        torch.cuda.set_device(1)
    started = time.monotonic()
    with _server(ground, first, transport=transport) as url:
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        ground.figure(f"{transport}: start of a server", time.monotonic() - started, "s")
        source = Held()
        listed = source if transport == "nccl" else ManifestSource(source)
        before, trainer, used = _answers_of_server(url), None, None
        for number, (folder, info) in enumerate(zip((other, first), ways_to_send(transport), strict=True), start=1):
            source.tensors = [(name, tensor.to(ground.device)) for name, tensor in read_checkpoint(folder)]
            if info is not used:
                client = HTTPVLLMWeightSyncClient(url)
                trainer, used = WeightTransferTrainerFactory.trainer_init(info, client=client, source=listed), info
            trainer.send_weights()
            _hold_update(ground, number=number, update=f"{transport}, update {number}")
            answers = _answers_of_server(url)
            moved = answers != before if number == 1 else answers == before
            ground.hold(moved, f"update {number} by {transport}: the answers are not those of its weights")
        version = requests.get(f"{url}/weight_info", timeout=60).json()["weight_version"]
        ground.hold(version == "2", f"the server counts {version} updates")


class Held:
    """What the trainer has now, as vLLM's senders ask for it."""

    tensors: Tensors

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.tensors)


def ways_to_send(transport: str) -> tuple[Any, Any]:
    """The arguments of vLLM's trainer side, for each of two updates."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    from flashrl_compat.shared_memory import ShmTrainerInitInfo

    whole = {
        "shm": (ShmTrainerInitInfo(rank=0), ShmTrainerInitInfo(rank=0, chunk_bytes=40_000)),
        "ipc": (IPCTrainerInitInfo(rank=0), IPCTrainerInitInfo(rank=0, packed=True)),
        "nccl": (NCCLTrainerInitInfo("127.0.0.1", _free_port(), world_size=2, rank=0),) * 2,
    }
    return whole[transport]


@contextmanager
def _server(ground: Ground, folder: Path, *, transport: str) -> Iterator[str]:
    """Start a server. Yields its address once it answers; it is gone afterwards. What it prints goes to the row's
    log."""
    port = _free_port()
    options = {
        "--served-model-name": "served",
        "--port": str(port),
        "--host": "127.0.0.1",
        "--max-model-len": "256",
        "--max-num-seqs": str(SEQUENCES),
        "--kv-cache-memory-bytes": str(KV_BYTES),
        "--gpu-memory-utilization": "0.05",
        "--weight-transfer-config": f'{{"backend": "{transport}"}}',
    }
    argv = module_argv("vllm.entrypoints.cli.main", "serve", str(folder), *itertools.chain(*options.items()))
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if transport == "ipc":
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles are pickled
    if transport == "nccl":  # this process has the second one
        variables["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    eager = ("--enforce-eager",) if ground.rehearsal else ()
    process = subprocess.Popen([*argv, *eager], env=os.environ | variables)
    try:
        _wait_for(process, url := f"http://127.0.0.1:{port}", ground=ground)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def _wait_for(process: subprocess.Popen[bytes], url: str, *, ground: Ground) -> None:
    import requests

    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        with suppress(requests.ConnectionError, requests.Timeout):
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        time.sleep(0.2)
    how = f"ended with {process.returncode}" if process.returncode is not None else f"does not answer in {START_S} s"
    ground.hold(False, f"`vllm serve` {how}")


def _answers_of_server(url: str) -> Answers:
    """Greedy tokens and their log-probs, a prompt at a time."""
    import requests

    answers_of_prompts = []
    for ids in PROMPTS:
        body = {"model": "served", "prompt": ids, "max_tokens": 16, "temperature": 0, "logprobs": 0, "ignore_eos": True}
        answer = requests.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=120)
        answer.raise_for_status()
        [choice] = answer.json()["choices"]
        answers_of_prompts.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return answers_of_prompts


def _set_variables(ground: Ground, *, config: str) -> None:
    own = {"FLASHRL_CONFIG": config, "FLASHRL_LOGGING_FILE": str(ground.folder / LOG), "VLLM_PLUGINS": PLUGINS}
    os.environ.update(own | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"})
    (ground.folder / LOG).unlink(missing_ok=True)


def _hold_update(ground: Ground, *, number: int, update: str) -> None:
    """Check an update by what the engine's worker reports of it."""
    taken = list(TAKEN.finditer((ground.folder / LOG).read_text()))
    ground.hold(len(taken) == number == int(taken[-1][1]), f"{update}: {len(taken)} updates were taken")
    _, seconds, proven, layers = taken[-1].groups()
    ground.hold(proven == layers != "0", f"{update}: {proven} of {layers} layers were proven")
    ground.figure(f"{update}, with proof", float(seconds), "s")


def _two_checkpoints(ground: Ground) -> list[Path]:
    return [make_checkpoint(ground.folder / f"model-{seed}", family="qwen2", seed=seed) for seed in (1, 2)]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
