"""A model of the memory allocator; pure Python, no torch."""
