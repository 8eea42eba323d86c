"""The cases: one file per theme; ``public_*`` follow public repositories, the rest came before."""
