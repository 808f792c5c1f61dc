from pathlib import Path

import pytest

from appliance.terms.environment import (
    EXACT_ON_CPU,
    RAY_OWN,
    child_env,
    ray_dir,
    short_root,
    weight_socket,
    with_ray_token,
)

DEEP_GEMM = "VLLM_USE_DEEP_GEMM"


def env(**changes: object) -> dict[str, str]:
    arguments = {"is_cpu": True, "threads": 2, "kv_cache_gb": 1, "offline": True, "backends": ()} | changes
    return dict(child_env(Path("/runs/a"), **arguments))


def test_a_gpu_run_gets_nothing_of_the_cpu_flavour():
    only_cpu = env().keys() - env(is_cpu=False).keys()
    assert only_cpu >= {"VERL_PLATFORM", "VERL_ENGINE_DEVICE", "TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS"}
    assert {name for name in env() if name.startswith("VLLM_CPU_")} <= only_cpu


def test_one_flow_asks_for_products_that_do_not_depend_on_the_batch() -> None:
    on_cpu, on_gpu = env(one_flow=True), env(is_cpu=False, one_flow=True)
    assert on_cpu == env() | EXACT_ON_CPU
    assert on_gpu["VLLM_BATCH_INVARIANT"] == "1"
    assert not {*EXACT_ON_CPU, "VLLM_BATCH_INVARIANT"} & (env().keys() | env(is_cpu=False).keys())


@pytest.mark.parametrize(
    ("capability", "set_to_0"),
    [((8, 9), set()), ((9, 0), {"VLLM_USE_DEEP_GEMM_E8M0"}), ((10, 0), {DEEP_GEMM}), ((12, 0), {DEEP_GEMM})],
)
def test_scales_of_blocks_are_no_powers_of_two(capability: tuple[int, int], set_to_0: set[str]) -> None:
    """vLLM's default is that DeepGEMM rounds them up; on Blackwell it cannot do otherwise, and fails when told to."""
    variables = {name: value for name, value in env(is_cpu=False, capability=capability).items() if "GEMM" in name}
    assert variables == dict.fromkeys(set_to_0, "0")


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_no_kernel_of_fp8_keeps_activations_in_16_bits(capability: tuple[int, int]) -> None:
    """vLLM's own choice on Ada is Marlin, for `fp8-block`."""
    disabled = env(is_cpu=False, capability=capability)["VLLM_DISABLED_KERNELS"].split(",")
    assert disabled == ["MarlinFP8ScaledMMLinearKernel", "HummingFP8ScaledMMLinearKernel"]
    assert "VLLM_DISABLED_KERNELS" not in env(is_cpu=False, capability=(8, 0)).keys() | env().keys()


def test_offline_only_when_nothing_is_asked_of_the_hub():
    assert env()["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in env(offline=False)


def test_backends_get_their_place_and_wandb_is_off_unless_wanted():
    assert (env()["WANDB_MODE"], "TENSORBOARD_DIR" in env()) == ("disabled", False)
    wanted = env(backends=("wandb", "tensorboard"))
    assert ("WANDB_MODE" in wanted, wanted["TENSORBOARD_DIR"]) == (False, "/runs/a/tensorboard")


def test_ray_gets_a_short_folder_per_run():
    first, other = (ray_dir(Path(f"/runs/{name}"), temporary=Path("/tmp")) for name in ("a", "b"))
    assert first != other
    assert len(f"{first}/{RAY_OWN}") + 66 <= 107  # of a socket's path, of which Ray takes up to 66
    assert ray_dir(Path("/runs/a"), temporary=Path("/a/very/long/temporary/folder/somewhere")) == first


@pytest.mark.parametrize(
    ("temporary", "fits"), [("/tmp/0123456789", True), ("/tmp/é123456789", False), ("/tmp/é12345678", True)]
)
def test_a_temporary_folder_counts_by_its_bytes(temporary: str, fits: bool):
    """As the path of a socket in it does."""
    assert short_root(Path(temporary), length=20) == Path(temporary if fits else "/tmp")


VERL_SOCKET = "ipc:///tmp/rl-colocate-zmq-01000000-replica-1-rank-0.sock"


def test_runs_of_one_host_send_their_weights_through_sockets_of_their_own():
    """Ray's job id is 01000000 in every cluster: with verl's names one run took the weights of another."""
    one, other = (weight_socket(VERL_SOCKET, run_dir=Path(f"/runs/{name}")) for name in ("a", "b"))
    assert one != other
    assert {each.removeprefix("ipc:///tmp/appliance-")[8:] for each in (one, other)} == {
        "-weights-01000000-replica-1-rank-0.sock"
    }


def test_a_socket_outside_of_a_run_is_verls_own():
    assert weight_socket(VERL_SOCKET, run_dir=None) == VERL_SOCKET


def test_a_socket_of_another_form_is_not_guessed():
    with pytest.raises(ValueError, match="verl's socket"):
        weight_socket("tcp://127.0.0.1:5555", run_dir=Path("/runs/a"))


def test_ray_has_its_token_from_the_file_alone():
    """Ray's own order is RAY_AUTH_TOKEN, then the file; RAY_AUTH_MODE=disabled leaves both out. Kubernetes would refuse
    it; but it may be what judges the tokens of a cluster that was there already."""
    shell = {"A": "a", "RAY_AUTH_TOKEN": "word", "RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": "/other"}
    kubernetes = {"RAY_ENABLE_K8S_TOKEN_AUTH": "true"}
    wanted = {"A": "a", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/t/token"}
    assert with_ray_token(shell | kubernetes, Path("/t/token")) == wanted
    assert with_ray_token(shell | kubernetes, Path("/t/token"), is_ours=False) == wanted | kubernetes
    assert "RAY_AUTH_TOKEN" in shell


def test_only_what_starts_a_ray_is_told_of_a_token():
    """A Ray that finds no file there ends its process: the file is made for the training alone."""
    assert [name for name in env() if name.startswith("RAY_AUTH")] == []
