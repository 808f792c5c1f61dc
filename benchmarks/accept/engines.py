"""Real vLLM engines: weights that arrive, are proven and go back again, with CUDA graphs where there are any."""

from __future__ import annotations

import importlib
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

from appliance.processes import module_argv
from appliance.terms.schemes import Scheme
from appliance.terms.settings import Quantisation
from benchmarks.accept.ground import Ground, RowFailed

KV_BYTES = 256 << 20
SEQUENCES = 16  # at once: graphs of few sizes
PROMPTS = ([1, 2, 3, 4], [9, 2, 3, 4, 7], [5, 5, 6], [100, 200, 300, 400, 17, 23])
SOCKET_JOB = "VERL_RAY_JOB_ID"

EXPERTS = r"re:.*\.experts$"  # as a recipe names them to keep them in BF16

Answers = list[tuple[list[int], list[float]]]


def engine(
    ground: Ground,
    folder: Path,
    *,
    scheme: Scheme,
    own_process: bool = False,
    lm_head_fp32: bool = False,
    ignore: tuple[str, ...] = (),
    **settings: Any,
) -> Any:
    """vLLM's LLM as a run has it, with memory for few sequences.

    own_process: of its core.  Emulated on a CPU where it has no kernels.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(own_process))
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    from vllm import LLM
    from vllm.compilation.counter import compilation_counter

    emulated = ground.rehearsal and scheme.spec.can_emulate
    if emulated:
        ground.stand_in(f"vLLM's own method of {scheme}: emulation in float")
    if ground.rehearsal:
        ground.stand_in("CUDA graphs and torch.compile: an eager engine")
    quantisation = Quantisation(scheme=scheme, emulated=emulated, ignore=ignore, lm_head_fp32=lm_head_fp32)
    arguments = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enforce_eager": ground.rehearsal,
        "max_model_len": 256,
        "max_num_seqs": SEQUENCES,
        "kv_cache_memory_bytes": KV_BYTES,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": False,
        "seed": 0,
        **({} if ground.rehearsal else {"gpu_memory_utilization": 0.05}),
    }
    if not ground.rehearsal:
        _load_kernels()
    arguments |= quantisation.engine_arguments() | settings
    before = compilation_counter.num_cudagraph_captured
    llm = LLM(str(folder), **arguments)
    if not (own_process or arguments["enforce_eager"]):
        ground.hold(compilation_counter.num_cudagraph_captured > before, "no CUDA graph was captured")
    return llm


def _load_kernels() -> None:
    """vLLM only warns, and fails later with the name of an operator."""
    try:
        importlib.import_module("vllm._C_stable_libtorch")
    except ImportError as error:
        raise RowFailed(f"vLLM's kernels do not load beside this PyTorch: {error}") from error


def runner_of(llm: Any) -> Any:
    worker = llm.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def answers(llm: Any, *, tokens: int = 16) -> Answers:
    """Greedy tokens and their log-probs, a prompt at a time: what else is in the batch moves no sum."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
    found = [llm.generate([{"prompt_token_ids": list(ids)}], params, use_tqdm=False)[0].outputs[0] for ids in PROMPTS]
    return [(list(one.token_ids), [next(iter(each.values())).logprob for each in one.logprobs]) for one in found]


def reload(ground: Ground, *, scheme_name: str, families: list[str]) -> None:
    """Other weights and back: the answers move and return bit for bit, every layer is proven, no parameter moves. A
    fresh engine of the other weights answers as the updated one (last family). Each family has its own verdict.

    families: of models.FAMILIES, one with `+head` has its head in FP32. Experts are as a plan has them: quantised by a
    scheme that has kernels for them, without graphs, and else in BF16.
    """

    def reload_family(each: str) -> None:
        family, _, head = each.partition("+")
        _reload(ground, scheme=Scheme(scheme_name), family=family, fresh=each == families[-1], lm_head_fp32=bool(head))

    ground.run_parts(families, reload_family)


