"""What a cell does step by step; the same code for resident and streamed models."""
