"""Where a run's steps and events go while it goes: files, TensorBoard, W&B, or a class of yours."""