def _reload(ground: Ground, *, scheme: Scheme, family: str, fresh: bool, lm_head_fp32: bool) -> None:
    from appliance.engine.attest import live_scheme
    from appliance.engine.update import WeightUpdate
    from benchmarks.accept.models import SMALLEST_OF_QWEN, make_checkpoint, read_checkpoint

    sizes = SMALLEST_OF_QWEN if family == "qwen2" and scheme is Scheme.BF16 and not ground.rehearsal else {}
    first, other = (
        make_checkpoint(ground.folder / f"{family}-{seed}", family=family, seed=seed, **sizes) for seed in (1, 2)
    )
    of_model: dict[str, Any] = {"lm_head_fp32": lm_head_fp32}
    quantises_experts = scheme.quantised and scheme.spec.experts
    if family == "qwen3-moe" and scheme.quantised:
        of_model |= {"enforce_eager": True} if quantises_experts else {"ignore": (EXPERTS,)}
    started = time.monotonic()
    llm = engine(ground, first, scheme=scheme, **of_model)
    ground.figure(f"{family}: start of an engine", time.monotonic() - started, "s")
    runner = runner_of(llm)
    live = live_scheme(runner.get_model())
    ground.hold(live.scheme is scheme, f"{scheme} was asked for, {live.scheme} runs")
    before = answers(llm)
    experts_in_bf16 = family == "qwen3-moe" and not quantises_experts
    update = WeightUpdate(runner.get_model(), model_config=runner.vllm_config.model_config, needs_manifest=True)
    seconds = taken(
        ground,
        llm,
        update,
        sync=1,
        tensors=read_checkpoint(other),
        update_name="update 1",
        kept_experts=experts_in_bf16,
    )
    ground.figure(f"{family}: a weight update with proof", seconds, "s")
    moved = answers(llm)
    ground.hold(moved != before, "the answers did not move with the weights")
    taken(
        ground,
        llm,
        update,
        sync=2,
        tensors=read_checkpoint(first),
        update_name="update 2",
        kept_experts=experts_in_bf16,
    )
    ground.hold(answers(llm) == before, "the first weights again do not give the first answers again")
    if fresh:
        second = engine(ground, other, scheme=scheme, **of_model)
        same = answers(second) == moved
        ground.hold(same, "a fresh engine answers otherwise than one that was updated to its weights")


def taken(
    ground: Ground,
    llm: Any,
    update: Any,
    *,
    sync: int,
    tensors: list[tuple[str, Any]],
    update_name: str,
    kept_experts: bool = False,
) -> float:
    """Seconds of one whole weight update from tensors on the device, digested, listed and proven.

    kept_experts: the model's experts are in BF16: of some kernels nothing but their digests is known.
    """
    import torch
    from vllm.config import set_current_vllm_config

    from appliance.sync.manifest import MANIFEST_NAME, Manifest, record_tensor

    there = [(name, tensor.to(ground.device)) for name, tensor in tensors]
    records = tuple(record_tensor(name, tensor) for name, tensor in there)
    config = runner_of(llm).vllm_config
    started = time.monotonic()
    with set_current_vllm_config(config), torch.no_grad(), ground.device:
        update.begin()
        update.load([(name, tensor.clone()) for name, tensor in there])
        update.load([(MANIFEST_NAME, Manifest(sync=sync, records=records).to_tensor())])
        proven = update.finish()
    seconds = time.monotonic() - started
    experts = sum(".experts." in name for name, _ in tensors) if kept_experts and not ground.rehearsal else 0
    _hold_proof(ground, proven, update=update_name, may_lack=experts)
    return seconds


def _hold_proof(ground: Ground, proven: Any, *, update: str, everyone: bool = True, may_lack: int = 0) -> None:
    """proven: an Acknowledgement.  everyone: every layer was asked, not only those whose turn it was.

    may_lack: so many tensors may be known by their digest alone, all or none.
    """
    said = f"{update}: {proven.layers_proven} of {proven.layers} layers were proven"
    ground.hold(not everyone or proven.layers_proven == proven.layers > 0, said)
    told = f"{update}: of {proven.unproven} tensors nothing but their digest is known"
    ground.hold(proven.unproven in (0, may_lack), told)
    if proven.unproven:
        ground.figure(f"{update}: tensors whose digest alone is known", proven.unproven, "")


