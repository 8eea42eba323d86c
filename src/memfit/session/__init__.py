"""The live objects of one job: what strategies change and a run runs."""
