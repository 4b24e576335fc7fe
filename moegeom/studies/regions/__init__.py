"""How many regions a router and the neurons of its experts make, on recorded tokens."""
