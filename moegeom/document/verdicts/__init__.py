"""Reporters of a gate's verdict, one file each."""
