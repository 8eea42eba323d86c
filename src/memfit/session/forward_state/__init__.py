"""Keeps what a forward changes besides its results, so that it can run again, or in pieces."""

from memfit.session.forward_state.state import Before, ForwardState, not_repeatable

__all__ = ["Before", "ForwardState", "not_repeatable"]
