"""The GPU image, on a host without a GPU: whole, and of use to a stranger in a read-only container.

`make image-gpu` builds it. Where that was not done these tests are skipped by name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from docker import DockerClient
from images import fingerprint_of, removed_at_the_end, said_by, unavailable

from appliance.plan import build
from appliance.recipe.library import names
from appliance.recipe.load import load_recipe
from appliance.record.attestations import fingerprint

pytestmark = pytest.mark.docker
ROOT = Path(__file__).parents[2]
IMAGE = "flashrl-appliance:gpu"
LARGEST_BYTES = 10_000_000_000
STRANGER = {
    "user": "12345:23456",
    "read_only": True,
    "tmpfs": {"/tmp": "exec,mode=1777"},
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "network_mode": "none",
}
RECIPES = [name for name in names() if name != "reference"]


@pytest.fixture(scope="session")
def gpu_image(engine: DockerClient) -> str:
    if fingerprint_of(engine, IMAGE) is None:
        unavailable(f"there is no image {IMAGE}")
    if fingerprint_of(engine, IMAGE) != fingerprint():
        unavailable(f"{IMAGE} has other sources than this checkout: make image-gpu")
    return IMAGE


def program(engine: DockerClient, image: str, *line: str, **options: object) -> str:
    """stdout of a program of the image, started by a stranger; it must end well."""
    return said_by(engine, image, line[1:], entrypoint=line[0], **STRANGER, **options).decode()


def test_it_is_as_large_as_its_page_says_and_keeps_the_cpu_images_habits(engine: DockerClient, gpu_image: str) -> None:
    image = engine.images.get(gpu_image)
    config = image.attrs["Config"]
    assert image.attrs["Size"] < LARGEST_BYTES
    assert (config["User"], config["Entrypoint"]) == ("10001:0", ["tini", "-s", "--", "appliance"])
    environment = dict(each.split("=", 1) for each in config["Env"])
    assert (environment["NVIDIA_VISIBLE_DEVICES"], environment["NVIDIA_DRIVER_CAPABILITIES"]) == (
        "all",
        "compute,utility",
    )
    versions = {name.rpartition(".")[2] for name in image.labels if name.startswith("flashrl-")}
    assert versions == {"torch", "vllm", "verl", "ray", "transformers"}


def test_the_smoke_test_passes(engine: DockerClient, gpu_image: str) -> None:
    mounted = {str(ROOT / "container"): {"bind": "/opt/build", "mode": "ro"}}
    said = program(engine, gpu_image, "python", "/opt/build/smoke.py", "--flavour", "gpu", volumes=mounted)
    live = sorted({*build.VERL_PATCHES, *build.DRIVER_PATCHES})
    assert f"smoke: plugin and patches live: {', '.join(live)}\n" in said


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_planned(engine: DockerClient, gpu_image: str, recipe: str) -> None:
    said = json.loads(said_by(engine, gpu_image, ["plan", recipe, "--json"], **STRANGER))
    assert said["plan"]["cluster"]["device"] == load_recipe(recipe).cluster.device


def test_check_names_the_flag_that_gives_it_gpus(engine: DockerClient, gpu_image: str) -> None:
    line = ["check", "gsm8k-0.5b-int8"]
    with removed_at_the_end(engine.containers.run(gpu_image, line, detach=True, **STRANGER)) as container:
        code = container.wait()["StatusCode"]
        said = container.logs().decode()
    assert code == 3, said
    assert ": cluster.device: this container sees no GPU\nhint: docker run --gpus all ...\n" in said


def test_accept_lists_its_rows_and_refuses_a_host_without_a_gpu(engine: DockerClient, gpu_image: str) -> None:
    assert said_by(engine, gpu_image, ["accept", "--list"], **STRANGER).splitlines()[0].split() == [
        b"row",
        b"s",
        b"what",
    ]
    with_runs = STRANGER | {"user": "12345:0", "tmpfs": STRANGER["tmpfs"] | {"/appliance/runs": ""}}
    with removed_at_the_end(engine.containers.run(gpu_image, ["accept"], detach=True, **with_runs)) as container:
        code = container.wait()["StatusCode"]
        log_text = container.logs().decode()
    assert code == 3, log_text
    assert re.search(
        r"^error: nvidia-smi shows no GPU, and torch \S+ is installed, which needs one\n"
        r"hint: in a container: docker run --gpus all; --cpu rehearses what needs no vLLM for CPUs$",
        log_text,
        re.M,
    )


NVCC = """
cd /tmp && printf '#include <cub/cub.cuh>\\n__global__ void one(float* x) { *x = 1; }\\n' >one.cu \
    && nvcc -arch=sm_90a -std=c++17 -shared -Xcompiler -fPIC -o one.so one.cu -lcudart -lnvrtc -lcublas \
    && g++ -shared -o linked.so one.so -L"$CUDA_HOME/lib64" -lcudart \
    && python -c 'import ctypes; ctypes.CDLL("/tmp/linked.so")'
"""
C_OF_TRITON = """
import pathlib
from triton.runtime.build import compile_module_from_src
head = '#include <Python.h>'
made = 'static struct PyModuleDef it = {PyModuleDef_HEAD_INIT, "it"}; PyMODINIT_FUNC PyInit_it(void) '
print(compile_module_from_src(head + chr(10) + made + '{ return PyModule_Create(&it); }', 'it').__name__)
"""


def test_the_locked_nvcc_compiles_cudas_own_headers_and_links(engine: DockerClient, gpu_image: str) -> None:
    """As FlashInfer and DeepGEMM do at their first use."""
    assert program(engine, gpu_image, "/bin/sh", "-c", NVCC) == ""


def test_triton_finds_a_c_compiler_and_pythons_headers(engine: DockerClient, gpu_image: str) -> None:
    """It compiles its driver's module at its first use. It keeps it in /cache, which a volume is for."""
    environment = {"TRITON_CACHE_DIR": "/tmp/triton"}
    assert program(engine, gpu_image, "python", "-c", C_OF_TRITON, environment=environment) == "it\n"


def test_there_is_no_pip_and_no_cache(engine: DockerClient, gpu_image: str) -> None:
    script = (
        "for program in pip pip3 pip3.11 git; do command -v $program; done; python -m pip --version; "
        "find /var/cache/pip /var/lib/apt/lists /run/secrets /tmp /cache -mindepth 1; true"
    )
    assert program(engine, gpu_image, "/bin/sh", "-c", f"{{ {script}; }} 2>/dev/null") == ""
