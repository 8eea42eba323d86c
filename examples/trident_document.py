"""TRIDENT-Net at its document's size: to be predicted and planned, without a GPU.

    memfit predict examples/trident_document.py:one_sample --device a100-40gb
    memfit plan examples/trident_document.py:job --device a100-40gb --budget 39GiB --allow bf16

36 frames of 720 x 1280, an effective batch of 16, AdamW in fp32. What a sample takes is its
activations in the 3-D U-Net: the model's weights, gradients and optimizer states together are less
than 300 MiB.
"""

from memfit_workloads.trident.job import StepSettings, build_job
from memfit_workloads.trident.sizes import DOCUMENT

job = build_job(DOCUMENT, StepSettings(batch_size=16))
one_sample = build_job(DOCUMENT, StepSettings(batch_size=1))
