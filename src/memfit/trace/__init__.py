"""Records a training step as data."""
