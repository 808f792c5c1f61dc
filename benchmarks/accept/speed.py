"""How fast kernels are, by the benchmarks that measure them elsewhere too. No time is held against another one."""

from __future__ import annotations

from benchmarks.accept.ground import Ground

TOKENS = (16, 64, 256, 1024)


def gemm(ground: Ground, *, shapes: str) -> None:
    """BF16, INT8 and FP8 at the shapes of one layer, quantising the activations included."""
    import torch

    from benchmarks.accept.models import shapes_of
    from benchmarks.gemm import BF16, PACK, measure

    sizes = shapes_of(shapes, layers=1)
    if ground.rehearsal:
        sizes = sizes.replace(hidden=128, intermediate=352, heads=4, kv_heads=2)
        ground.stand_in("CUTLASS: the kernels for a CPU")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # the type that vLLM's kernels answer in
    rows = measure(sizes, tokens=ground.size(TOKENS, tiny=(2,)), turns=ground.size(15, tiny=1))
    for row in rows:
        batch = "packing" if row.tokens == PACK else f"{row.tokens} tokens"
        n, k = row.shape_NK
        for kernel, ms in row.ms.items():
            ground.hold(ms > 0, f"{kernel} took no time")
            ground.figure(f"{row.layer} {n} x {k}, {batch}, {kernel}", ms, "ms")
            if kernel != BF16:
                ground.figure(f"{row.layer} {n} x {k}, {batch}, {kernel} to BF16", row.faster[kernel], "times")
    kernels = {kernel for row in rows for kernel in row.ms}
    ground.hold(len(kernels) > 1, "there is no kernel beside BF16's")


def bandwidth(ground: Ground) -> None:
    """The INT8 quantiser against a plain copy of as many bytes, at 32B's shapes; its codes are the codec's."""
    from benchmarks import kernel

    if ground.rehearsal:
        ground.stand_in("Triton's INT8 quantiser: vLLM's own for CPUs")
    tiny = {name: (256, 352) for name in kernel.SHAPES_NK}
    measured = kernel.measure(
        ground.size(kernel.SHAPES_NK, tiny=tiny),
        device=ground.device.type,
        repetitions=ground.size(kernel.REPETITIONS, tiny=3),
    )
    for row in measured["rows"]:
        ground.hold(row["equals_codec"], f"{row['layer']}: the codes are not the codec's")
        ground.figure(f"{row['layer']}: quantiser", row["kernel_gb_per_s"], "GB/s")
        ground.figure(f"{row['layer']}: of the copy's bandwidth", row["of_copy_bandwidth"], "")
    ground.figure("quantising 32B once", measured["projected_quantisation_32b_s"], "s")
