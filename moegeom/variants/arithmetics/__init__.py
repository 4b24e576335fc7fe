"""Arithmetics of engines, one TOML file each."""
