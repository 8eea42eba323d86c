"""The folder that ``memfit run`` puts on PYTHONPATH; holds nothing but ``sitecustomize.py``."""
