"""Small training programs, with a leak planted or without any, for the leak finder."""
