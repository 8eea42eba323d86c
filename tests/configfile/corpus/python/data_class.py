from dataclasses import dataclass


@dataclass
class TrainConfig:
    batch_size: int = 64  # micro
    grad_accum: int = 1
    amp: str = "off"
    lr: float = 3e-4
