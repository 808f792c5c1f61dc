from pathlib import Path

from appliance.plan.env import child_env, ray_dir


def env(**changes: object) -> dict[str, str]:
    arguments = {"is_cpu": True, "threads": 2, "kv_cache_gb": 1, "offline": True, "backends": ()} | changes
    return dict(child_env(Path("/runs/a"), **arguments))


def test_a_gpu_run_gets_nothing_of_the_cpu_flavour():
    only_cpu = env().keys() - env(is_cpu=False).keys()
    assert only_cpu >= {"VERL_PLATFORM", "VERL_ENGINE_DEVICE", "TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS"}
    assert {name for name in env() if name.startswith("VLLM_CPU_")} <= only_cpu


def test_offline_only_when_nothing_is_asked_of_the_hub():
    assert env()["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in env(offline=False)


def test_backends_get_their_place_and_wandb_is_off_unless_wanted():
    assert (env()["WANDB_MODE"], "TENSORBOARD_DIR" in env()) == ("disabled", False)
    wanted = env(backends=("wandb", "tensorboard"))
    assert ("WANDB_MODE" in wanted, wanted["TENSORBOARD_DIR"]) == (False, "/runs/a/tensorboard")


def test_ray_gets_a_short_folder_per_run():
    one, other = (ray_dir(Path(f"/runs/{name}"), temporary=Path("/tmp")) for name in ("a", "b"))
    assert one != other
    assert len(one) <= 40
    assert ray_dir(Path("/runs/a"), temporary=Path("/a/very/long/temporary/folder/somewhere")) == one
