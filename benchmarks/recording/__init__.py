"""Training steps to measure on a real card: which ones, how, and in what form they are kept."""
