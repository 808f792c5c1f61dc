"""Which of vLLM's two model runners serves a family, by vLLM's own choice: docs/gpu.md says it. No GPU is asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm import envs
from vllm.config import VllmConfig
from vllm.config import vllm as of_vllm

from appliance.terms.families import FAMILIES

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize("has_triton", [True, False])
def test_every_family_gets_the_v2_runner_where_triton_is(
    architecture: str, has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So never on a CPU, whose build of vLLM comes without."""
    envs.disable_envs_cache()  # an engine of another file has started in this process
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr(of_vllm, "HAS_TRITON", has_triton)
    monkeypatch.setattr(VllmConfig, "_get_v2_model_runner_unsupported_features", lambda self: [])
    config = VllmConfig()
    config.model_config = SimpleNamespace(
        runner_type="generate",
        architectures=[architecture],
        is_diffusion=False,
        is_moe=bool(FAMILIES[architecture].mixture),
    )
    assert config.use_v2_model_runner is has_triton
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert not config.use_v2_model_runner
