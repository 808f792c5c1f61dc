"""The environment variables that the launcher gives to a run's children."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

PLAN_VARIABLE = "APPLIANCE_PLAN"
EVENTS_VARIABLE = "APPLIANCE_EVENTS"  # the folder that has the events of a command that is no run
RAY_DIR_VARIABLE = "APPLIANCE_RAY_DIR"  # a folder of this user alone, with these two in it
RAY_OWN = "ray"  # the folder that Ray makes, and opens to everybody (mode 0777)
RAY_TOKEN = "token"  # of a Ray on one host; that of a cluster lies where its nodes see it
LOG_DIR_VARIABLE = "APPLIANCE_LOGS"  # the folder of an attempt's logs
RUN_VARIABLE = "APPLIANCE_RUN"  # the mark of a run's processes; its value is the run's folder
NODE_VARIABLE = "APPLIANCE_NODE"  # on a node that joined: the folder of its `appliance join`
WHEELS_VARIABLE = "APPLIANCE_WHEELS"  # set by our image: a folder with the packages of built-in models
IMAGE_VARIABLE = "APPLIANCE_IMAGE"  # set by our image: its flavour
HUB_TOKEN_VARIABLE = "HF_TOKEN_PATH"  # the hub's own: a file with the token
EXACT_VARIABLE = "APPLIANCE_EXACT_GEMMS"  # on a CPU: no row of a product depends on the others, see quant/cpu_gemm.py
EXACT_ON_CPU = {
    EXACT_VARIABLE: "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",  # all but AMX, whose sums depend on the number of rows
    "VLLM_CPU_ATTN_SPLIT_KV": "0",  # threads that share a sequence's attention make its sums depend on the batch
}
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"  # of vLLM's two, which takes the model; docs/gpu.md names it as a way out
THREADS_VARIABLE = "OMP_NUM_THREADS"
PLATFORM_VARIABLE = "VERL_PLATFORM"
TENSORBOARD_DIR_VARIABLE = "TENSORBOARD_DIR"
KV_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"  # GiB
WANDB_MODE_VARIABLE = "WANDB_MODE"
WANDB_KEY_VARIABLE = "WANDB_API_KEY"  # never set by us: the user's secret
JUDGE_KEY_VARIABLE = "APPLIANCE_JUDGE_KEY"  # nor this one; fixed: a recipe that named it could name any secret
TRACKIO_DIR_VARIABLE = "TRACKIO_DIR"
SPARE_VARIABLE = "APPLIANCE_SPARE"  # in the processes of rollout servers, see trainer/forks.py
SERVER_VARIABLES = {SPARE_VARIABLE: "1"}  # what our platform gives a rollout server
IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # vLLM's core with who asks it
RECONNECT_S = 30  # a head that has not answered for so long is gone: for Ray, and for cluster/join.py
VENDOR_VARIABLE = "VERL_ENGINE_VENDOR"
ENGINE_VENDOR = "appliance"  # under this name trainer/verl_engine.py registers an engine of verl's
_LONGEST_RAY_DIR = 36  # bytes of the folder that has RAY_OWN in it
_TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
_KUBERNETES_VARIABLE = "RAY_ENABLE_K8S_TOKEN_AUTH"  # has Kubernetes judge tokens, which knows none of ours
_VERL_SOCKET = "rl-colocate-zmq-"


def child_env(
    run_dir: Path,
    *,
    is_cpu: bool,
    threads: int,
    kv_cache_gb: int,
    offline: bool,
    backends: tuple[str, ...],
    own_engine: bool = False,
    one_flow: bool = False,
    several_words: bool = False,
    reports_support: bool = False,
    capability: tuple[int, int] | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return the (name, value) pairs that the child gets on top of the launcher's own environment.

    offline: model and data are on this host, so nothing asks the hub.  threads, kv_cache_gb (GiB): per process, CPU.
    own_engine: verl trains with trainer/verl_engine.py.  one_flow: its forward is the rollouts'.
    several_words: the trainer computes log-probs of more than the sampled word of a token.
    reports_support: engines report which words a token was drawn from, and the trainer's log-probs are over them.
    capability: of the GPUs, None on a CPU.
    """
    env = {
        PLAN_VARIABLE: str(run_dir / "plan.json"),
        RAY_DIR_VARIABLE: ray_dir(run_dir, temporary=Path(tempfile.gettempdir())),
        "VERL_USE_EXTERNAL_MODULES": "appliance.trainer.worker,appliance.engine.replica",
        "VLLM_PLUGINS": "flashrl_appliance",  # no plugin of another package
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",  # a process per core that no actor of verl's can use
        "TOKENIZERS_PARALLELISM": "false",  # forks after use would warn in every process
        "PYTHONUNBUFFERED": "1",
    }
    if offline:
        env["HF_HUB_OFFLINE"] = "1"
    if own_engine:
        env[VENDOR_VARIABLE] = ENGINE_VENDOR
    if "wandb" not in backends:
        env[WANDB_MODE_VARIABLE] = "disabled"
    if "tensorboard" in backends:
        env[TENSORBOARD_DIR_VARIABLE] = str(run_dir / "tensorboard")
    if "trackio" in backends:
        env[TRACKIO_DIR_VARIABLE] = str(run_dir.parent / ".trackio")  # one database: it is there to compare runs
    if is_cpu:
        env |= {
            PLATFORM_VARIABLE: "cpu",  # the platform that trainer/cpu_platform.py registers
            "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine for cuda and npu only; it runs on any device
            KV_CACHE_VARIABLE: str(kv_cache_gb),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default pins one thread to core 0
            **IN_ONE_PROCESS,  # lets an engine process hold its only worker, see plan/verl_args.py
            "TORCHDYNAMO_DISABLE": "1",  # needs a C++ compiler and start-up time, gains nothing at these sizes
            THREADS_VARIABLE: str(threads),  # Ray would set 1
            "OMP_WAIT_POLICY": "PASSIVE",  # trainer and engine take turns: threads that spin take the other's core
        }
        if one_flow:
            env |= EXACT_ON_CPU
        return tuple(sorted(env.items()))
    if several_words or reports_support:
        env["VERL_DISABLE_FLASH_ATTN_CE"] = (
            "1"  # a kernel of one word among all: trainer/worker.py has several, and some
        )
    if reports_support:
        env[RUNNER_VARIABLE] = "1"  # the one of vLLM's that reports them on a GPU
    env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # it knows no log-probs after temperature, and is compiled by nvcc
    if one_flow:
        env |= {
            "VLLM_BATCH_INVARIANT": "1",  # in the trainer, too: vLLM's compiled norms ask for it
            RUNNER_VARIABLE: "0",  # its log-probs have a separate kernel; V1's are torch's log_softmax
        }
    return tuple(sorted((env | _kernels_of_blocks(capability)).items()))


