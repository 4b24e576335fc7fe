"""Attention of model families, one TOML file each: gates, sinks, values and outputs of heads."""
