"""Rows that other projects published of several ranks and of adapters, each rebuilt by code."""
