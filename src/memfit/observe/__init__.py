"""Looks at steps while they run: peaks, timeline, drift, budget, and what keeps growing."""
