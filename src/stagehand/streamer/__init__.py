"""Layers streamed from files under explicit depths, and a search for the best ones."""
