"""What the tests of two ranks run outside their own process: engines under FLASHRL_CONFIG, each in a child of its own.

python ranked_ways.py ROOT CASE...: a case is `SCHEME MODEL SEED FAULT`. An engine of ROOT/MODEL/SEED takes the weights
of the other seed and its own again by every way; then an update has that fault, on one rank. What the engines said, by
case: ROOT/found.pt.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from engines import Engine, read_checkpoint, start_engine
from toolkit_workers import OpenRLHFWorker
from torch import Tensor

RANKS = 2
LOST = "model.layers.0.mlp.up_proj.weight"
PARTS = 4  # calls of an update
Weights = list[tuple[str, Tensor]]


def cropped(weights: Weights) -> Weights:
    return [(name, tensor[:-1] if name == LOST else tensor) for name, tensor in weights]


def dropped(weights: Weights) -> Weights:
    return [(name, tensor) for name, tensor in weights if name != LOST]


def flipped(weights: Weights) -> Weights:
    """The lowest bit of one value."""
    bits = dict(weights)[LOST].clone()
    bits.view(torch.int16).view(-1)[3] ^= 1
    return [(name, bits if name == LOST else tensor) for name, tensor in weights]


# By the name of a case: the rank that gets it, what it gets, by which way, and whether a list of digests came with it.
FAULTS: dict[str, tuple[int, Callable[[Weights], Weights], str, bool]] = {
    "cropped-on-0": (0, cropped, "tensors", False),
    "dropped-on-1": (1, dropped, "tensors", False),
    "dropped-in-a-reload-on-1": (1, dropped, "reload", False),
    "flipped-on-1": (1, flipped, "tensors", True),
}


class RankedWorker(OpenRLHFWorker):
    """Named in the engine's settings."""

    def begin_reload(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model_runner.model)

    def end_reload(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model_runner.model, self.model_config)

    def take(self, folder: str, way: str, part: int, fault: str = "", number: int = 0) -> None:
        """A part of what a sender would send this rank. number: of the update, where it comes with digests."""
        from flashrl_compat.sender import with_manifest

        weights = read_checkpoint(Path(folder))
        rank, spoil, _, is_listed = FAULTS.get(fault, (-1, None, "", False))
        sent = list(with_manifest(weights, number=number)) if is_listed else weights
        sent = spoil(sent) if rank == self.rank else sent
        size = -(-len(sent) // PARTS)
        chunk = sent[part * size : (part + 1) * size]
        if way == "reload":
            self.model_runner.model.load_weights(weights=chunk)
        else:
            for each in chunk:
                self.update_weight(*each)

    def forget_segments(self) -> None:
        """vLLM's shared memory, which all who need it have: its names go, since a kill at the end leaves nobody who
        would remove them. Of the segments between ranks of a CPU vLLM's own end does not, either."""
        for each in re.findall(r"/dev/shm/(?:psm|vllm)_\S+", Path("/proc/self/maps").read_text()):
            Path(each).unlink(missing_ok=True)  # mapped more than once, and by the other rank too


def by_calls(engine: Engine, folder: Path, way: str, **fault: object) -> None:
    """Tensor by tensor as OpenRLHF, or in chunks within a layerwise reload."""
    call = engine.llm.collective_rpc
    if way == "reload":
        call("begin_reload")
    for part in range(PARTS):
        call("take", args=(str(folder), way, part), kwargs=fault)
    if way == "reload":
        call("end_reload")


def by_transfer(engine: Engine, folder: Path, way: str) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from flashrl_compat.shared_memory import ShmTrainerInitInfo

    llm = engine.llm
    client = SimpleNamespace(
        init_weight_transfer_engine=lambda info: llm.init_weight_transfer_engine({"init_info": info}),
        start_weight_update=llm.start_weight_update,
        update_weights=lambda info: llm.update_weights({"update_info": info}),
        finish_weight_update=llm.finish_weight_update,
    )
    init = ShmTrainerInitInfo(rank=0, chunk_bytes=40_000)
    WeightTransferTrainerFactory.trainer_init(init, client=client, source=read_checkpoint(folder)).send_weights()


def by_folder(engine: Engine, folder: Path, way: str) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


WAYS = {"tensors": by_calls, "reload": by_calls, "transfer": by_transfer, "folder": by_folder}


def start(folder: Path) -> Engine:
    from vllm.config.weight_transfer import WeightTransferConfig

    return start_engine(
        folder,
        scheme="bf16",
        tensor_parallel_size=RANKS,
        distributed_executor_backend="mp",
        worker_extension_cls="ranked_ways.RankedWorker",
        weight_transfer_config=WeightTransferConfig(backend="shm"),
    )


def refusal_of(ask: Callable[[], object]) -> str:
    """What an error says, or nothing."""
    try:
        ask()
    except Exception as error:  # vLLM's and ours, of three processes
        return str(error)
    return ""


def look(start_folder: Path, other: Path, *, fault: str) -> dict[str, object]:
    engine = start(start_folder)
    llm = engine.llm
    llm.collective_rpc("forget_segments")
    report: dict[str, object] = {"fresh": engine.generate(), "there": {}, "back": {}}
    for way, update in WAYS.items():
        for folder, says in ((other, report["there"]), (start_folder, report["back"])):
            update(engine, folder, way)
            says[way] = engine.generate()
    report["version"] = version = llm.llm_engine.get_weight_version()
    way = FAULTS[fault][2]
    report["update"] = refusal_of(lambda: by_calls(engine, other, way, fault=fault, number=int(version) + 1))
    report["requests"] = [refusal_of(engine.generate) for _ in range(2)]
    report["next"] = {way: refusal_of(lambda way=way: WAYS[way](engine, other, way)) for way in WAYS}
    report["last"] = refusal_of(engine.generate)
    report["version after"] = llm.llm_engine.get_weight_version()
    return report


def run(root: Path, case: str, *, result: Path) -> None:
    """In a child, which ends without vLLM's own end: the test kills what is left."""
    import vllm.plugins

    scheme, model, seed, fault = case.split()
    os.environ["FLASHRL_CONFIG"] = scheme
    vllm.plugins.load_general_plugins()
    own, other = (root / model / each for each in (seed, "21"[int(seed) - 1]))
    torch.save(look(own, other, fault=fault), result)
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """vLLM is imported once: children, cores and workers are forks."""
    from vllm import LLM  # noqa: F401
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    fork = multiprocessing.get_context("fork")
    utils.get_mp_context = multiproc_executor.get_mp_context = lambda: fork
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    root, *cases = sys.argv[1:]
    reports = {}
    for case in cases:
        report_file = Path(root, f"{case}.pt")
        child = fork.Process(target=run, args=(Path(root), case), kwargs={"result": report_file})
        child.start()
        end = time.monotonic() + 120
        while child.exitcode is None and time.monotonic() < end:  # `join` waits for its workers, too
            time.sleep(0.1)
        if child.exitcode != 0:
            sys.stderr.write(f"{case}: {child.exitcode}\n")
            sys.stderr.flush()
            os._exit(1)  # Python would wait for the child
        reports[case] = torch.load(report_file)
    torch.save(reports, Path(root, "found.pt"))


if __name__ == "__main__":
    main()
