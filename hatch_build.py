"""What hatchling calls: `Kernels` if HATCH_BUILD_HOOK_ENABLE_CUSTOM is true (`make wheel`), `Readme` always."""

import os
import re
import runpy
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


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


class Readme(MetadataHookInterface):
    """README.md as the package's description: links and pictures are the repository's, at the version's tag."""

    def update(self, metadata: dict[str, Any]) -> None:
        files = f"{metadata['urls']['Repository']}/raw/v{metadata['version']}/"
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        pictures = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{files}", text)
        links = re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{files.replace('/raw/', '/blob/')}", pictures)
        metadata["readme"] = {"content-type": "text/markdown", "text": links}
