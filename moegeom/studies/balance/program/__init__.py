"""The bias that balances recorded scores, as a linear program and its dual."""
