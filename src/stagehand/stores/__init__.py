"""Where a block's truth lives: host memory, or files."""
