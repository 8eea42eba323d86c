"""What a recorded step changes, and what of its batch it mixes: found once, asked by everybody."""
