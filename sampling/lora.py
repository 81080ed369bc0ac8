"""Which LoRA files are sampled with, and how strongly."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from store_format.errors import PrebakeError

WEIGHTS_NAME = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True)
class Lora:
    """A LoRA file and the weight that it is applied with."""

    path: Path
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `FILE` or `FILE:WEIGHT`; FILE may be the folder of a training run.

        Raises:
            PrebakeError: there is no such file, or no LoRA in the folder, or WEIGHT is no number.
        """
        name, colon, number = text.rpartition(":")
        path, weight = Path(text), 1.0
        if colon and name and not path.exists():  # or the colon is of the file's name
            path, weight = Path(name), _number(number)
            if path.exists() and not math.isfinite(weight):
                raise PrebakeError(
                    f"--lora {text}: the weight after the colon, {number!r}, is not a number. "
                    f"Give FILE:WEIGHT, such as {name}:0.8."
                )
        file = path / WEIGHTS_NAME if path.is_dir() and text else path
        if file.is_file() and file.suffix != ".safetensors":
            raise PrebakeError(f"--lora {text}: only .safetensors files are read: others run code.")
        if not file.is_file():
            what = f"no {WEIGHTS_NAME} in this folder" if path.is_dir() and text else "no such file"
            raise PrebakeError(
                f"--lora {text or repr(text)}: {what}. Give a .safetensors file or a run's folder."
            )
        return cls(file, weight)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
