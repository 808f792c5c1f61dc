"""Makes every Python process that has this folder in PYTHONPATH compute as on a CPU with AVX2 and without AVX-512.

What chooses a kernel here: ATen, oneDNN and MKL, which read a variable at their first use, and vLLM with this project,
which ask `torch.cpu`. The processor stays the one it is, so a time says what such kernels cost on this processor, and
not what another one would take. `python -m benchmarks.step --avx2` uses it.
"""

import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader

LIMITS = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
ABSENT = ("avx512", "avx10", "amx")  # how the names of what the processor does not have begin


class _Loader(SourceFileLoader):
    """Loads `torch.cpu`, which then says that the processor has nothing of `ABSENT`. Its functions ask
    `get_capabilities`: they stay as they are, because a patch holds the source of one of them."""

    def exec_module(self, module):
        super().exec_module(module)
        names = module.get_capabilities()
        assert all(any(name.startswith(absent) for name in names) for absent in ABSENT), names
        less = {name: False if name.startswith(ABSENT) else value for name, value in names.items()}
        module.get_capabilities = less.copy


class _Finder(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        spec = super().find_spec(fullname, path, target) if fullname == "torch.cpu" else None
        if spec is not None:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


os.environ.update(LIMITS)
sys.meta_path.insert(0, _Finder)
