"""Models on disk: built without their weights, and which file tensor is which."""
