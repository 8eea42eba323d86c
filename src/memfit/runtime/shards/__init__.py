"""Runs of models whose parameters are shards that ranks exchange in every pass (FSDP2)."""
