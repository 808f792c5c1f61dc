"""What the GPUs of this host are to PyTorch, asked in its own process before any row: `-m benchmarks.accept.probe
FILE`. What CUDA cannot do at all is said once, before every row would fail by it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from appliance.errors import PreflightError
from appliance.files import Frozen
from appliance.plan.host import HostGpu
from appliance.processes import module_argv

PROBE_LIMIT_S = 180  # torch of the GPU flavour is read from a cold disk
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}  # all GPUs
MOST_OF_NVIDIA_SMI = 1 << 20  # bytes
# Of the environment, what changes how rows run. Nothing else of it is reported: it may have secrets.
TOLD = (
    *("APPLIANCE_IMAGE", "CC", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES"),
    *("HF_HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME"),
    *("NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PATH", "PYTHONPATH"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *("VIRTUAL_ENV", "VLLM_ATTENTION_BACKEND", "VLLM_CACHE_ROOT", "VLLM_USE_V2_MODEL_RUNNER", "XDG_CACHE_HOME"),
)


class Device(Frozen):
    product: str
    capability: tuple[int, int]
    """(major, minor) of CUDA."""
    memory_bytes: int
    free_bytes: int
    """Free bytes of its memory, before any row."""


class Facts(Frozen):
    python: str
    torch: str
    cuda: str
    """CUDA version that PyTorch was built for, empty for one without."""
    problem: str
    """Reason why CUDA does not work, or empty."""
    devices: tuple[Device, ...]
    """Those that PyTorch sees and that answer."""
    compiler: str
    """Its first line, or empty."""
    no_compiler: str
    """Reason why what Triton makes cannot be compiled, or empty."""
    nvcc: str
    """Path of nvcc, or empty."""
    driver: str
    """Version of the driver by nvidia-smi, or empty."""

    @property
    def lines(self) -> list[str]:
        """Return the lines for the page."""
        lines = [
            f"Python {self.python}, PyTorch {self.torch}, built for {f'CUDA {self.cuda}' if self.cuda else 'CPUs'}",
            f"driver {self.driver or 'none'}; nvcc: {self.nvcc or 'none'}; C compiler: {self.compiler or 'none'}"
            f"{f' ({self.no_compiler})' if self.no_compiler else ''}",
            f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        ]
        for number, gpu in enumerate(self.devices):
            capability, free, whole = (
                ".".join(map(str, gpu.capability)),
                gpu.free_bytes / 2**30,
                gpu.memory_bytes / 2**30,
            )
            lines.append(
                f"GPU {number}: {gpu.product}, compute capability {capability}, {free:.1f} of {whole:.1f} GiB free"
            )
        return lines


def ask(*, hidden: bool) -> Facts:
    """hidden: the GPUs are. Raises PreflightError where PyTorch cannot be asked."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "facts.json"
        environment = os.environ | import_path() | (HIDDEN if hidden else {})
        argv = module_argv("benchmarks.accept.probe", str(file))
        try:
            done = subprocess.run(
                argv, env=environment, capture_output=True, timeout=PROBE_LIMIT_S, stdin=subprocess.DEVNULL
            )
            how, stderr = f"ended with {done.returncode}", done.stderr.decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            how, stderr = f"did not answer within {PROBE_LIMIT_S} s", ""
        if file.is_file():  # written whole, whatever PyTorch does at its end
            return Facts.model_validate_json(file.read_bytes())
    last = stderr.splitlines()[-1] if stderr else "it said nothing"
    hint = f"this must work first: {sys.executable} -c 'import torch; print(torch.cuda.is_available())'"
    raise PreflightError(f"a process that asks PyTorch for GPUs {how}: {last}", hint=hint)


