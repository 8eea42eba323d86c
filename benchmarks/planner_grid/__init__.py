"""The planner's benchmark: what it finds, against everything that could have been found."""
