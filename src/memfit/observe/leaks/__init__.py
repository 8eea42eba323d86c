"""Find what keeps growing over equal steps, and name what holds it."""

from .finder import LeakFinder as LeakFinder
from .limits import LeakLimits as LeakLimits

__all__ = ["LeakFinder", "LeakLimits"]