def _kernels_of_blocks(capability: tuple[int, int] | None) -> dict[str, str]:
    """Return what makes vLLM compute `fp8-block` as the codec has it and the proof needs it.

    Activations in FP8: Marlin's and Humming's kernels keep them in 16 bits and pack the codes, and vLLM prefers both to
    Triton's kernel, the only other one on Ada.

    Scales in float32: vLLM would have DeepGEMM round them up to powers of two, and the codes once more, on Hopper to be
    faster. On Blackwell DeepGEMM takes no other scales and fails without this rounding, so vLLM's next kernel serves,
    CUTLASS's. No other scheme of ours uses DeepGEMM.
    """
    if capability is None or capability < (8, 9):
        return {}
    env = {"VLLM_DISABLED_KERNELS": "MarlinFP8ScaledMMLinearKernel,HummingFP8ScaledMMLinearKernel"}
    if capability < (9, 0):
        return env
    return env | ({"VLLM_USE_DEEP_GEMM": "0"} if capability >= (10, 0) else {"VLLM_USE_DEEP_GEMM_E8M0": "0"})


def with_ray_token(environment: Mapping[str, str], token_file: Path, *, is_ours: bool = True) -> dict[str, str]:
    """Return the environment of a process that starts a Ray or connects to one: without the token in this file Ray
    answers nobody.

    The file is the only source: Ray would take a RAY_AUTH_TOKEN first, and turn it all off for RAY_AUTH_MODE=disabled.
    Without the two variables it shares one token among all of a user's Rays, in a file that it lets everybody read.
    is_ours: a cluster that was there already may leave its tokens to Kubernetes.
    """
    leave_out = {_TOKEN_VARIABLE, _KUBERNETES_VARIABLE} if is_ours else {_TOKEN_VARIABLE}
    others = {name: value for name, value in environment.items() if name not in leave_out}
    return {**others, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}


def ray_node_env() -> dict[str, str]:
    """Return the variables, besides the token, of every process that starts a node of a cluster or connects to one.

    Ray's own values would take more than the minute within which a loss is to be named. A control store that is gone is
    given up after RECONNECT_S (Ray's own: 60); a node notices that the store is another one, started again, within 10 s
    (60); a node is given up after five checks without an answer, 1 s apart, of 5 s each where it is silent: 5 s where
    its process is gone (15), 30 s where its host is (65).
    """
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
        "RAY_raylet_liveness_self_check_interval_ms": "10000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "5000",
    }


def weight_socket(handle: str, *, run_dir: Path | None) -> str:
    """Return the socket on which a trainer rank sends weights to the rollout worker beside it, with a name of the run's
    own.

    handle: verl's, `ipc:///tmp/rl-colocate-zmq-<Ray's job id>-replica-…`. The job id counts within a cluster, and each
    run has its own cluster: the runs of a host would all have the same sockets, and take each other's weights.
    run_dir: None, outside of a run, leaves it as it is.  Raises ValueError for a handle of another form.
    """
    if run_dir is None:
        return handle
    if _VERL_SOCKET not in handle:
        raise ValueError(f"verl's socket for weights is called {handle}, expected {_VERL_SOCKET} in it")
    return handle.replace(_VERL_SOCKET, f"appliance-{_mark(run_dir)}-weights-", 1)


def _mark(run_dir: Path) -> str:
    return hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]


def ray_dir(run_dir: Path, *, temporary: Path) -> str:
    """Return the folder of a run's Ray, one per run folder; it is made when the run starts and removed at its end."""
    name = f"appliance-{_mark(run_dir)}"
    return str(short_root(temporary, length=len(name)) / name)


def temporary_env(folder: Path) -> dict[str, str]:
    """Return the variables for processes whose temporary folder is removed with them: vLLM, verl and Ray leave sockets
    and locks in TMPDIR. Nothing where the folder could not be in TMPDIR. What torch has compiled stays where other
    processes of this user look for it."""
    temporary = Path(tempfile.gettempdir())
    if folder.parent != temporary:
        return {}
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"uid_{os.getuid()}"
    compiled = temporary / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))  # torch's own name for it
    return {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled))}


def short_root(temporary: Path, *, length: int) -> Path:
    """Return where a folder may be that has RAY_OWN in it: a long temporary folder is not used. length: of its name,
    bytes. A socket's path in RAY_OWN may have 107 bytes, Ray takes up to 66 of them."""
    return temporary if len(os.fsencode(temporary)) + 1 + length <= _LONGEST_RAY_DIR else Path("/tmp")
