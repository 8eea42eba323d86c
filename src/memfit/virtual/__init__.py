"""Fake tensors on a device that need not be there: the host is real, the device is virtual."""
