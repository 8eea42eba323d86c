"""What a run notes about itself while it goes, as data and as files; no torch.

A run folder holds ``run.json`` (what is run), ``steps.jsonl`` (a line per step), ``events.jsonl``
(a line whenever something happened) and, once it has ended, ``reason.json``. Ranks other than the
first have a folder ``rank-N`` each in it, with the same files.
"""
