"""Autograd's saved tensors leave the device when the budget needs it."""
