"""Compiles the CUDA kernels and looks at their machine code: no spills, no local memory, 16-byte accesses.

    python csrc/tests/sass.py --nvcc nvcc --architectures "7.5;9.0"

Prints a row per kernel. Exits 1 if a kernel spills, uses local memory or a stack, or if it
lacks a 16-byte load or store of an operand. The disassembler, cuobjdump, is searched in PATH, beside nvcc
and in the packages of the extra `cuda-check`; without it only the compiler's own report is checked, and the exit status
is 77. Needs no GPU.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1]
SKIPPED = 77

# Accesses to the operands that a kernel reads and writes (Kernel, reads and writes in elastic/element.h).
OPERANDS = {
    "pull": (2, 1),
    "step": (4, 2),
    "apply": (5, 5),  # z, and the updates of 4 replicas at once
    "sgd": (4, 2),
    "momentum": (5, 3),
    "adam": (6, 4),
    "sgd_round": (7, 6),  # those of x once more for the pull, of 4 replicas at once
    "momentum_round": (8, 7),
    "adam_round": (9, 8),
    "trial_sgd": (2, 2),
    "trial_momentum": (3, 2),
    "trial_adam": (4, 2),
    "predict_sgd": (2, 1),
    "predict_adam": (3, 1),
    "correct": (3, 2),
    "copy": (1, 1),
}


def wide_accesses(name: str) -> tuple[int, int]:
    """16-byte loads and stores that a kernel needs: one for each operand, or as many for each of its formats.

    A mixed kernel moves 8 elements of float32 by two of them, and of either 16-bit format by one; one that computes in
    double also moves float64, by four.
    """
    precision = next(
        ending for ending in ("mixed_double", "mixed", "double", "float") if name.endswith(ending)
    )
    loads, stores = OPERANDS[name.removesuffix(f"_{precision}")]
    factor = {"mixed_double": 8, "mixed": 4}.get(precision, 1)
    return loads * factor, stores * factor


@dataclass
class Report:
    """What the compiler and the disassembler say about a kernel."""

    registers: int
    stack_bytes: int
    spilled_bytes: int
    instructions: Counter[str] = field(default_factory=Counter)

    def count(self, *prefixes: str) -> int:
        return sum(n for name, n in self.instructions.items() if name.startswith(prefixes))

    @property
    def wide_loads(self) -> int:
        return self.count("LDG.E.128")

    @property
    def wide_stores(self) -> int:
        return self.count("STG.E.128")

    def problems(self, name: str) -> list[str]:
        found = []
        if self.stack_bytes or self.spilled_bytes:
            found.append(f"stack of {self.stack_bytes} bytes, {self.spilled_bytes} bytes spilled")
        if self.count("LDL", "STL"):
            found.append(f"{self.count('LDL', 'STL')} accesses to local memory")
        loads, stores = wide_accesses(name)
        if self.instructions and (self.wide_loads < loads or self.wide_stores < stores):
            found.append(f"{self.wide_loads} 16-byte loads of {loads}, {self.wide_stores} stores of {stores}")
        return found


def compile_kernels(nvcc: str, architecture: str, cubin: Path) -> dict[str, Report]:
    """Compile for one architecture, "90", and read ptxas' report."""
    command = [nvcc, "-std=c++20", "-O3", "--fmad=false", f"-I{CSRC}", "-cubin", f"-arch=sm_{architecture}"]
    command += ["-Xptxas", "-v", str(CSRC / "elastic" / "cuda.cu"), "-o", str(cubin)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr}")
    pattern = re.compile(
        r"Compiling entry function 'avgpipe_(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        re.DOTALL,
    )
    return {
        name: Report(int(registers), int(stack), int(stores) + int(loads))
        for name, stack, stores, loads, registers in pattern.findall(result.stderr)
    }


def find_disassembler(nvcc: str) -> str | None:
    """cuobjdump: in PATH, beside nvcc, or where the package nvidia-cuda-cuobjdump puts it."""
    places = [shutil.which("cuobjdump"), str(Path(shutil.which(nvcc) or nvcc).resolve().parent / "cuobjdump")]
    places += [str(p) for entry in sys.path for p in Path(entry).glob("nvidia/cu*/bin/cuobjdump")]
    return next((place for place in places if place and Path(place).is_file()), None)


def disassemble(cuobjdump: str, cubin: Path, reports: dict[str, Report]) -> None:
    """Count each kernel's instructions."""
    text = subprocess.run([cuobjdump, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    instruction = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?\s*([A-Z][A-Z0-9_.]*)", re.MULTILINE)
    for part in text.split("Function : avgpipe_")[1:]:
        reports[part.split(None, 1)[0]].instructions.update(instruction.findall(part))


def check(nvcc: str, cuobjdump: str | None, architecture: str) -> bool:
    """Print a table for one architecture; whether all is well."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        reports = compile_kernels(nvcc, architecture, cubin)
        if cuobjdump:
            disassemble(cuobjdump, cubin, reports)
    print(f"sm_{architecture:<20} registers  stack  spilled  LDG.128  STG.128  local")
    for name, report in reversed(reports.items()):
        wide = (
            f"{report.wide_loads:9}{report.wide_stores:9}{report.count('LDL', 'STL'):7}"
            if cuobjdump
            else "  -"
        )
        problems = report.problems(name)
        print(
            f"{name:<24}{report.registers:9}{report.stack_bytes:7}{report.spilled_bytes:9}{wide}", *problems
        )
    return bool(reports) and not any(report.problems(name) for name, report in reports.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument(
        "--architectures", default="8.0;9.0", help='as in TORCH_CUDA_ARCH_LIST: "8.0;9.0+PTX"'
    )
    arguments = parser.parse_args()
    cuobjdump = find_disassembler(arguments.nvcc)
    entries = re.split(r"[ ,;]+", arguments.architectures.strip())
    architectures = [entry.removesuffix("+PTX").replace(".", "") for entry in entries]
    results = [check(arguments.nvcc, cuobjdump, architecture) for architecture in architectures]
    if not all(results):
        return 1
    if not cuobjdump:
        print("no cuobjdump: pip install '.[cuda-check]'; machine code was not looked at")
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
