"""The libraries that a wheel with kernels inside holds: one for each set of instructions that makes a difference.

`hatch_build.py` at the root of the repository compiles them, without covey or torch installed, so this module imports
neither. No library names an OpenMP library: torch's is found when it is loaded (`build.load_prebuilt`).
"""

from collections.abc import Collection
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "csrc" / "kernels.cpp"
# -fno-strict-aliasing, because the kernels read and write the same memory as vectors of several types. With strict
# aliasing GCC 12 moved reads before these writes, depending on the processor that -march=native names.
# -ffp-contract=fast, GCC's default, because clang else fuses no product with a sum of another function.
FLAGS = ("-fno-strict-aliasing", "-ffp-contract=fast", "-std=c++17", "-fPIC")

_AVX2 = ("avx2", "fma", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AVX512_BF16 = (*_AVX512, "avx512_bf16")
_AMX = (*_AVX512_BF16, "amx_tile", "amx_bf16")
# Of each architecture: what every compiler begins with, and the instructions beyond it as /proc/cpuinfo names them, the
# best first. The kernels use no more on aarch64.
VARIANTS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "x86_64": ("x86-64", {"amx": _AMX, "avx512_bf16": _AVX512_BF16, "avx512": _AVX512, "avx2": _AVX2}),
    "aarch64": ("armv8-a", {"neon": ("asimd",)}),
}
# Intel alone makes processors with AVX-512 and without AVX512-BF16. With GCC 12's general tuning fp32 has other bits
# there than with -march=native.
TUNING = {"avx512": ["-mtune=skylake-avx512"]}


def flags_of(machine: str, name: str) -> list[str]:
    """The compiler's flags of a variant."""
    base, variants = VARIANTS[machine]
    options = [f"-m{feature.replace('avx512_', 'avx512').replace('_', '-')}" for feature in variants[name]]
    return ["-O3", f"-march={base}", *(options if machine == "x86_64" else ()), *TUNING.get(name, ()), *FLAGS]


def fitting(machine: str, features: Collection[str]) -> str | None:
    """The name of the best variant for a processor with these features; None if there is none."""
    _, variants = VARIANTS.get(machine, ("", {}))
    return next((name for name, needed in variants.items() if set(needed) <= set(features)), None)
