"""One file per command: NAME, NEEDS_ARGUMENTS and run; imports of the library stay inside run."""
