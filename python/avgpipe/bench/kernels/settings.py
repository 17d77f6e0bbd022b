"""The options of ``avgpipe bench kernels``, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

QUESTIONS = ("limit", "adamw", "sgd", "pull", "step", "easgd", "apply", "round", "lists", "pack", "unpack")
DTYPES = ("float32", "float64", "bfloat16", "float16")
MIN_ELEMENTS = 2000  # fewer cannot be cut into the lists of tensors that some questions are about


@dataclass(frozen=True)
class KernelSettings:
    """elements: sizes to run every question at. threads: of torch on the CPU. rounds: samples of each variant.
    only: questions to run, all when empty. compiles: whether torch.compile is among the baselines.

    ValueError for values that are out of range.
    """

    elements: tuple[int, ...] = (25_000_000,)
    threads: int = 2
    device: str = "cpu"
    dtype: str = "float32"
    rounds: int = 15
    only: tuple[str, ...] = ()
    compiles: bool = True

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"--device {self.device}: use cpu or cuda")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype}: use one of {', '.join(DTYPES)}")
        for name, value in (("threads", self.threads), ("rounds", self.rounds)):
            if value < 1:
                raise ValueError(f"--{name} {value}: must be at least 1")
        for name in self.only:
            if name not in QUESTIONS:
                raise ValueError(f"--only {name}: no such question, use some of {','.join(QUESTIONS)}")

    def command(self) -> list[str]:
        """The words that measure this again, with every default spelled out."""
        words = ["avgpipe", "bench", "kernels", "--elements", ",".join(map(str, self.elements))]
        words += ["--threads", str(self.threads), "--device", self.device, "--dtype", self.dtype]
        words += ["--rounds", str(self.rounds)]
        words += ["--only", ",".join(self.only)] if self.only else []
        return words if self.compiles else [*words, "--no-compile"]

    def asks(self, question: str) -> bool:
        return not self.only or question in self.only


def parse_elements(text: str) -> tuple[int, ...]:
    """Sizes as in "25e6" or "25e6,100e6"; ValueError for what is no whole number of at least MIN_ELEMENTS."""
    sizes = []
    for word in text.split(","):
        try:
            value = float(word)
        except ValueError:
            raise ValueError(f"--elements {text}: {word!r} is no number; write 25e6 or 25e6,100e6") from None
        if not math.isfinite(value) or value != int(value) or value < MIN_ELEMENTS:
            raise ValueError(f"--elements {text}: {word} must be a whole number of at least {MIN_ELEMENTS}")
        sizes.append(int(value))
    return tuple(sizes)