def sync(ground: Ground, *, shapes: str, layers: int, scheme_name: str = "int8") -> None:
    """verl's sender in its own process, as a trainer is, to our receiver: CUDA IPC, digests, proof. Each update
    has other weights; the last one comes in small buckets, and what is larger than one by its own handle. Timed by
    this side, from the first bucket to the last proof."""
    from appliance.bench.child import qwen2_config
    from appliance.engine.update import WeightUpdate
    from appliance.terms.shapes import KNOWN
    from benchmarks.accept.models import shapes_of

    sizes = shapes_of(shapes, layers=layers)
    if ground.rehearsal:
        sizes = sizes.replace(hidden=128, intermediate=352, heads=4, kv_heads=2, layers=8)
        ground.stand_in("CUDA IPC: shared memory, where no tensor is larger than a bucket")
    folder = ground.folder / "model"
    qwen2_config(sizes).save_pretrained(folder)
    os.environ.update({SOCKET_JOB: f"accept-{os.getpid()}", "VERL_REPLICA_RANK": "0"})
    llm = engine(
        ground,
        folder,
        scheme=Scheme(scheme_name),
        load_format="dummy",
        worker_extension_cls="appliance.engine.sync.SyncWorkerExtension",
    )
    runner = runner_of(llm)
    update = WeightUpdate(
        runner.get_model(),
        model_config=runner.vllm_config.model_config,
        needs_manifest=True,
        prove_every=16,
    )
    worker = llm.llm_engine.model_executor.driver_worker
    worker = getattr(worker, "worker", worker)
    worker._appliance_update, worker._kept_scales = update, 0
    taken_ones: list[Any] = []
    worker._acknowledge = taken_ones.append  # outside of a run nobody asks for it
    came: list[list[int]] = []  # bytes of the tensors of each bucket
    load = update.load

    def counted(bucket: list[tuple[str, Any]]) -> None:
        came.append([tensor.nbytes for _, tensor in bucket])
        load(bucket)

    update.load = counted
    handle = worker._get_zmq_handle()
    (ground.folder / "shapes.json").write_text(sizes.model_dump_json())
    large, small = ground.size((512, 64), tiny=(4, 1))  # MiB; the first is verl's own
    answers_so_far: list[Answers] = []
    for number, bucket_mib in enumerate((large, large, small), start=1):
        update_name = f"update {number}, buckets of {bucket_mib} MiB"
        came.clear()
        given = (str(ground.folder / "shapes.json"), handle, str(number), str(bucket_mib), ground.device.type)
        sender = subprocess.Popen(module_argv("benchmarks.accept.sender", *given))
        threading.Thread(target=_end_with, args=(sender,), daemon=True).start()
        llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": ground.rehearsal})
        ground.hold(sender.wait(60) == 0, f"the sender ended with {sender.returncode}")
        report = taken_ones[-1]
        ground.hold(report.sync == number, f"update {number} was counted as {report.sync}")
        _hold_proof(ground, report, update=update_name, everyone=number == 1)
        answers_so_far.append(answers(llm, tokens=4))
        ground.hold(
            answers_so_far[-1] not in answers_so_far[:-1], f"{update_name}: the answers did not move with the weights"
        )
        if number > 1 and report.telemetry is not None:
            changed = report.telemetry.codes_changed_fraction or 0.0
            ground.hold(changed > 0.5, f"{update_name}: {changed:.3g} of the codes are others than before")
        rate = report.bytes / report.seconds
        ground.figure(update_name, report.seconds, "s")
        ground.figure(f"{update_name}: of it digests", report.digest_s, "s")
        ground.figure(f"{update_name}: of it proof", report.proof_s, "s")
        ground.figure(f"{update_name}: rate", rate / 1e9, "GB/s")
        if number == 2:
            whole = next(model for name, model in KNOWN.items() if name.lower().startswith(f"qwen/{shapes}"))
            ground.figure(f"all {whole.layers} layers at this rate", 2 * whole.weights / rate, "s")
    alone = sum(sizes[0] > small << 20 for sizes in came if sizes)
    ground.figure("buckets of the last update", len(came) - alone, "")
    ground.figure("tensors by a handle of their own", alone, "")
    ground.hold(len(came) - alone > 1, f"{len(came) - alone} bucket of {small} MiB held all")
    ground.hold(alone > 0 or ground.rehearsal, "no tensor came by a handle of its own")
    ground.figure("bytes", report.bytes / 1e9, "GB")


def _end_with(sender: subprocess.Popen[bytes]) -> None:
    """The receiver waits for ever: this process ends where the sender failed, whose words are in the log."""
    if sender.wait():
        os._exit(1)


