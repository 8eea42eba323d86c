"""Finds the fastest plan that fits a budget and keeps the results."""
