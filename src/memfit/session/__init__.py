"""The live objects of one job: what strategies change and a run carries out."""
