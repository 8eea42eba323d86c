"""What a search found: the plan, the ones around it, and why."""
