"""The simulated accelerator and the tests of it."""
