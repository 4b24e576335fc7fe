"""Choices that engines and trainers wrote, cleaned and aligned."""
