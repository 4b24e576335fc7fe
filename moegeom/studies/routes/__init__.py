"""What a trace of choices holds before any checkpoint is at hand."""
