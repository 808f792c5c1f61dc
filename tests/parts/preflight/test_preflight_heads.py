"""vLLM's attention on a CPU is asked which widths of heads it is made for."""

import torch

from appliance.preflight.device import CPU_HEAD_SIZES


def test_the_widths_of_heads_on_a_cpu_are_vllms() -> None:
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    current_platform.import_kernels()

    def serves(size: int) -> bool:
        try:
            ops.cpu_attn_get_scheduler_metadata(
                num_reqs=1,
                num_heads=4,
                num_kv_heads=2,
                head_dim=size,
                seq_lens=torch.tensor([5], dtype=torch.int32),
                dtype=torch.bfloat16,
                query_start_loc=torch.tensor([0, 5], dtype=torch.int32),
                causal=True,
                sliding_window_size=-1,
                isa=_get_attn_isa(torch.bfloat16, 128, size),
                enable_kv_split=True,
            )
        except RuntimeError:
            return False
        return True

    assert tuple(size for size in range(1, 600) if serves(size)) == CPU_HEAD_SIZES
