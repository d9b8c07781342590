"""Compiles the kernels into a wheel. hatchling calls this if HATCH_BUILD_HOOK_ENABLE_CUSTOM is true (`make wheel`)."""

import os
import runpy
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Kernels(BuildHookInterface):  # type: ignore[type-arg]
    """One library for each variant of the architecture that the compiler `$CXX` (g++ if it is not set) makes."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":  # an editable install compiles at first use
            return
        table = runpy.run_path(str(Path(self.root, "src/covey/llm/native/variants.py")))
        compiler = shlex.split(os.environ.get("CXX") or "g++")
        target = subprocess.run([*compiler, "-dumpmachine"], check=True, capture_output=True, text=True).stdout.strip()
        machine = target.partition("-")[0]
        if machine not in table["VARIANTS"] or "linux" not in target:
            raise RuntimeError(f"kernels are compiled in advance for Linux on x86_64 and aarch64, not for {target}")
        self.folder = TemporaryDirectory()  # until the wheel is written
        names = table["VARIANTS"][machine][1]
        for name in names:
            build_data["force_include"][f"{self.folder.name}/{name}.so"] = f"covey/llm/native/{name}.so"

        def compile_one(name: str) -> None:
            path = f"{self.folder.name}/{name}"
            flags = [*table["flags_of"](machine, name), "-fopenmp", "-c", str(table["SOURCE"])]
            subprocess.run([*compiler, *flags, "-o", f"{path}.o"], check=True)
            # Without -fopenmp, which would name the compiler's library beside torch's.
            subprocess.run([*compiler, "-shared", "-s", f"{path}.o", "-o", f"{path}.so"], check=True)

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_one, names))
        build_data.update(pure_python=False, tag=f"py3-none-linux_{machine}")