def import_path() -> dict[str, str]:
    """Ours, for a process that does not look into its folder."""
    own = str(Path(__file__).parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH", ""))))}


def refuse(facts: Facts, *, gpus: tuple[HostGpu, ...], environment: Mapping[str, str]) -> None:
    """Refuse a host where the rows cannot run. gpus: by nvidia-smi. Raises PreflightError."""
    if facts.devices and not facts.problem:
        return
    if not facts.cuda:
        if not gpus:
            return
        hint = "use the image flashrl-appliance:gpu, or a bundle; --cpu rehearses"
        raise PreflightError(f"there is a GPU, but torch {facts.torch} is installed, which knows none", hint=hint)
    if not gpus:
        hint = "in a container: docker run --gpus all; --cpu rehearses what needs no vLLM for CPUs"
        told = f" ({facts.driver})" if facts.driver else ""
        message = f"nvidia-smi shows no GPU{told}, and torch {facts.torch} is installed, which needs one"
        raise PreflightError(message, hint=hint)
    seen = f"nvidia-smi shows {len(gpus)} x {gpus[0].product} (driver {facts.driver or 'unknown'})"
    message = f"{seen}, and torch {facts.torch} cannot use it: {facts.problem or 'it sees no GPU'}"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not facts.devices:
        raise PreflightError(message, hint=f"CUDA_VISIBLE_DEVICES is `{visible}`: unset it, or name a GPU of this host")
    hint = f"CUDA {facts.cuda} needs a driver that is new enough (13: from 580), and /dev/nvidia* in a container"
    raise PreflightError(message, hint=hint)


def host_files(facts: Facts, *, command: list[str]) -> dict[str, bytes]:
    """Return files about the host for the archive, by name."""
    known = {name: os.environ[name] for name in TOLD if name in os.environ}
    host = {
        "command": command,
        "kernel": f"{platform.release()} {platform.version()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "environment": known,
        "facts": facts.model_dump(mode="json"),
    }
    packages = sorted({f"{one.name}=={one.version}" for one in importlib.metadata.distributions()}, key=str.lower)
    files = {"host.json": json.dumps(host, indent=1) + "\n", "packages.txt": "\n".join(packages) + "\n"}
    if program := shutil.which("nvidia-smi"):
        files["nvidia-smi.txt"] = _output([program, "-q"])[:MOST_OF_NVIDIA_SMI]
    return {name: text.encode() for name, text in files.items()}


def main() -> int:
    import torch

    devices: list[Device] = []
    problem = ""
    try:
        torch.cuda.init()
        for number in range(torch.cuda.device_count()):
            torch.ones(1 << 20, device=f"cuda:{number}").sum().item()  # a kernel for this GPU is there
            free, whole = torch.cuda.mem_get_info(number)
            named, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
            devices.append(Device(product=named, capability=capability, memory_bytes=whole, free_bytes=free))
    except (RuntimeError, AssertionError) as error:  # AssertionError: built without CUDA
        problem = str(error).strip().partition("\n")[0] or type(error).__name__
    compiler, no_compiler = _compiler()
    facts = Facts(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        problem=problem,
        devices=tuple(devices),
        compiler=compiler,
        no_compiler=no_compiler,
        nvcc=_nvcc(),
        driver=_driver(),
    )
    Path(sys.argv[1]).write_text(facts.model_dump_json())
    return 0


def _compiler() -> tuple[str, str]:
    """Return the compiler's first line, and the reason why it cannot compile what Triton has it compile: C with
    Python's headers."""
    program = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang"))), None)
    if program is None:
        return "", "Triton needs one"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text("#include <Python.h>\nint probe(void) { return PY_VERSION_HEX; }\n")
        argv = [
            program,
            "-shared",
            "-fPIC",
            f"-I{sysconfig.get_path('include')}",
            str(source),
            "-o",
            f"{folder}/probe.so",
        ]
        said = _output(argv).strip()
        made = Path(folder, "probe.so").exists()
    problem = "" if made else said.partition("\n")[0] or "it makes nothing"
    return _output([program, "--version"]).partition("\n")[0], problem


def _nvcc() -> str:
    """Return nvcc's path and release."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc")
    program = shutil.which("nvcc") or (str(home) if home.is_file() else "")
    told = _output([program, "--version"]) if program else ""
    return ", ".join([program, *(line for line in told.splitlines() if "release" in line)]) if program else ""


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    found = _output([program, "--query-gpu=driver_version", "--format=csv,noheader"]) if program else ""
    return found.partition("\n")[0].strip()


def _output(argv: list[str]) -> str:
    """stdout and stderr; what was wrong where it cannot run."""
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stdout.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
