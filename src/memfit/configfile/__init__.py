"""Configuration files of training programs, edited in place: values change, all else stays.

A plan's settings are written into the files that a trainer reads. Nothing here imports torch.

- ``tree`` and ``yaml_text``, ``json_text``, ``toml_text``, ``python_text``: a file as text with the
  place of each value in it, and edits of that text
- ``kinds``, ``mapping``, ``recognition``: which key holds what, known or told
- ``plan_settings``, ``batches``, ``changes``: what a plan wants of the files
- ``transaction``, ``history``: several files written as one, backed up, and put back
"""
