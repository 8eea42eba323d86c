"""Steps that may run out of memory: undone, made smaller, and run again."""
