"""Finds out from recorded steps what they mix over the batch, and what they change besides."""
