from accelerate import Accelerator
from torch.utils.data import DataLoader
accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision='no')
loader = DataLoader([1, 2, 3], batch_size=16, shuffle=True)