def sleep(ground: Ground, *, scheme_name: str = "int8") -> None:
    """Level 2 and back, as a run does at each step: memory is free, weights arrive, the cache returns, answers too."""
    from appliance.engine.update import WeightUpdate
    from benchmarks.accept.models import make_checkpoint, read_checkpoint

    sizes = {} if ground.rehearsal else {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32}
    folder = make_checkpoint(ground.folder / "model", family="qwen2", seed=1, **sizes)
    settings = {} if ground.rehearsal else {"enable_sleep_mode": True, "kv_cache_memory_bytes": 4 << 30}
    llm = engine(ground, folder, scheme=Scheme(scheme_name), **settings)
    sleeper = llm
    if ground.rehearsal:
        ground.stand_in("sleep and wake: nothing, called as vLLM's")
        sleeper = create_autospec(type(llm), instance=True)
    runner = runner_of(llm)
    before = answers(llm)
    update = WeightUpdate(
        runner.get_model(),
        model_config=runner.vllm_config.model_config,
        needs_manifest=True,
    )
    least = ground.size(4 << 30, tiny=-(1 << 40))  # in a rehearsal others take and free memory, too
    for number in (1, 2):
        held = ground.free_bytes()
        sleeper.sleep(level=2)
        freed = ground.free_bytes() - held
        ground.figure(f"sleep {number} freed", freed / 2**30, "GiB")
        ground.hold(freed > least, f"sleep freed {freed / 2**30:.2f} GiB, of a cache of 4 GiB and the weights")
        sleeper.wake_up(tags=["weights"])
        taken(ground, llm, update, sync=number, tensors=read_checkpoint(folder), update_name=f"wake {number}")
        sleeper.wake_up(tags=["kv_cache"])
        ground.hold(answers(llm) == before, f"after wake {number} and the same weights the answers are others")


def restart(ground: Ground, *, schemes: list[str]) -> None:
    """An engine whose core is a separate process ends, its memory is free, and one of the next scheme starts."""
    import psutil

    from benchmarks.accept.models import make_checkpoint

    folder = make_checkpoint(ground.folder / "model", family="llama", seed=1)
    free, most = ground.free_bytes(), ground.size(512, tiny=1 << 20)  # in a rehearsal others take memory, too
    for scheme in schemes:
        started = time.monotonic()
        llm = engine(ground, folder, scheme=Scheme(scheme), own_process=True, enforce_eager=True)
        ground.figure(f"start of {scheme}, eager", time.monotonic() - started, "s")
        children = psutil.Process().children(recursive=True)
        ground.hold(len(children) > 0, f"the core of {scheme} is not a separate process")
        ground.hold(len(answers(llm, tokens=4)) == len(PROMPTS), f"{scheme} does not answer")
        engine_processes = [each for each in children if "resource_tracker" not in " ".join(_command(each))]
        started = time.monotonic()
        llm.llm_engine.engine_core.shutdown()
        _, alive = psutil.wait_procs(engine_processes, timeout=30)
        ground.hold(not alive, f"of {scheme} {len(alive)} processes live on after 30 s")
        ground.figure(f"end of {scheme}", time.monotonic() - started, "s")
        kept = (free - ground.free_bytes()) / 2**20
        ground.figure(f"memory that {scheme} left taken", kept, "MiB")
        ground.hold(kept < most, f"{scheme} has ended, and {kept:.0f} MiB of the GPU are still taken")


def _command(process: Any) -> list[str]:
    import psutil

    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def throughput(ground: Ground, *, shapes: str, schemes: list[str], pairs: int) -> None:
    """`appliance bench`'s own child: the same rollouts by each scheme, in turns."""
    from appliance.bench import child, job
    from benchmarks.accept.models import shapes_of

    sizes = shapes_of(shapes, layers=6).replace(batch=256, new_tokens=64)
    if ground.rehearsal:
        sizes = sizes.replace(hidden=128, intermediate=352, heads=4, kv_heads=2, layers=2, batch=4, new_tokens=4)
        ground.stand_in("FP8's kernels: emulation in float")
    else:
        import torch

        has = torch.cuda.get_device_capability()
        schemes = [each for each in schemes if Scheme(each).spec.since <= has < (Scheme(each).spec.until or (99, 0))]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    results, facts = (ground.folder / name for name in ("results.jsonl", "facts.jsonl"))
    bench_job = job.BenchJob(
        workload=sizes.workload,
        engines=tuple(
            Quantisation(scheme=Scheme(each), emulated=ground.rehearsal and Scheme(each).spec.can_emulate)
            for each in schemes
        ),
        eager=tuple(map(Scheme, schemes)) if ground.rehearsal else (),
        tensor_parallel=1,
        pairs=1 if ground.rehearsal else pairs,
        kv_bytes=ground.size(8 << 30, tiny=64 << 20),
        memory_bytes=None,
        seed=0,
        results=str(results),
        facts=str(facts),
    )
    child.run(bench_job)
    measured = job.read_lines(str(results), job.Measurement)
    ground.hold(len(measured) == bench_job.pairs * len(schemes), f"{len(measured)} measurements")
    for verdict in job.judge_schemes(measured, schemes=bench_job.schemes):
        ground.figure(f"{verdict.scheme}", verdict.tokens_per_s, "tokens/s")
        ground.figure(f"{verdict.scheme} to {schemes[0]}", verdict.ratio, "times")
