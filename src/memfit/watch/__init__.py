"""Watches a training script from outside and from inside, without a change to it.

Outside is the process of ``memfit run``: it starts the command, hands signals on, samples the
memory of the processes below it and says at the end why the command ended. Inside is every Python
process that the command starts and that imports torch: there hooks note steps, peaks, leaks and
how the process failed. The two halves share files in the run folder and nothing else; the outer
half never imports torch.
"""
