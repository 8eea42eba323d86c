"""The commands of the documents that the workloads were built from, line by line."""
