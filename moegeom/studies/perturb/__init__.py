"""How far a router input may drift before its experts change, and which expert takes over."""
