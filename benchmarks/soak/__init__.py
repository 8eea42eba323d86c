"""Trainings of very many tiny steps, which note their own memory as they go."""
