"""What changed between two peaks, line by line and module by module; data alone, no torch."""
