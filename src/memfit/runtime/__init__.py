"""Carries a job out under a plan, and watches what it takes."""
