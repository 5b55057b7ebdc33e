"""Which block is where, which comes next, and how it gets there."""
