"""One file per command: COMMAND and run; imports of the library stay inside run."""
