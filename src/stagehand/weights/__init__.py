"""The model's side: where it is entered, and what it reads."""
