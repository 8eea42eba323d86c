CONFIG = {
    "loader": {"size": 0o10, "workers": 4},
    'every': 4, "numbers": [1,
      2],
}
