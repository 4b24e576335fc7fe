"""Recordings from inside a running inference engine; an engine is a module here."""
