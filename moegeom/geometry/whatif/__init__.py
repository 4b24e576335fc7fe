"""Other ways to choose experts: what a what-if computes, and what trainable modules are held to."""
