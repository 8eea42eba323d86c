"""What of an installation would break or slow a training run, found before it starts.

Each matter has a file of its own whose checks look at a :class:`~memfit.doctor.machine.Machine` and
give findings. Packages are read by their metadata and files; torch is imported by a process of its
own alone. Nothing is changed.
"""
